"""Physical removal of attention heads and FFN neurons with torch-pruning's dependency groups; deltas are cut along.

A pruned model carries `kept_structures`: per layer the original indices that are left. With the base that is all a
state on disk needs to rebuild the shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compressor.anatomy import ARCHITECTURES, Layer, layers_of, row_of_model
from compressor.deltas import Delta, attach, detach
from compressor.errors import UserError

Kept = dict[str, dict[str, list[int]]]
"""Layer number (a JSON key) -> {"heads": original indices left, "neurons": original indices left}; {} when dense."""


@dataclass(frozen=True)
class Removal:
    """What to take out of one layer: indices among the structures that are there now, sorted."""

    heads: list[int] = field(default_factory=list)
    neurons: list[int] = field(default_factory=list)


def kept_of(model: nn.Module) -> Kept:
    """What is left of each layer in original indices; empty when nothing was removed."""
    return getattr(model, "kept_structures", {})


def remove(model: nn.Module, removals: Mapping[int, Removal]) -> None:
    """Take `removals` (layer number -> Removal) out of the model in place; chains of deltas shrink with their weights.

    The hidden size stays. Raises UserError E501 when a layer would lose all its heads or all its neurons.
    """
    check_prunable(model)
    layers = layers_of(model)
    for index, removal in removals.items():
        _check_something_left(index, layers[index], removal)
    before = kept_of(model) or _everything(layers)
    chains = {
        (index, name, tensor): detach(layer.linear(name), tensor)
        for index, layer in enumerate(layers)
        for name in layer.names
        for tensor in ("weight", "bias")
    }
    # torch-pruning would trace through the prefixes and cut them by rules of its own
    prefixes = {index: layer.attention._modules.pop("inserts", None) for index, layer in enumerate(layers)}
    _cut_base(model, layers, removals)
    for (index, name, tensor), links in chains.items():
        _attach_cut(layers[index], name, tensor, links, removals.get(index, Removal()))
    for index, inserted in prefixes.items():
        if inserted is not None:
            _put_back(layers[index], inserted, removals.get(index, Removal()))
    model.kept_structures = _without(before, removals)


def check_prunable(model: nn.Module) -> None:
    """Raise UserError E307 where heads and neurons cannot be removed."""
    if not row_of_model(model).prunable:
        what = f"heads and neurons of architecture '{model.config.model_type}' cannot be removed yet"
        can = ", ".join(row.model_type for row in ARCHITECTURES.values() if row.prunable)
        raise UserError("E307", what, f"Those of {can} can; leave out the prune")


def _check_something_left(index: int, layer: Layer, removal: Removal) -> None:
    for word, gone, there in (("heads", removal.heads, layer.heads), ("neurons", removal.neurons, layer.neurons)):
        if len(set(gone)) >= there:
            raise UserError(
                "E501",
                f"removing {len(set(gone))} {word} leaves none of the {there} in layer {index}",
                f"Remove at most {there - 1} {word}",
            )


def _everything(layers: list[Layer]) -> Kept:
    return {
        str(index): {"heads": list(range(layer.heads)), "neurons": list(range(layer.neurons))}
        for index, layer in enumerate(layers)
    }


def _without(kept: Kept, removals: Mapping[int, Removal]) -> Kept:
    result = dict(kept)
    for index, removal in removals.items():
        row, gone_heads, gone_neurons = kept[str(index)], set(removal.heads), set(removal.neurons)
        result[str(index)] = {
            "heads": [head for place, head in enumerate(row["heads"]) if place not in gone_heads],
            "neurons": [neuron for place, neuron in enumerate(row["neurons"]) if place not in gone_neurons],
        }
    return result


def _cut_base(model: nn.Module, layers: list[Layer], removals: Mapping[int, Removal]) -> None:
    """Let torch-pruning cut what belongs together; then write the new head counts."""
    import torch_pruning

    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # frozen weights are not in torch-pruning's graph, and it needs autograd for the trace
    model.requires_grad_(True)
    device = next(model.parameters()).device
    sample = {"input_ids": torch.ones(1, 4, dtype=torch.long, device=device)}
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch_pruning.DependencyGraph().build_dependency(model.eval(), example_inputs=sample)
        for index, removal in removals.items():
            layer = layers[index]
            if removal.heads:
                keep = _complement(removal.heads, layer.heads)
                _prune_heads(graph, layer, _rows_of_heads(removal.heads, layer.head_size).tolist())
                layer.set_heads(len(keep))
                layer.keep_position_bias(keep.to(device))
            if removal.neurons:
                _prune_group(graph, layer, "ffn_in", sorted(removal.neurons), {"ffn_in", "ffn_out"})
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trainable)


def _prune_heads(graph, layer: Layer, rows: list[int]) -> None:
    """Cut the rows of some heads from query, key, value, and the same columns from output."""
    import torch_pruning

    if not layer.row.shared_position_bias:
        _prune_group(graph, layer, "query", rows, {"query", "key", "value", "output"})
        return
    # torch-pruning sees the shared bias couple the heads of all layers; a layer's hook picks its own heads instead
    for name in ("query", "key", "value"):
        torch_pruning.prune_linear_out_channels(layer.linear(name), rows)
    torch_pruning.prune_linear_in_channels(layer.linear("output"), rows)


def _prune_group(graph, layer: Layer, root: str, rows: list[int], expected: set[str]) -> None:
    """Cut one dependency group. It must couple the linear layers that the anatomy says, and no other."""
    import torch_pruning

    group = graph.get_pruning_group(layer.linear(root), torch_pruning.prune_linear_out_channels, idxs=rows)
    coupled = {item.dep.target.module for item in group if isinstance(item.dep.target.module, nn.Linear)}
    if coupled != {layer.linear(name) for name in expected}:
        raise RuntimeError(f"torch-pruning couples other layers with {layer.linear_path(root)} than {sorted(expected)}")
    group.prune()


def _attach_cut(layer: Layer, name: str, tensor: str, links: list[Delta], removal: Removal) -> None:
    """Put the chain of one matrix, or of its bias, back, cut by the same indices as the tensor was."""
    linear = layer.linear(name)
    for link in links:
        cut = link
        if removal.heads or removal.neurons:
            shape, rows, columns = _kept_rows_and_columns(layer, name, linear, removal)
            cut = link.cut(shape, rows, columns)
        # all of a link is trained, or nothing
        cut.requires_grad_(any(parameter.requires_grad for parameter in link.parameters()))
        attach(linear, cut, tensor)


def _put_back(layer: Layer, prefixes: nn.ModuleList, removal: Removal) -> None:
    """Give an attention its prefixes back, without the heads that it lost."""
    if removal.heads:
        keep = _rows_of_heads(_complement(removal.heads, layer.heads + len(removal.heads)).tolist(), layer.head_size)
        prefixes = nn.ModuleList(prefix.cut(keep) for prefix in prefixes)
    layer.attention.inserts = prefixes


def _kept_rows_and_columns(layer: Layer, name: str, linear: nn.Linear, removal: Removal):
    """(shape before, kept rows, kept columns) of one matrix for one removal; `layer` is cut already."""
    heads_before = layer.heads + len(removal.heads)
    head_rows = _rows_of_heads(_complement(removal.heads, heads_before).tolist(), layer.head_size)
    neuron_rows = _complement(removal.neurons, layer.neurons + len(removal.neurons))
    rows, columns = torch.arange(linear.out_features), torch.arange(linear.in_features)
    if name in ("query", "key", "value"):
        return (heads_before * layer.head_size, len(columns)), head_rows, columns
    if name == "output":
        return (len(rows), heads_before * layer.head_size), rows, head_rows
    total = len(neuron_rows) + len(removal.neurons)
    if name == "ffn_in":
        return (total, len(columns)), neuron_rows, columns
    return (len(rows), total), rows, neuron_rows


def _rows_of_heads(heads: list[int], head_size: int) -> Tensor:
    """The sorted weight rows of the given heads."""
    return torch.cat([torch.arange(head * head_size, (head + 1) * head_size) for head in sorted(heads)])


def _complement(gone: list[int], total: int) -> Tensor:
    """Sorted indices of 0..total-1 that are not in `gone`."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[gone] = False
    return keep.nonzero().flatten()


