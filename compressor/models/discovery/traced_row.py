"""Proposing an architecture's row from torch-pruning's traced dependency graph of a small model.

The graph says which linear layers lose channels together. A group with one outgoing layer inside one block is a structure:
the heads of an attention (three incoming matrices, or one that fuses them), or the neurons of an FFN (one, or two where it is
gated).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import nn
from transformers import PretrainedConfig

from compressor.errors import UserError
from compressor.models.architectures import Architecture, Blocks, Part, Positions
from compressor.models.discovery.small_model import HEAD_SIZE, HEADS, HIDDEN, WIDTHS, small_inputs, states_of

BY_HAND = "Write the row by hand, as docs/architectures.md says"
IN_BLOCK = re.compile(r"(?P<stack>.*?)\.(?P<block>\d+)\.(?P<path>.*)")
HEAD_SIZES = ("attention_head_size", "head_dim", "key_value_proj_dim", "head_size", "size_per_head", "d_head")


@dataclass(frozen=True)
class Unit:
    """One structure of one block: paths below the block. `ratio`: rows of the first incoming layer for each outgoing column."""

    stack: str
    block: int
    incoming: tuple[str, ...]
    outgoing: str
    ratio: int


def propose(model: nn.Module, config: PretrainedConfig) -> list[Architecture]:
    """Rows that may fit a small model (`small_model`), the likeliest first. Raises UserError E318 where none can be made."""
    if config.is_encoder_decoder:
        raise _none("it has an encoder and a decoder, which the graph does not tell apart")
    units = list(_units(model))
    stacks = {unit.stack for unit in units}
    if len(stacks) != 1:
        raise _none(f"no single stack of blocks has units of its own (found {', '.join(sorted(stacks)) or 'none'})")
    first = [unit for unit in units if unit.block == 0]
    for block in range(1, len(model.get_submodule(units[0].stack))):
        same = {(unit.incoming, unit.outgoing) for unit in units if unit.block == block}
        if same != {(unit.incoming, unit.outgoing) for unit in first}:
            raise _none("its blocks are not alike")
    heads = [unit for unit in first if len(unit.incoming) == 3 or unit.ratio == 3]
    neurons = [unit for unit in first if unit not in heads]
    if len(heads) != 1 or len(neurons) != 1:
        raise _none(f"a block has {len(heads)} attentions and {len(neurons)} FFNs in the graph, and should have one of each")
    return list(_rows(model, config, heads[0], neurons[0]))


def _none(why: str) -> UserError:
    return UserError("E318", f"no row can be proposed: {why}", BY_HAND)


def _units(model: nn.Module) -> Iterator[Unit]:
    graph = torch_pruning.DependencyGraph()
    inputs = small_inputs()
    try:
        graph.build_dependency(
            model, example_inputs=inputs, output_transform=lambda output: output.last_hidden_state, verbose=False
        )
        groups = list(graph.get_all_groups())
    except Exception as error:  # an unknown model: any exception of torch-pruning means that it cannot be traced
        raise _none(f"torch-pruning cannot trace it ({type(error).__name__}: {error!s:.200})") from error
    paths = {module: path for path, module in model.named_modules()}
    for group in groups:
        linears = [(item.dep.target.module, item.dep.handler.__name__) for item in group]
        linears = [(module, handler) for module, handler in linears if isinstance(module, nn.Linear)]
        incoming = {paths[module]: module for module, handler in linears if handler == "prune_out_channels"}
        outgoing = {paths[module]: module for module, handler in linears if handler == "prune_in_channels"}
        if len(outgoing) == 1 and not incoming.keys() & outgoing.keys():
            yield _unit(incoming, outgoing)


def _unit(incoming: dict[str, nn.Linear], outgoing: dict[str, nn.Linear]) -> Unit:
    places = [IN_BLOCK.fullmatch(path) for path in (*incoming, *outgoing)]
    if not all(places) or len({(place["stack"], place["block"]) for place in places}) > 1:
        raise _none(f"{', '.join([*incoming, *outgoing])} lose channels together but do not stand in one block")
    ((_, last),) = outgoing.items()
    ratio = next(iter(incoming.values())).out_features // last.in_features
    inside = [place["path"] for place in places]
    return Unit(places[0]["stack"], int(places[0]["block"]), tuple(sorted(inside[:-1])), inside[-1], ratio)


def _rows(model: nn.Module, config: PretrainedConfig, heads: Unit, neurons: Unit) -> Iterator[Architecture]:
    block = model.get_submodule(f"{heads.stack}.0")
    modules = {**_attention(heads), "output": heads.outgoing, **_ffn(neurons), "ffn_out": neurons.outgoing}
    home = _common(heads.incoming)
    if not home:
        raise _none("query, key and value stand in no module of their own")
    attention = block.get_submodule(home)
    sizes = {name: value for name, value in vars(attention).items() if type(value) is int}
    head_size = next((name for name in HEAD_SIZES if sizes.get(name) == HEAD_SIZE), None)
    if head_size is None:
        raise _none(f"'{home}' of a block has no attribute with the size of a head ({', '.join(HEAD_SIZES)})")
    counts = tuple(name for name, value in sizes.items() if value == HEADS and "head" in name)
    widths = tuple(name for name, value in sizes.items() if value == HIDDEN)
    words = {
        "heads": "num_key_value_heads" if "num_key_value_heads" in config.to_dict() else _real(config, "num_attention_heads"),
        "neurons": next((name for name in WIDTHS if name in config.to_dict()), WIDTHS[0]),
    }
    # some attentions store the hidden size, which pruning keeps, and the query width, which it changes
    for width in dict.fromkeys((tuple(name for name in widths if not name.startswith("hidden")), widths)):
        blocks = Blocks(
            heads.stack,
            home,
            modules,
            {"heads": home, "neurons": _ffn_home(neurons)},
            head_size=head_size,
            heads_attributes=counts,
            width_attributes=width,
            configs=words,
        )
        yield Architecture(
            config.model_type,
            (blocks,),
            type(config).__name__.removesuffix("Config"),
            prefixes=bool(model._supports_attention_backend),
            head_on_tokens=_is_causal(model),
            # whether blocks depend on their own attention mask is unknown: if they differ, whole blocks are not removed
            masks_by_place=bool(getattr(config, "layer_types", None)),
            positions=_positions(model, config),
        )


def _attention(heads: Unit) -> dict[str, str | Part]:
    if len(heads.incoming) == 1:
        return {name: Part(heads.incoming[0], index, 3) for index, name in enumerate(("query", "key", "value"))}
    roles = {path.rpartition(".")[2][0].lower(): path for path in heads.incoming}
    if set(roles) != set("qkv"):
        raise _none(f"the names of {', '.join(heads.incoming)} do not say which is query, key and value")
    return {"query": roles["q"], "key": roles["k"], "value": roles["v"]}


def _ffn(neurons: Unit) -> dict[str, str | Part]:
    if len(neurons.incoming) == 2:
        gate = next((path for path in neurons.incoming if "gate" in path), neurons.incoming[0])
        (other,) = (path for path in neurons.incoming if path != gate)
        return {"ffn_in": other, "ffn_gate": gate}
    if len(neurons.incoming) != 1 or neurons.ratio not in (1, 2):
        raise _none(f"{', '.join(neurons.incoming)} are no FFN with or without a gate")
    (path,) = neurons.incoming
    return {"ffn_in": path} if neurons.ratio == 1 else {"ffn_in": Part(path, 1, 2), "ffn_gate": Part(path, 0, 2)}


def _ffn_home(neurons: Unit) -> str:
    """The module that goes with the last neuron: the FFN's own, or else that of the incoming layer."""
    return _common((*neurons.incoming, neurons.outgoing)) or _common(neurons.incoming) or neurons.incoming[0]


def _common(paths: tuple[str, ...]) -> str:
    """The innermost module that holds all `paths`; '' for the block itself."""
    parts = [path.split(".")[:-1] for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _real(config: PretrainedConfig, name: str) -> str:
    return config.attribute_map.get(name, name)


def _is_causal(model: nn.Module) -> bool:
    """Whether a token's state does not depend on later tokens."""
    inputs = small_inputs()
    inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, -1] -= 1
    return torch.equal(states_of(model, inputs)[0], states_of(model, other)[0])


def _positions(model: nn.Module, config: PretrainedConfig) -> Positions | None:
    """The table of absolute positions outside the blocks, if there is one."""
    tables = [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and re.search(r"position|\bwpe\b", path) and not IN_BLOCK.fullmatch(path)
    ]
    if not tables:
        return None
    key = _real(config, "max_position_embeddings")
    rows: Any = getattr(config, "max_position_embeddings", None) or tables[0].num_embeddings
    if tables[0].padding_idx is None:
        return Positions(rows, key)
    return Positions(rows, key, padding=tables[0].padding_idx, padding_key="pad_token_id")
