"""Diff pruning (Guo et al. 2021): dense deltas with learned gates, reduced to |Ω| entries halfway through training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape, shape_of
from compressor.methods import Method, Options, selective
from compressor.methods.dense_deltas import mixout

if TYPE_CHECKING:
    from torch import nn


def attach_gated(model: nn.Module, options: Options) -> None:
    """Add a Gated link to every chosen matrix. Raises UserError E401 for a budget of no entry, or of too many."""
    from compressor.deltas.kinds.dense import Gated
    from compressor.models.anatomy import matrices_of
    from compressor.selection.budget import require_unmasked

    budget, matrices = selective.places_of(shape_of(model), options), matrices_of(model, options.modules)
    require_unmasked(matrices, budget)
    settings = {"grouped": options.group_gates, "burn_in": options.burn_in, "renew": options.renew}
    for matrix in matrices:
        matrix.attach(Gated(matrix.original, budget, options.penalty, options.group, **settings))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ 2 m n, a value and a gate for every weight, and with `group_gates` one a matrix."""
    matrices = len(shape.matrices(options.modules)) if options.group_gates else 0
    return 2 * mixout.count(shape, options, places) + matrices


METHOD = Method(
    name="diff_pruning",
    summary="dense deltas behind learned gates, then the largest of them alone",
    formula="2mn per matrix, at last |Ω|",
    attach=attach_gated,
    count=count,
    learning_rate=3e-4,
    mask_learning_rate=0.1,
    source="Guo et al. 2021, sections 3.1 to 3.3",
    reads=("modules", "budget", "penalty", "group_gates", "burn_in", "renew", "mask_learning_rate", "final_learning_rate"),
    kept=selective.places_of,
    scores=("learned gates",),
    strategies=("projection",),
    scopes=("global",),
)
