"""Replacements for a sublayer without units: they output the bias of its output layer, as with masked units."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache

from compressor.deltas.inserts import insert, inserts_of
from compressor.deltas.links import attach, detach
from compressor.models.anatomy import Layer
from compressor.models.modules import STRUCTURES


class Constant(nn.Module):
    """(..., anything) -> (..., hidden): the bias of a linear layer that has no inputs left; zeros without a bias."""

    emptied = True
    """Marks a sublayer in which the anatomy finds no matrix."""

    def __init__(self, hidden: int, bias: nn.Parameter | None):
        super().__init__()
        self.hidden = hidden
        self.register_parameter("bias", bias)

    def forward(self, states: Tensor) -> Tensor:
        if self.bias is None:
            return states.new_zeros(*states.shape[:-1], self.hidden)
        return self.bias.expand(*states.shape[:-1], self.hidden)


class Absent(nn.Identity):
    """In the place of the incoming layers of a sublayer without units: hands its input to the constant behind it."""

    emptied = True


class EmptyAttention(nn.Module):
    """An attention without heads. `output` is set where its output layer was a part of it.

    It writes zeros (batch, 1, tokens, 1) to the key-value cache: models count the cached tokens in their first block's.
    """

    def __init__(self, output: Constant | None, hands_on_bias: bool, layer_idx: int | None):
        super().__init__()
        self.output, self.hands_on_bias, self.layer_idx = output, hands_on_bias, layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        *arguments,
        position_bias: Tensor | None = None,
        past_key_values: Cache | None = None,
        key_value_states: Tensor | None = None,
        **keywords,
    ) -> tuple:
        if past_key_values is not None and key_value_states is None:
            nothing = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache = getattr(past_key_values, "self_attention_cache", past_key_values)
            cache.update(nothing, nothing, self.layer_idx)
        states = hidden_states if self.output is None else self.output(hidden_states)
        return (states, position_bias, None) if self.hands_on_bias else (states, None)


def empty(layer: Layer, structure: str) -> None:
    """Replace a sublayer of which no unit is left. Its output bias stays, with the changes attached to it."""
    name, home = STRUCTURES[structure].columns, layer.blocks.homes[structure]
    outgoing, path = layer.linear(name), layer.parts[name].path
    constant = _constant(outgoing, layer.matrix(name).original.shape[0])
    inside = path.startswith(f"{home}.")
    if not inside:
        layer.module.set_submodule(path, constant)
    if not STRUCTURES[structure].in_attention:
        layer.module.set_submodule(home, constant if inside else Absent())
        return
    index = getattr(layer.home(structure), "layer_idx", None)
    attention = EmptyAttention(constant if inside else None, layer.row.position_bias == "interface", index)
    setattr(attention, layer.blocks.head_size, layer.head_size)
    layer.module.set_submodule(home, attention)


def _constant(outgoing: nn.Module, hidden: int) -> Constant:
    detach(outgoing)
    links = detach(outgoing, "bias")
    constant = Constant(hidden, outgoing.bias)
    for link in links:
        attach(constant, link, "bias")
    for change in inserts_of(outgoing):
        insert(constant, change)
    return constant


def constant_of(layer: Layer, structure: str) -> Constant:
    """The constant that `empty` put in the place of a sublayer's outgoing layer."""
    homes, outgoing = layer.blocks.homes, layer.blocks.modules[STRUCTURES[structure].columns]
    places = outgoing if isinstance(outgoing, tuple) else (outgoing,)
    paths = {homes[structure], f"{homes[structure]}.output", *(getattr(place, "path", place) for place in places)}
    found = (module for path, module in layer.module.named_modules() if path in paths and isinstance(module, Constant))
    return next(found)
