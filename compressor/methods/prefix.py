"""Prefix tuning (Li and Liang 2021): trained keys and values before those of the input, in every attention to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from compressor.cost import ModelShape


def attentions(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """(attention, its key matrix) of every block. Raises UserError E407 where a prefix cannot join."""
    from compressor.anatomy import layers_of, row_of_model
    from compressor.inserts import use_prefixes

    if not row_of_model(model).prefixes:
        what = f"prefixes cannot join the attention of architecture '{model.config.model_type}'"
        raise UserError("E407", what, "Use another method, e.g. adapter or lora")
    use_prefixes(model)
    for layer in layers_of(model):
        yield layer.attention, layer.matrix("key").original


def attach_prefixes(model: nn.Module, options: Options) -> None:
    """Put a prefix into every attention."""
    from compressor.inserts import Prefix, insert
    from compressor.sources import Own

    for attention, key in attentions(model):
        insert(attention, Prefix(Own(Prefix.tensors(key, options.length)), options.group))


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Σ 2 l d over the blocks, d the rows of the key matrix."""
    return sum(2 * options.length * out for _, out, _ in shape.matrices(("key",)))


METHOD = Method(
    name="prefix",
    summary="trained keys and values before those of the input",
    formula="2ld per block",
    attach=attach_prefixes,
    count=count,
    learning_rate=1e-2,
    source="Li and Liang 2021, section 4.2, without the reparametrization",
    reads=("length",),
    mergeable=False,
    identity=False,
)
