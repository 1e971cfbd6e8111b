"""Selective tuning: W + P_Ω(S) alone. Ω is chosen beforehand by the stage `select` (SAM, Fish, PaFi, MagPruning, random), or
while training (ID3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn

    from compressor.cost import ModelShape


def attach_sparse(model: nn.Module, options: Options) -> None:
    """Add a Sparse link to every chosen matrix in which Ω has places."""
    from compressor.anatomy import matrices_of
    from compressor.deltas import Sparse

    for matrix in matrices_of(model, options.modules):
        omega = (options.omega or {}).get(matrix.path)
        if omega is not None and len(omega):
            matrix.attach(Sparse.start(matrix.original, omega, options.group))


def attach_selected(model: nn.Module, options: Options) -> None:
    """Sparse links on the chosen places, or growing ones for a strategy that chooses while training."""
    if options.strategy == "static":
        attach_sparse(model, options)
        return
    from compressor.anatomy import matrices_of
    from compressor.cost import shape_of
    from compressor.selection.gradients import Heuristic
    from compressor.selection.growth import plant

    plant(
        model,
        matrices_of(model, options.modules),
        count(shape_of(model), options, 0),
        heuristic=Heuristic(options.exp, options.eps),
        schedule=options.schedule,
        repeat=options.strategy == "repeat",
        group=options.group,
    )


def count(shape: ModelShape, options: Options, places: int) -> int:
    """|Ω|."""
    return places if options.strategy == "static" else places_of(shape, options)


def places_of(shape: ModelShape, options: Options) -> int:
    """|Ω| of a budget over all chosen matrices. Raises UserError E401 where it is none of their weights, or more than all."""
    from compressor.cost import Places

    count = Places.of_budget(options.modules, options.budget).total(shape)
    size = sum(out * into for _, out, into in shape.matrices(options.modules))
    if not 0 < count <= size:
        raise UserError("E401", f"budget {options.budget} is {count:,} of {size:,} places", "Give another budget")
    return count


METHOD = Method(
    name="selective",
    summary="values on the chosen places, every other weight frozen",
    formula="|Ω|",
    attach=attach_selected,
    count=count,
    learning_rate=1e-3,
    source="Fu et al. 2023 (SAM), section 3; Liao et al. 2023 (PaFi); Agarwal et al. 2024 (ID3), section 3",
    reads=("modules", "strategy", "budget", "checkpoints", "schedule", "exp", "eps"),
    uses_omega=True,
    omega_kinds=("static",),
    kind_key="strategy",
    variants={
        "static": (),
        "increment": ("budget", "checkpoints", "schedule", "exp", "eps"),
        "repeat": ("budget", "schedule", "exp", "eps"),
    },
)
