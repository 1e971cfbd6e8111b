"""VeRA (Kopiczko et al. 2024): W + diag(b) B diag(d) A with frozen random A and B that all matrices of one shape share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_vera(model: nn.Module, options: Options) -> None:
    """Add a Vera link to every chosen matrix. Its random matrices follow from torch's random state."""
    import torch

    from compressor.deltas.kinds.vera import Drawn, Vera
    from compressor.deltas.sources import unused_name
    from compressor.models.anatomy import matrices_of

    seed = int(torch.randint(2**31, (), device="cpu"))
    drawn: dict[tuple[int, int], Drawn] = {}
    for matrix in matrices_of(model, options.modules):
        rows, columns = shape = tuple(matrix.original.shape)
        if shape not in drawn:
            name = unused_name(model, f"{options.group}.vera.{rows}x{columns}")
            drawn[shape] = Drawn(name, options.group, seed=seed, rank=options.rank, out=rows, into=columns)
        matrix.attach(Vera.start(matrix.original, drawn[shape], options.group))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Σ (m + r)."""
    return sum(rows + options.rank for _, rows, _ in shape.matrices(options.modules))


METHOD = Method(
    name="vera",
    summary="two trained vectors that scale a frozen random low-rank update",
    formula="m+r per matrix",
    attach=attach_vera,
    count=count,
    learning_rate=1e-2,
    source="Kopiczko et al. 2024 (VeRA), section 3.1",
    reads=("modules", "rank"),
    low_rank=True,
    rank_limited=False,
)
