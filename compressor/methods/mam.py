"""MAM (He et al. 2022): a prefix in every attention, and a scaled adapter in parallel to every FFN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options, adapter, prefix

if TYPE_CHECKING:
    from torch import nn

SCALE = 4.0
"""Scale s of the parallel adapters in the paper's experiments."""


def attach_mixed(model: nn.Module, options: Options) -> None:
    """Insert the prefixes and the parallel adapters. The adapters' up-projections start at 0."""
    from compressor.deltas.inserts import insert
    from compressor.deltas.kinds.adapter import ParallelAdapter
    from compressor.deltas.sources import PlainTensors
    from compressor.models.anatomy import matrices_of

    prefix.attach_prefixes(model, options)
    for matrix in matrices_of(model, ("ffn_out",)):
        source = PlainTensors(ParallelAdapter.tensors(matrix.original[:, 0], options.bottleneck, std=0.0))
        change = ParallelAdapter(source, SCALE, options.group)
        insert(matrix.owner, change)
        change.enter(model)


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: those of the prefixes, and Σ (2 b d + b + d)."""
    behind = sum(adapter.size(rows, options.bottleneck) for _, rows, _ in shape.matrices(("ffn_out",)))
    return prefix.count(shape, options, places) + behind


METHOD = Method(
    name="mam",
    summary="a prefix in every attention and an adapter beside every FFN",
    formula="2ld + 2bd+b+d per block",
    attach=attach_mixed,
    count=count,
    learning_rate=1e-3,
    source="He et al. 2022 (Towards a unified view), section 4.6",
    reads=("length", "reparametrize", "bottleneck"),
    defaults={None: {"length": 30, "bottleneck": 512}},
    mergeable=False,
)
