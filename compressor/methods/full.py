"""Full fine-tuning: every pretrained weight is trained, or every weight of the last blocks (FT-top-k)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_nothing(model: nn.Module, options: Options) -> None:
    """Full fine-tuning adds nothing: the weights themselves are trained."""


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: all without the task head, or all of the last `top` blocks."""
    if options.top is None:
        return shape.bare.parameters - shape.head
    layers = shape.layers[-options.top :]
    return replace(shape, layers=layers, other=sum(layer.other for layer in layers), other_biases=0).bare.parameters


METHOD = Method(
    name="full",
    summary="every weight of the model",
    formula="mn per matrix, and embeddings, norms, biases, pooler (of the last blocks: without embeddings and pooler)",
    attach=attach_nothing,
    count=count,
    learning_rate=1e-4,
    source="the baseline of all four papers; the last blocks alone: DSEE, table 4",
    reads=("top",),
    trains_base=True,
    many_tasks=True,
)
