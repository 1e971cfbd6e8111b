"""The sizes of a pruned model in its config.json, in transformers' `per_layer_config` schema, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from torch import nn

from compressor.models.anatomy import Layer, dense_blocks, layers_of
from compressor.pruning.surgery import Removal, kept_of, remove

BY_STACK = ("per_layer_config", "per_layer_config_of_decoder")
"""Keys of config.json: the first stack of blocks, and the second (a T5 has two; transformers supports only the first key, and
would strip `decoder_` from the start of the second)."""

Sizes = dict[str, dict]
"""Block of the dense stack -> the number of units of each structure under config.json's names; or {"skip": ["block"]} if it
was removed."""


def per_layer_configs(model: nn.Module) -> dict[str, Sizes]:
    """The sizes that a pruned model adds to config.json, for every block, so none is read as dense; {} for a dense model."""
    kept = kept_of(model)
    if not kept:
        return {}
    layers = dict(zip((int(number) for number in kept), layers_of(model), strict=True))
    result, start = {}, 0
    for key, stack in zip(BY_STACK, stacks_of(model), strict=False):
        total = dense_blocks(model, stack[0].blocks)
        in_stack = {number - start: layers.get(number) for number in range(start, start + total)}
        result[key] = {str(place): {"skip": ["block"]} if layer is None else _sizes(layer) for place, layer in in_stack.items()}
        start += total
    return result


def _sizes(layer: Layer) -> dict:
    sizes = {word: layer.units(structure) for structure, word in layer.blocks.configs.items() if structure in layer.structures}
    grouped = layer.heads != layer.key_value_heads
    return {**sizes, **({"num_attention_heads": layer.heads} if grouped else {})}


def stacks_of(model: nn.Module) -> list[list[Layer]]:
    """The blocks of the model, grouped by stack."""
    return [list(group) for _, group in groupby(layers_of(model), key=lambda layer: id(layer.blocks))]


def resize(model: nn.Module, configs: Mapping[str, Sizes]) -> None:
    """Prune a new dense model (on meta) to a checkpoint's sizes; weights are loaded later, so any units may be removed."""
    removals = {}
    for key, stack in zip(BY_STACK, stacks_of(model), strict=False):
        for place, layer in enumerate(stack):
            removals[len(removals)] = _removal(layer, configs.get(key, {}).get(str(place), {}))
    remove(model, removals)


def _removal(layer: Layer, sizes: Mapping) -> Removal:
    if "skip" in sizes:
        return Removal(whole=True)
    words = layer.blocks.configs
    gone = {name: list(range(sizes.get(word, layer.units(name)), layer.units(name))) for name, word in words.items()}
    return Removal(**gone)
