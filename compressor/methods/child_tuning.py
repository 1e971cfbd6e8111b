"""Child-Tuning (Xu et al. 2021) trains a child network: redrawn at every step (`f`), or chosen by a `select` stage (`d`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options, mixout, selective
from compressor.selection.score_names import SCOPES, SCORES

if TYPE_CHECKING:
    from torch import nn


def attach_child(model: nn.Module, options: Options) -> None:
    """Attach Sparse links at the selected entries (d), or a Thinned link to every chosen matrix (f)."""
    if options.child == "d":
        selective.attach_sparse(model, options)
        return
    from compressor.deltas.kinds.dense import Thinned
    from compressor.models.anatomy import matrices_of

    for matrix in matrices_of(model, options.modules):
        matrix.attach(Thinned(matrix.original, options.reserve, options.group))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: |Ω| (d), Σ m n (f)."""
    return places if options.child == "d" else mixout.count(shape, options, places)


METHOD = Method(
    name="child_tuning",
    summary="a child network learns: gradients drawn at every step, or chosen positions",
    formula="mn per matrix (f), |Ω| (d)",
    attach=attach_child,
    count=count,
    learning_rate=3e-4,
    source="Xu et al. 2021 (Child-Tuning), sections 2.2 and 2.3",
    reads=("modules", "child", "reserve"),
    uses_omega=True,
    scores=SCORES,
    strategies=("static",),
    scopes=SCOPES,
    omega_kinds=("d",),
    kind_key="child",
    variants={"d": (), "f": ("reserve",)},
)
