"""BitFit (Ben-Zaken et al. 2022): trains only the biases, including those of the norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.errors import UserError
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


def attach_offsets(model: nn.Module, options: Options) -> None:
    """Add an Offset to every bias of the base except its pooler's. Raises UserError E407 where there is none."""
    import torch

    from compressor.deltas.kinds.offset import Offset
    from compressor.deltas.links import attach
    from compressor.models.anatomy import biases_of

    owners = biases_of(model)
    if not owners:
        raise UserError("E407", f"architecture '{model.config.model_type}' has no biases", "Use another method, e.g. lora")
    for owner in owners:
        attach(owner, Offset(torch.zeros_like(owner.bias), options.group), "bias")


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: every bias of the base."""
    return shape.biases


METHOD = Method(
    name="bitfit",
    summary="the biases, every weight frozen",
    formula="every bias outside the pooler",
    attach=attach_offsets,
    count=count,
    learning_rate=1e-3,
    source="Ben-Zaken et al. 2022, section 3",
)
