"""Mixout (Lee et al. 2020): each step applies dense deltas to random columns; the others keep their pretrained values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_mixed(model: nn.Module, options: Options) -> None:
    """Add a Mixed link to every chosen matrix."""
    from compressor.deltas.kinds.dense import Mixed
    from compressor.models.anatomy import matrices_of

    for matrix in matrices_of(model, options.modules):
        matrix.attach(Mixed(matrix.original, options.mixout, options.group))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ m n."""
    return sum(rows * columns for _, rows, columns in shape.matrices(options.modules))


METHOD = Method(
    name="mixout",
    summary="dense deltas, random columns of which are left out of every step",
    formula="mn per matrix",
    attach=attach_mixed,
    count=count,
    learning_rate=3e-4,
    source="Lee et al. 2020, section 3",
    reads=("modules", "mixout"),
)
