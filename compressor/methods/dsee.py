"""DSEE (Chen et al. 2023, section 3.2): W + (alpha / rank) · B A + P_Ω(S), Ω chosen beforehand by the stage `select`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.methods import Method, Options, lora, selective

if TYPE_CHECKING:
    from compressor.anatomy import Layer


def attach_both(layer: Layer, module: str, options: Options) -> None:
    """Add a LowRank link, and a Sparse one where Ω has places in this matrix."""
    lora.attach_low_rank(layer, module, options)
    selective.attach_sparse(layer, module, options)


def count(out_features: int, in_features: int, options: Options, places: int) -> int:
    """r (m + n) + N (DSEE table 1)."""
    return lora.count(out_features, in_features, options, places) + places


METHOD = Method(
    name="dsee",
    summary="low-rank update plus sparse values on the places RPCA chose",
    formula="r(m+n)+N per matrix",
    attach=attach_both,
    count=count,
    learning_rate=1e-3,
    source="Chen et al. 2023 (DSEE), section 3.2",
    uses_rank=True,
    uses_omega=True,
)
