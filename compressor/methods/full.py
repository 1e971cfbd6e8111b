"""Full fine-tuning: every pretrained weight moves. The expensive baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.methods import Method, Options

if TYPE_CHECKING:
    from compressor.anatomy import Layer


def attach_nothing(layer: Layer, module: str, options: Options) -> None:
    """Full fine-tuning has no links: the weights themselves are trained."""


METHOD = Method(
    name="full",
    summary="every weight of the model",
    formula="mn per matrix, and embeddings, norms, biases, pooler",
    attach=attach_nothing,
    count=lambda out_features, in_features, options, places: out_features * in_features,
    learning_rate=1e-4,
    source="the baseline of all four papers",
    trains_base=True,
)
