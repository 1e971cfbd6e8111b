"""Selective tuning: W + P_Ω(S) alone, Ω chosen beforehand by the stage `select` (PaFi, MagPruning, random, RPCA places)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.methods import Method, Options

if TYPE_CHECKING:
    from compressor.anatomy import Layer


def attach_sparse(layer: Layer, module: str, options: Options) -> None:
    """Add a Sparse link to one matrix, where Ω has places in it."""
    from compressor.deltas import Sparse, attach

    omega = (options.omega or {}).get(layer.linear_path(module))
    if omega is not None:
        linear = layer.linear(module)
        attach(linear, Sparse.start(linear.weight, omega, options.group))


def count(out_features: int, in_features: int, options: Options, places: int) -> int:
    """N."""
    return places


METHOD = Method(
    name="selective",
    summary="values on the chosen places, every other weight frozen",
    formula="N per matrix",
    attach=attach_sparse,
    count=count,
    learning_rate=1e-3,
    source="Fu et al. 2023 (SAM), section 3; Liao et al. 2023 (PaFi)",
    uses_omega=True,
)
