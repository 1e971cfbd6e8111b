"""LoRA (Hu et al. 2022): W + (alpha / rank) · B A on the chosen matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.methods import Method, Options

if TYPE_CHECKING:
    from compressor.anatomy import Layer


def attach_low_rank(layer: Layer, module: str, options: Options) -> None:
    """Add a LowRank link to one matrix of one block."""
    from compressor.deltas import LowRank, attach

    linear = layer.linear(module)
    attach(linear, LowRank.start(linear.weight, options.rank, options.alpha, options.group))


def count(out_features: int, in_features: int, options: Options, places: int) -> int:
    """r (m + n)."""
    return options.rank * (out_features + in_features)


METHOD = Method(
    name="lora",
    summary="low-rank update B A of frozen weights",
    formula="r(m+n) per matrix",
    attach=attach_low_rank,
    count=count,
    learning_rate=1e-3,
    source="Hu et al. 2022, section 4.1",
    uses_rank=True,
)
