"""Where each architecture keeps the layers that compression changes: one row per architecture. Needs no torch.

`compressor.models.anatomy` reads live models by these rows; docs/architectures.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from compressor.errors import UserError
from compressor.models.modules import MODULES

if TYPE_CHECKING:
    from torch import nn


STRICT = {"extra": "forbid"}
"""A row may be read from a file (`compressor.models.row_file`): a key that it does not know is an error."""


@dataclass(frozen=True)
class Part:
    """One of `of` equal blocks of output rows in a fused weight (GPT-2's c_attn holds query, key and value)."""

    __pydantic_config__ = STRICT

    path: str
    index: int
    of: int


@dataclass(frozen=True)
class Blocks:
    """One stack of equal blocks. `layers` is below the base model; every other path is below one block.

    `attention` is the module that holds the head size, under the name `head_size`. Where a matrix has several paths, a block
    has it under the first that is there, and may lack it. `homes` are the modules that go when no unit of a structure is left;
    `heads_attributes` and `width_attributes` are what an attention calls its number of heads and of query rows; `configs` is
    what config.json calls the number of each structure in a block. `ffn_norm` is the norm of the sum of the FFN's output and
    input, where norms follow the sublayers.
    """

    __pydantic_config__ = STRICT

    layers: str
    attention: str
    modules: dict[str, str | Part | tuple[str, ...]]
    homes: dict[str, str]
    head_size: str = "attention_head_size"
    heads_attributes: tuple[str, ...] = ("num_attention_heads",)
    width_attributes: tuple[str, ...] = ("all_head_size",)
    configs: dict[str, str] = field(default_factory=lambda: {"heads": "num_attention_heads", "neurons": "intermediate_size"})
    ffn_norm: str | None = None

    def parts_in(self, block: nn.Module) -> dict[str, Part]:
        """The matrices that a live block contains."""
        paths = {path for path, module in block.named_modules() if not getattr(module, "emptied", False)}
        parts = {}
        for name, places in self.modules.items():
            several = places if isinstance(places, tuple) else (places,)
            candidates = [place if isinstance(place, Part) else Part(place, 0, 1) for place in several]
            present = [part for part in candidates if part.path in paths]
            if present:
                parts[name] = present[0]
        return parts


@dataclass(frozen=True)
class Positions:
    """A table of absolute positions: config.json gives its number of rows under `key`; `rows` is the default.

    With `padding` the first token has the position behind padding's, which config.json may give under `padding_key`.
    """

    __pydantic_config__ = STRICT

    rows: int = 512
    key: str = "max_position_embeddings"
    padding: int | None = None
    padding_key: str | None = None

    def most_tokens(self, config: Mapping[str, Any]) -> int:
        """Maximum number of tokens that the table can number, from a model's config.json."""
        rows = config.get(self.key) or self.rows
        if self.padding is None:
            return rows
        padding = config.get(self.padding_key)
        return rows - 1 - (self.padding if padding is None else padding)


@dataclass(frozen=True)
class Architecture:
    """One architecture. `transposed`: weights are stored (in, out), as GPT-2's Conv1D does.

    `position_bias`: one bias (1, heads, queries, keys) serves the attention of every block; the attention gets it as its third
    `argument`, or hands it to transformers' attention `interface`. `first_block_bias`: the first block's attention makes it.
    `prefixes`: its attention goes through that interface, and a prefix can join the keys and values there. `head_on_tokens`:
    the task head computes every token, of which the last counts; `head_on_end`: it reads the last end of sentence, of which all
    rows must hold equally many. `masks_by_place`: which attention mask a block gets is looked up by its place in the stack, so
    none may go where they differ. `positions`: absolute ones; None where all are relative or rotary.
    """

    __pydantic_config__ = STRICT

    model_type: str
    stacks: tuple[Blocks, ...]
    models: str
    """Some that people run, for the list."""
    pretrained: str = ""
    """Of these, what is not only tested as tiny random models but run with its pretrained weights."""
    transposed: bool = False
    position_bias: Literal["argument", "interface"] | None = None
    first_block_bias: bool = False
    prefixes: bool = False
    head_on_tokens: bool = False
    head_on_end: bool = False
    masks_by_place: bool = False
    positions: Positions | None = None

    @property
    def bidirectional(self) -> bool:
        """Whether each token's hidden state depends on the whole row, as in an encoder."""
        return not (self.head_on_tokens or self.head_on_end)

    @property
    def has_decoder(self) -> bool:
        """Whether a decoder follows an encoder."""
        return len(self.stacks) > 1

    def most_tokens(self, config: Mapping[str, Any]) -> int | None:
        """Maximum number of tokens of a row, from a model's config.json; None without a limit."""
        # a DeBERTa can have its table switched off
        if self.positions is None or not config.get("position_biased_input", True):
            return None
        return self.positions.most_tokens(config)


def _bert_blocks(attention: str, query: str, key: str, value: str, output: str) -> tuple[Blocks]:
    """The layout that BERT and its descendants share, except for the module names around attention."""
    homes = {"heads": attention, "neurons": "intermediate"}
    modules = {
        "query": f"{attention}.{query}",
        "key": f"{attention}.{key}",
        "value": f"{attention}.{value}",
        "output": output,
        "ffn_in": "intermediate.dense",
        "ffn_out": "output.dense",
    }
    return (Blocks("encoder.layer", attention, modules, homes, ffn_norm="output.LayerNorm"),)


def _t5_blocks(stack: str, cross: bool) -> Blocks:
    attention, other = "layer.0.SelfAttention", "layer.1.EncDecAttention"
    ffn = f"layer.{2 if cross else 1}.DenseReluDense"
    inner = {name: f"{attention}.{name[0]}" for name in ("query", "key", "value", "output")}
    across = {f"cross_{name}": f"{other}.{name[0]}" for name in ("query", "key", "value", "output")} if cross else {}
    # T5 v1.1 and flan-t5 are gated: wi_0 goes through the activation and multiplies wi_1
    wide = {"ffn_in": (f"{ffn}.wi", f"{ffn}.wi_1"), "ffn_gate": f"{ffn}.wi_0", "ffn_out": f"{ffn}.wo"}
    homes = {"heads": attention, **({"cross_heads": other} if cross else {}), "neurons": ffn}
    return Blocks(
        f"{stack}.block",
        attention,
        {**inner, **across, **wide},
        homes,
        head_size="key_value_proj_dim",
        # n_heads stays: with it the attention makes the bias of all heads, from which a pruned block picks
        heads_attributes=(),
        width_attributes=("inner_dim",),
        configs={"heads": "num_heads", "cross_heads": "num_cross_heads", "neurons": "d_ff"},
    )


BERT_BLOCKS = _bert_blocks("attention.self", "query", "key", "value", "attention.output.dense")


def _distilbert_blocks() -> Blocks:
    attention = {"query": "q_lin", "key": "k_lin", "value": "v_lin", "output": "out_lin"}
    return Blocks(
        "transformer.layer",
        "attention",
        {**{name: f"attention.{leaf}" for name, leaf in attention.items()}, "ffn_in": "ffn.lin1", "ffn_out": "ffn.lin2"},
        {"heads": "attention", "neurons": "ffn"},
        heads_attributes=("n_heads",),
        width_attributes=("dim",),
        configs={"heads": "n_heads", "neurons": "hidden_dim"},
        ffn_norm="output_layer_norm",
    )


def _modernbert_blocks() -> Blocks:
    fused = {name: Part("attn.Wqkv", index, 3) for index, name in enumerate(("query", "key", "value"))}
    wide = {"ffn_gate": Part("mlp.Wi", 0, 2), "ffn_in": Part("mlp.Wi", 1, 2), "ffn_out": "mlp.Wo"}
    return Blocks(
        "layers",
        "attn",
        {**fused, "output": "attn.Wo", **wide},
        {"heads": "attn", "neurons": "mlp"},
        head_size="head_dim",
        heads_attributes=(),
        width_attributes=(),
    )


def _gpt2_blocks() -> Blocks:
    fused = {name: Part("attn.c_attn", index, 3) for index, name in enumerate(("query", "key", "value"))}
    return Blocks(
        "h",
        "attn",
        {**fused, "output": "attn.c_proj", "ffn_in": "mlp.c_fc", "ffn_out": "mlp.c_proj"},
        {"heads": "attn", "neurons": "mlp"},
        head_size="head_dim",
        heads_attributes=("num_heads",),
        width_attributes=("split_size",),
        configs={"heads": "n_head", "neurons": "n_inner"},
    )


def _llama_blocks() -> Blocks:
    attention = {name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value", "output")}
    wide = {"ffn_in": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_out": "mlp.down_proj"}
    return Blocks(
        "layers",
        "self_attn",
        {**attention, **wide},
        {"heads": "self_attn", "neurons": "mlp"},
        head_size="head_dim",
        heads_attributes=(),
        width_attributes=(),
        configs={"heads": "num_key_value_heads", "neurons": "intermediate_size"},
    )


DEBERTA_BLOCKS = _bert_blocks("attention.self", "query_proj", "key_proj", "value_proj", "attention.output.dense")
MPNET_BLOCKS = _bert_blocks("attention.attn", "q", "k", "v", "attention.attn.o")

ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture("bert", BERT_BLOCKS, "BERT, MiniLM", pretrained="MiniLM-L6", prefixes=True, positions=Positions()),
        Architecture(
            "roberta", BERT_BLOCKS, "RoBERTa", prefixes=True, positions=Positions(padding=1, padding_key="pad_token_id")
        ),
        Architecture(
            "xlm-roberta", BERT_BLOCKS, "XLM-RoBERTa", prefixes=True, positions=Positions(padding=1, padding_key="pad_token_id")
        ),
        Architecture("electra", BERT_BLOCKS, "ELECTRA", prefixes=True, positions=Positions()),
        Architecture("distilbert", (_distilbert_blocks(),), "DistilBERT", prefixes=True, positions=Positions()),
        # its padding position stands in transformers' code, whatever config.json says
        Architecture(
            "mpnet", MPNET_BLOCKS, "MPNet", pretrained="MPNet-base", position_bias="argument", positions=Positions(padding=1)
        ),
        Architecture("deberta-v2", DEBERTA_BLOCKS, "DeBERTa-v2, DeBERTa-v3", positions=Positions()),
        Architecture("modernbert", (_modernbert_blocks(),), "ModernBERT", prefixes=True),
        Architecture(
            "gpt2",
            (_gpt2_blocks(),),
            "GPT-2, DistilGPT-2",
            transposed=True,
            prefixes=True,
            head_on_tokens=True,
            positions=Positions(1024, "n_positions"),
        ),
        Architecture("llama", (_llama_blocks(),), "Llama, SmolLM2", prefixes=True, head_on_tokens=True),
        Architecture("qwen3", (_llama_blocks(),), "Qwen3", prefixes=True, head_on_tokens=True, masks_by_place=True),
        Architecture(
            "t5",
            (_t5_blocks("encoder", cross=False), _t5_blocks("decoder", cross=True)),
            "T5, Flan-T5",
            position_bias="interface",
            first_block_bias=True,
            head_on_end=True,
        ),
    )
}


def facts_of(row: Architecture) -> dict[str, Any]:
    """The properties of an architecture that `compress list architectures` prints."""
    parts = [part for blocks in row.stacks for part in blocks.modules.values()]
    structures = {name: None for blocks in row.stacks for name in blocks.homes} | {"layers": None}
    shapes = {
        "fused query, key and value": any(isinstance(part, Part) and part.of == 3 for part in parts),
        "gated FFN": any("ffn_gate" in blocks.modules for blocks in row.stacks),
        "key and value heads may be shared: heads go in groups": any(
            blocks.configs["heads"] == "num_key_value_heads" for blocks in row.stacks
        ),
        "weights stored (in, out)": row.transposed,
        "one position bias for all blocks": row.position_bias is not None,
        "encoder and decoder": row.has_decoder,
    }
    return {
        "model_type": row.model_type,
        "models": row.models,
        "modules": [name for name in MODULES if any(name in blocks.modules for blocks in row.stacks)],
        "structures": list(structures),
        "layout": [layout for layout, applies in shapes.items() if applies],
        "prefixes": row.prefixes,
        "tested": f"tiny random models through every stage{f'; pretrained: {row.pretrained}' if row.pretrained else ''}",
    }


COMPRESSED = "compressed-"
"""A pruned checkpoint's model type is this and that of the dense model (compressor.models.auto)."""

_added: dict[str, Architecture] = {}


def add_row(row: Architecture) -> None:
    """Let this process use a row that the built-in table lacks: from a user's file, or from a stored model.

    Raises UserError E320 for a model type of which another row is in use: live models may have been cut by that.
    """
    if _added.setdefault(row.model_type, row) != row:
        what = f"another row for '{row.model_type}' is in use already"
        raise UserError("E320", what, "Use one row per architecture in a process")


def added_row(model_type: str) -> Architecture | None:
    """The row that was added for a model type; None for a built-in or an unknown one."""
    return _added.get(model_type)


@contextmanager
def in_place_of_others(row: Architecture) -> Iterator[None]:
    """Use `row` for its model type within the block, whatever is built in: to try it."""
    before = _added.pop(row.model_type, None)
    _added[row.model_type] = row
    try:
        yield
    finally:
        del _added[row.model_type]
        if before is not None:
            _added[row.model_type] = before


def row_of(model_type: str) -> Architecture:
    """The row of an architecture, pruned or not. Raises UserError E301 when it is unknown."""
    model_type = model_type.removeprefix(COMPRESSED)
    row = added_row(model_type) or ARCHITECTURES.get(model_type)
    if row is None:
        raise UserError(
            "E301",
            f"architecture '{model_type}' is not supported",
            f"Supported: {', '.join(ARCHITECTURES)}; for another, compress list architectures --discover MODEL proposes a row",
        )
    return row
