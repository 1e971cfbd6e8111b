"""Physical removal of attention heads, FFN neurons and whole blocks, with the deltas and masks on their weights.

The anatomy determines the rows and columns of a unit, and torch-pruning removes them (`compressor.pruning.groups`).
`model.compression.kept` has for each block the original indices that are left. With the base that is all a state on disk needs
to rebuild the shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.compression import Kept, compression_of
from compressor.deltas.inserts import inserts_of
from compressor.errors import UserError
from compressor.models.anatomy import Layer, layers_of, row_of_model
from compressor.models.modules import STRUCTURES
from compressor.pruning import position_bias
from compressor.pruning.emptied import empty
from compressor.pruning.groups import complement, group_of


@dataclass(frozen=True)
class Removal:
    """What to remove from one block: indices among its current units; `whole`: the block itself."""

    heads: list[int] = field(default_factory=list)
    neurons: list[int] = field(default_factory=list)
    cross_heads: list[int] = field(default_factory=list)
    whole: bool = False

    def __post_init__(self) -> None:
        for structure in STRUCTURES:
            numbers = getattr(self, structure)
            if isinstance(numbers, Tensor):
                numbers = numbers.tolist()
            if isinstance(numbers, str) or not all(hasattr(number, "__index__") for number in numbers):
                raise ValueError(f"{structure} is {numbers!r:.80}: a list of whole numbers")
            object.__setattr__(self, structure, [operator.index(number) for number in numbers])

    def of(self, structure: str) -> list[int]:
        """The indices of one structure, sorted, without duplicates."""
        return sorted(set(getattr(self, structure)))


def kept_of(model: nn.Module) -> Kept:
    """Original indices of the units left in each block; empty when nothing was removed."""
    return compression_of(model).kept


def remove(model: nn.Module, removals: Mapping[int, Removal]) -> None:
    """Remove `removals` (index of a block -> Removal) from the model in place; chains of deltas shrink with their weights.

    The hidden size is unchanged. A sublayer without units outputs the bias of its outgoing layer, as with masked units. Raises
    UserError E501 for units that do not exist or must be kept, and E307 where heads cannot be removed.
    """
    if any(removal.heads for removal in removals.values()):
        check_heads(model)
    layers = layers_of(model)
    _check(layers, removals)
    if any(removal.whole for removal in removals.values()):
        check_blocks(model)
    before = kept_of(model) or _everything(layers)
    for number, removal in removals.items():
        for structure in STRUCTURES:
            if removal.of(structure) and not removal.whole:
                _cut(model, layers[number], structure, removal.of(structure))
    _drop_blocks(model, layers, removals)
    compression_of(model).kept = _without(before, removals)


def heads_can_go(model: nn.Module) -> bool:
    """Whether all weights of a head are in the matrices that are pruned."""
    own = ("pos_key_proj", "pos_query_proj")  # a DeBERTa has one of them for each kind in its pos_att_type
    return not any(hasattr(layer.attention, name) for layer in layers_of(model) for name in own)


def check_heads(model: nn.Module) -> None:
    """Raise UserError E307 unless `heads_can_go`."""
    if not heads_can_go(model):
        what = "heads of a DeBERTa with share_att_key: false span position matrices of their own"
        raise UserError("E307", what, "Take a model with share_att_key: true (every DeBERTa-v3 has it), or prune no heads")


def _check(layers: list[Layer], removals: Mapping[int, Removal]) -> None:
    for number, removal in removals.items():
        if number not in range(len(layers)):
            raise UserError("E501", f"there is no block {number!r}", f"The model has {len(layers)}, counted from 0")
        layer = layers[number]
        for structure in STRUCTURES:
            units, gone = layer.units(structure), removal.of(structure)
            if gone and not 0 <= gone[0] <= gone[-1] < units:
                odd = gone[0] if gone[0] < 0 else gone[-1]
                raise UserError("E501", f"block {number} has no {structure} {odd}", f"It has {units}, counted from 0")
        emptied = bool(removal.heads) and len(removal.of("heads")) == layer.units("heads")
        if layer.needed and (removal.whole or emptied):
            what = f"the other blocks rely on the attention of block {number}"
            raise UserError("E501", what, "Keep that block and at least one of its heads")
    stacks = {id(layer.blocks) for layer in layers}
    if stacks != {id(layer.blocks) for n, layer in enumerate(layers) if not removals.get(n, Removal()).whole}:
        raise UserError("E501", "no block would be left", "Keep at least one block of each stack")


def blocks_can_go(model: nn.Module) -> bool:
    """Whether a block keeps its attention mask where one before it is gone."""
    return not row_of_model(model).masks_by_place or len(_mask_types(model)) < 2


def check_blocks(model: nn.Module) -> None:
    """Raise UserError E501 unless `blocks_can_go`."""
    if not blocks_can_go(model):
        types = " and ".join(_mask_types(model))
        what = f"blocks with {types} find their attention mask by their place, so none of them can go"
        raise UserError("E501", what, "Prune heads or neurons instead of layers")


def _mask_types(model: nn.Module) -> list[str]:
    return sorted(set(getattr(model.config, "layer_types", None) or ()))


def _everything(layers: list[Layer]) -> Kept:
    structures = [name for name in STRUCTURES if any(name in layer.structures for layer in layers)]
    return {
        str(number): {structure: list(range(layer.units(structure))) for structure in structures}
        for number, layer in enumerate(layers)
    }


def _without(kept: Kept, removals: Mapping[int, Removal]) -> Kept:
    remaining = {}
    for place, (number, row) in enumerate(kept.items()):
        removal = removals.get(place, Removal())
        if not removal.whole:
            remaining[number] = {structure: _others(units, removal.of(structure)) for structure, units in row.items()}
    return remaining


def _others(items: list[int], places: list[int]) -> list[int]:
    gone = set(places)
    return [item for place, item in enumerate(items) if place not in gone]


def _cut(model: nn.Module, layer: Layer, structure: str, gone: list[int]) -> None:
    """Remove units from a block: from its matrices, their biases and the changes attached to them."""
    keep = complement(gone, layer.units(structure))
    if not len(keep):
        empty(layer, structure)
        return
    span = STRUCTURES[structure]
    key_rows = layer.spread(span.rows[1], keep) if span.in_attention else None
    group_of(layer, structure, gone).prune(record_history=False)
    if key_rows is None:
        return
    layer.write_heads(structure)
    attention = layer.home(structure)
    position_bias.follow(model, layer.row, attention, keep)
    if inserts_of(attention):
        attention.inserts = nn.ModuleList(prefix.cut(key_rows) for prefix in attention.inserts)


def _drop_blocks(model: nn.Module, layers: list[Layer], removals: Mapping[int, Removal]) -> None:
    """Remove whole blocks from their stacks; layers are renumbered for the key and value caches."""
    gone = {id(layers[number].module) for number, removal in removals.items() if removal.whole}
    for blocks in {id(layer.blocks): layer.blocks for layer in layers}.values() if gone else ():
        stack = model.base_model.get_submodule(blocks.layers)
        remaining = nn.ModuleList(block for block in stack if id(block) not in gone)
        model.base_model.set_submodule(blocks.layers, remaining)
        for number, block in enumerate(remaining):
            for module in block.modules():
                if getattr(module, "layer_idx", None) is not None:
                    module.layer_idx = number


def restore_kept(model: nn.Module, kept: Kept) -> None:
    """Prune a dense model to the structures recorded in `kept`."""
    if kept:
        remove(model, removals_to(model, kept))


def removals_to(model: nn.Module, kept: Kept) -> dict[int, Removal]:
    """The removals that leave `kept` of each block of `model`, dense or pruned (none where `kept` is empty)."""
    before, removals = kept_of(model) or _everything(layers_of(model)), {}
    for place, (number, row) in enumerate(before.items() if kept else ()):
        remaining = {name: set(units) for name, units in kept.get(number, {}).items()}
        gone = {name: [unit for unit, index in enumerate(row[name]) if index not in units] for name, units in remaining.items()}
        removals[place] = Removal(**gone, whole=number not in kept)
    return removals


def silence(model: nn.Module, removals: Mapping[int, Removal]) -> None:
    """Zero what `removals` would cut, instead of cutting it: the reference that a removal must equal. Merge chains first."""
    _silence(layers_of(model), removals)


@contextmanager
def silenced(model: nn.Module, removals: Mapping[int, Removal]) -> Iterator[None]:
    """`silence` as a context: afterwards the weights are bit-equal to what they were."""
    layers = layers_of(model)
    outgoing = [
        layers[number].matrix(span.columns)
        for number, removal in removals.items()
        for structure, span in STRUCTURES.items()
        if removal.of(structure)
    ]
    before = [matrix.weight.detach().clone() for matrix in outgoing]
    hooks = _silence(layers, removals)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for matrix, weight in zip(outgoing, before, strict=True):
                matrix.weight.copy_(weight)


@torch.no_grad()
def _silence(layers: Sequence[Layer], removals: Mapping[int, Removal]) -> list[RemovableHandle]:
    """Zero the columns of units and hook every whole block; returns the hooks."""
    for number, removal in removals.items():
        for structure, span in STRUCTURES.items():
            if gone := removal.of(structure):
                matrix = layers[number].matrix(span.columns)
                matrix.weight[:, layers[number].spread(span.columns, torch.tensor(gone))] = 0
    dropped = [layers[number].module for number, removal in removals.items() if removal.whole]
    return [block.register_forward_hook(_pass_by, with_kwargs=True) for block in dropped]


def _pass_by(block: nn.Module, arguments: tuple, keywords: dict, output: Tensor | tuple) -> Tensor | tuple:
    """Forward hook that makes a block return its input."""
    states = arguments[0] if arguments else keywords["hidden_states"]
    return (states, *output[1:]) if isinstance(output, tuple) else states
