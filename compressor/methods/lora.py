"""LoRA (Hu et al. 2022): W + (alpha / rank) · B A on the chosen matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_low_rank(model: nn.Module, options: Options) -> None:
    """Add a LowRank link to every chosen matrix."""
    from compressor.deltas.kinds.low_rank import LowRank
    from compressor.models.anatomy import matrices_of

    for matrix in matrices_of(model, options.modules):
        matrix.attach(LowRank.start(matrix.original, options.rank, options.alpha, options.group))


def sizes(shape: ModelShape, options: Options) -> list[int]:
    """Entries of A and B of every matrix: r n and m r."""
    return [options.rank * side for _, rows, columns in shape.matrices(options.modules) for side in (columns, rows)]


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ r (m + n)."""
    return sum(sizes(shape, options))


METHOD = Method(
    name="lora",
    summary="low-rank update B A of frozen weights",
    formula="r(m+n) per matrix",
    attach=attach_low_rank,
    count=count,
    learning_rate=1e-3,
    source="Hu et al. 2022, section 4.1",
    reads=("modules", "rank", "alpha"),
    low_rank=True,
)
