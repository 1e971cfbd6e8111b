"""Child-Tuning (Xu et al. 2021) trains a child network: redrawn at every step (`f`), or chosen by a `select` stage (`d`).

`pruning` is SAM's baseline (Fu et al. 2023): the largest changes after each step, fixed after a burn-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape, shape_of
from compressor.methods import Method, Options, selective
from compressor.methods.dense_deltas import mixout
from compressor.selection.score_names import SCOPES, SCORES

if TYPE_CHECKING:
    from torch import nn


def attach_child(model: nn.Module, options: Options) -> None:
    """Attach Sparse links at the selected entries (d), or a Thinned (f) or Projected (pruning) link to every chosen matrix.

    Raises UserError E401 for a budget of no entry, or of too many.
    """
    if options.child == "d":
        selective.attach_sparse(model, options)
        return
    from compressor.deltas.kinds.dense import Projected, Thinned
    from compressor.models.anatomy import matrices_of
    from compressor.selection.budget import require_unmasked

    matrices = matrices_of(model, options.modules)
    if options.child == "f":
        for matrix in matrices:
            matrix.attach(Thinned(matrix.original, options.reserve, options.group))
        return
    budget, schedule = kept(shape_of(model), options), {"burn_in": options.burn_in, "renew": options.renew or 1}
    require_unmasked(matrices, budget)
    for matrix in matrices:
        matrix.attach(Projected(matrix.original, budget, options.group, **schedule))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: |Ω| (d), Σ m n (f, and pruning before its positions are fixed)."""
    return places if options.child == "d" else mixout.count(shape, options, places)


def kept(shape: ModelShape, options: Options) -> int:
    """|Ω| that is left of a child network by pruning; 0 for the others. Raises UserError E401."""
    return selective.places_of(shape, options) if options.child == "pruning" else 0


METHOD = Method(
    name="child_tuning",
    summary="a child network learns: gradients drawn at every step, or chosen positions",
    formula="mn per matrix (f), |Ω| (d), mn per matrix, at last |Ω| (pruning)",
    attach=attach_child,
    count=count,
    learning_rate=3e-4,
    source="Xu et al. 2021 (Child-Tuning), sections 2.2 and 2.3; Fu et al. 2023 (SAM), section 5",
    reads=("modules", "child", "reserve", "budget", "burn_in", "renew"),
    kept=kept,
    uses_omega=True,
    scores=tuple(SCORES),
    strategies=("static", "projection"),
    scopes=SCOPES,
    omega_kinds=("d",),
    kind_key="child",
    variants={"d": (), "f": ("reserve",), "pruning": ("budget", "burn_in", "renew")},
)
