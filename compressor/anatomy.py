"""Where each architecture keeps what we change: one row an architecture, one name for one thing.

The rest of the package says `layer.matrix("query")` and never a module path. Only this file reads or writes head counts,
because after pruning they differ from layer to layer and `config.num_attention_heads` no longer tells the truth.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from compressor.deltas import WHOLE, Change, Delta, Place, attach, delta_of, original
from compressor.errors import UserError
from compressor.modules import MODULES


@dataclass(frozen=True)
class Part:
    """One of `of` equal blocks of output rows in a fused weight (GPT-2's c_attn holds query, key and value)."""

    path: str
    index: int
    of: int


@dataclass(frozen=True)
class Blocks:
    """One stack of equal blocks. `layers` is below the base model; every other path is below one block.

    `attention` is the module that holds the head size, under the name `head_size`.
    """

    layers: str
    attention: str
    modules: dict[str, str | Part]
    head_size: str = "attention_head_size"


@dataclass(frozen=True)
class Architecture:
    """One row. `transposed`: weights are stored (in, out), as GPT-2's Conv1D does.

    `prunable`: heads and neurons can be removed (the attention then also holds `num_attention_heads` and `all_head_size`).
    `shared_position_bias`: one bias (1, heads, queries, keys) is handed to every layer's attention. `prefixes`: its attention
    goes through transformers' attention interface, where a prefix can join the keys and values.
    """

    model_type: str
    stacks: tuple[Blocks, ...]
    transposed: bool = False
    prunable: bool = False
    shared_position_bias: bool = False
    prefixes: bool = False


def _bert_blocks(attention: str, query: str, key: str, value: str, output: str) -> tuple[Blocks]:
    """The layout that BERT's descendants share, but for the names around attention."""
    modules = {
        "query": f"{attention}.{query}",
        "key": f"{attention}.{key}",
        "value": f"{attention}.{value}",
        "output": output,
        "ffn_in": "intermediate.dense",
        "ffn_out": "output.dense",
    }
    return (Blocks("encoder.layer", attention, modules),)


def _t5_blocks(stack: str, cross: bool) -> Blocks:
    attention, other = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    ffn = f"layer.{2 if cross else 1}.DenseReluDense"
    inner = {name: f"{attention}.{name[0]}" for name in ("query", "key", "value", "output")}
    across = {f"cross_{name}": f"{other}.{name[0]}" for name in ("query", "key", "value", "output")} if cross else {}
    # a T5 v1.1 has the gated wi_0, wi_1 instead of wi: `Layer` keeps what is there
    wide = {"ffn_in": f"{ffn}.wi", "ffn_gate": f"{ffn}.wi_0", "ffn_out": f"{ffn}.wo"}
    return Blocks(f"{stack}.block", attention, {**inner, **across, **wide}, head_size="key_value_proj_dim")


BERT_BLOCKS = _bert_blocks("attention.self", "query", "key", "value", "attention.output.dense")

ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture("bert", BERT_BLOCKS, prunable=True, prefixes=True),
        Architecture("roberta", BERT_BLOCKS, prefixes=True),
        Architecture(
            "mpnet", _bert_blocks("attention.attn", "q", "k", "v", "attention.attn.o"), prunable=True, shared_position_bias=True
        ),
        Architecture(
            "deberta-v2",
            _bert_blocks("attention.self", "query_proj", "key_proj", "value_proj", "attention.output.dense"),
        ),
        Architecture(
            "gpt2",
            (
                Blocks(
                    "h",
                    "attn",
                    {
                        "query": Part("attn.c_attn", 0, 3),
                        "key": Part("attn.c_attn", 1, 3),
                        "value": Part("attn.c_attn", 2, 3),
                        "output": "attn.c_proj",
                        "ffn_in": "mlp.c_fc",
                        "ffn_out": "mlp.c_proj",
                    },
                    head_size="head_dim",
                ),
            ),
            transposed=True,
            prefixes=True,
        ),
        Architecture(
            "llama",
            (
                Blocks(
                    "layers",
                    "self_attn",
                    {
                        "query": "self_attn.q_proj",
                        "key": "self_attn.k_proj",
                        "value": "self_attn.v_proj",
                        "output": "self_attn.o_proj",
                        "ffn_in": "mlp.up_proj",
                        "ffn_gate": "mlp.gate_proj",
                        "ffn_out": "mlp.down_proj",
                    },
                    head_size="head_dim",
                ),
            ),
            prefixes=True,
        ),
        Architecture("t5", (_t5_blocks("encoder", cross=False), _t5_blocks("decoder", cross=True))),
    )
}


def row_of(model_type: str) -> Architecture:
    """The architecture's row. Raises UserError E301 when there is none."""
    if model_type not in ARCHITECTURES:
        raise UserError(
            "E301",
            f"architecture '{model_type}' is not supported",
            f"Supported: {', '.join(ARCHITECTURES)}; a new one is a row in compressor/anatomy.py",
        )
    return ARCHITECTURES[model_type]


class KeptHeads(nn.Module):
    """The heads (sorted indices, int64) that a pruned layer still has of those the shared position bias was made for."""

    def __init__(self, heads: Tensor):
        super().__init__()
        self.register_buffer("heads", heads)

    def select(self, attention: nn.Module, arguments: tuple) -> tuple:
        """Forward pre-hook: cut position_bias (batch, heads, queries, keys) down to this layer's heads."""
        hidden_states, attention_mask, position_bias, *rest = arguments
        return (hidden_states, attention_mask, position_bias.index_select(1, self.heads), *rest)


