"""Full fine-tuning: every pretrained weight is trained. The expensive baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_nothing(model: nn.Module, options: Options) -> None:
    """Full fine-tuning adds nothing: the weights themselves are trained."""


METHOD = Method(
    name="full",
    summary="every weight of the model",
    formula="mn per matrix, and embeddings, norms, biases, pooler",
    attach=attach_nothing,
    count=lambda shape, options, places: shape.bare.parameters - shape.head,
    learning_rate=1e-4,
    source="the baseline of all four papers",
    trains_base=True,
)