def restore_kept(model: nn.Module, kept: Kept) -> None:
    """Cut a dense model down to the structures recorded in `kept`."""
    if not kept:
        return
    layers = layers_of(model)
    removals = {}
    for index, row in kept.items():
        layer = layers[int(index)]
        heads, neurons = set(row["heads"]), set(row["neurons"])
        removals[int(index)] = Removal(
            [head for head in range(layer.heads) if head not in heads],
            [neuron for neuron in range(layer.neurons) if neuron not in neurons],
        )
    remove(model, removals)


@torch.no_grad()
def silence(model: nn.Module, removals: Mapping[int, Removal]) -> None:
    """Zero what `removals` would cut instead of cutting it: the reference that a removal must equal. Chains merged first."""
    for index, removal in removals.items():
        layer = layers_of(model)[index]
        if removal.heads:
            layer.linear("output").weight[:, _rows_of_heads(removal.heads, layer.head_size)] = 0
        if removal.neurons:
            layer.linear("ffn_out").weight[:, removal.neurons] = 0


def resize(model: nn.Module, per_layer: Mapping, tensors: Mapping[str, Tensor]) -> None:
    """Give a fresh dense model (on meta) the widths of a checkpoint's `per_layer_config`; weights come afterwards."""
    for index, layer in enumerate(layers_of(model)):
        sizes = per_layer.get(str(index), {})
        heads = sizes.get("num_attention_heads", layer.heads)
        neurons = sizes.get("intermediate_size", layer.neurons)
        width = heads * layer.head_size
        for name in ("query", "key", "value"):
            _resize_linear(layer.linear(name), out_features=width)
        _resize_linear(layer.linear("output"), in_features=width)
        _resize_linear(layer.linear("ffn_in"), out_features=neurons)
        _resize_linear(layer.linear("ffn_out"), in_features=neurons)
        layer.set_heads(heads)
        if f"{layer.attention_path}.kept_heads.heads" in tensors:
            layer.keep_position_bias(torch.arange(heads))


def _resize_linear(linear: nn.Linear, out_features: int | None = None, in_features: int | None = None) -> None:
    linear.out_features = out_features or linear.out_features
    linear.in_features = in_features or linear.in_features
    linear.weight = nn.Parameter(linear.weight.new_empty(linear.out_features, linear.in_features))
    if linear.bias is not None and out_features:
        linear.bias = nn.Parameter(linear.bias.new_empty(out_features))