@dataclass(frozen=True)
class Matrix:
    """One weight of a block in (out, in) layout, however it is stored. `path` is unique in the model: the owner's path,
    with `[query]` behind it where the matrix is a part of a fused weight.

    A tensor of a change (A, B, down, ...) is one, too: `tensor` is its name in the owner, and it has the shape it has.
    """

    name: str
    path: str
    owner: nn.Module
    place: Place
    tensor: str = "weight"

    @property
    def weight(self) -> Tensor:
        """(out, in), with the chain applied."""
        return self.place.read(getattr(self.owner, self.tensor))

    @property
    def original(self) -> Tensor:
        """(out, in), as it is before the chain."""
        return self.place.read(original(self.owner, self.tensor))

    @property
    def delta(self) -> Tensor:
        """ΔW (out, in) of its chain."""
        return delta_of(self.owner, self.place, self.tensor)

    def attach(self, link: Delta) -> None:
        """Append a delta made for this matrix to the chain of the weight that holds it."""
        link.place = self.place
        attach(self.owner, link, self.tensor)


class Layer:
    """One transformer block, seen through its row."""

    def __init__(self, row: Architecture, blocks: Blocks, module: nn.Module, path: str):
        self.row, self.module, self.path = row, module, path
        self.attention = module.get_submodule(blocks.attention)
        self.attention_path, self._head_size = f"{path}.{blocks.attention}", blocks.head_size
        there = {name for name, _ in module.named_modules()}
        parts = {name: part if isinstance(part, Part) else Part(part, 0, 1) for name, part in blocks.modules.items()}
        self.parts = {name: part for name, part in parts.items() if part.path in there}
        if "ffn_in" not in self.parts:  # a gated T5: the ungated half is wi_1
            gate = parts["ffn_in"].path
            self.parts["ffn_in"] = Part(f"{gate}_1", 0, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that this block has, in the anatomy's order."""
        return tuple(name for name in MODULES if name in self.parts)

    def linear(self, name: str) -> nn.Module:
        """The layer (nn.Linear, or GPT-2's Conv1D) that holds the matrix called `name` in the anatomy's words."""
        return self.module.get_submodule(self.parts[name].path)

    def linear_path(self, name: str) -> str:
        """Its full path below the whole model, as in `state_dict()`."""
        return f"{self.path}.{self.parts[name].path}"

    def matrix(self, name: str) -> Matrix:
        """The matrix called `name`."""
        part, owner = self.parts[name], self.linear(name)
        path = self.linear_path(name)
        if part.of == 1:
            return Matrix(name, path, owner, Place(transposed=True) if self.row.transposed else WHOLE)
        size = original(owner, "weight").shape[1 if self.row.transposed else 0] // part.of
        rows = (part.index * size, (part.index + 1) * size)
        return Matrix(name, f"{path}[{name}]", owner, Place(rows=rows, transposed=self.row.transposed))

    @property
    def head_size(self) -> int:
        return getattr(self.attention, self._head_size)

    @property
    def heads(self) -> int:
        return self.matrix("query").original.shape[0] // self.head_size

    @property
    def key_value_heads(self) -> int:
        """Smaller than `heads` where several query heads share one key and value head."""
        return self.matrix("key").original.shape[0] // self.head_size

    @property
    def neurons(self) -> int:
        return self.matrix("ffn_in").original.shape[0]

    def set_heads(self, heads: int) -> None:
        """Write the head count after the weights were cut."""
        self.attention.num_attention_heads = heads
        self.attention.all_head_size = heads * self.head_size

    def keep_position_bias(self, heads: Tensor) -> None:
        """Follow a removal of heads where the position bias is shared by all layers. `heads`: kept of the present ones."""
        if not self.row.shared_position_bias:
            return
        if hasattr(self.attention, "kept_heads"):
            self.attention.kept_heads.heads = self.attention.kept_heads.heads[heads]
            return
        self.attention.kept_heads = KeptHeads(heads.clone())
        self.attention.register_forward_pre_hook(self.attention.kept_heads.select)


def row_of_model(model: nn.Module) -> Architecture:
    """The row of a live model. Raises UserError E301."""
    return row_of(model.config.model_type)


def layers_of(model: nn.Module) -> list[Layer]:
    """The blocks of a live model (with or without a task head), first one first. Raises UserError E301."""
    row, base = row_of_model(model), model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return [
        Layer(row, blocks, module, f"{prefix}{blocks.layers}.{index}")
        for blocks in row.stacks
        for index, module in enumerate(base.get_submodule(blocks.layers))
    ]


def matrices_of(model: nn.Module, modules: Collection[str]) -> list[Matrix]:
    """Every matrix of the blocks that `modules` name, block by block.

    Raises UserError E302 for a module that no block has (asking for every one asks for those that are there), and E301.
    """
    layers = layers_of(model)
    absent = [name for name in modules if not any(name in layer.parts for layer in layers)]
    if absent and set(modules) != set(MODULES):
        what = f"architecture '{model.config.model_type}' has no {absent[0]}"
        raise UserError("E302", what, f"It has {', '.join(layers[-1].names)}")
    return [layer.matrix(name) for layer in layers for name in layer.names if name in modules]


def biases_of(model: nn.Module) -> list[nn.Module]:
    """Every module of the base that has a bias, its pooler apart."""
    return [
        module
        for path, module in model.base_model.named_modules()
        if isinstance(getattr(module, "bias", None), Tensor)
        and not path.startswith("pooler")
        and not isinstance(module, Change)
    ]
