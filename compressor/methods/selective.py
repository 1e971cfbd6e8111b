"""Selective tuning: W + P_Ω(S) alone, Ω chosen beforehand by the stage `select` (SAM, Fish, PaFi, MagPruning, random)."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def count(shape: ModelShape, options: Options, places: int) -> int:
    """|Ω|."""
    return places


METHOD = Method(
    name="selective",
    summary="values on the chosen places, every other weight frozen",
    formula="|Ω|",
    attach=attach_sparse,
    count=count,
    learning_rate=1e-3,
    source="Fu et al. 2023 (SAM), section 3; Liao et al. 2023 (PaFi)",
    reads=("modules",),
    uses_omega=True,
)
