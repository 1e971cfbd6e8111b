"""Where each architecture keeps what we change: one row an architecture, one name for one thing.

The rest of the package says `layer.linear("query")` and never a module path. Only this file reads or writes head counts,
because after pruning they differ from layer to layer and `config.num_attention_heads` no longer tells the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from compressor.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """One row: paths of a block's parts. `layers` is below the base model; the others are below one layer.

    `attention` is the module that holds `num_attention_heads`, `attention_head_size` and `all_head_size`.
    `shared_position_bias` is true where one bias (1, heads, queries, keys) is handed to every layer's attention.
    """

    model_type: str
    layers: str
    attention: str
    modules: dict[str, str]
    shared_position_bias: bool = False


ARCHITECTURES = {
    row.model_type: row
    for row in (
        Architecture(
            model_type="bert",
            layers="encoder.layer",
            attention="attention.self",
            modules={
                "query": "attention.self.query",
                "key": "attention.self.key",
                "value": "attention.self.value",
                "output": "attention.output.dense",
                "ffn_in": "intermediate.dense",
                "ffn_out": "output.dense",
            },
        ),
        Architecture(
            model_type="mpnet",
            layers="encoder.layer",
            attention="attention.attn",
            modules={
                "query": "attention.attn.q",
                "key": "attention.attn.k",
                "value": "attention.attn.v",
                "output": "attention.attn.o",
                "ffn_in": "intermediate.dense",
                "ffn_out": "output.dense",
            },
            shared_position_bias=True,
        ),
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


class Layer:
    """One transformer block, seen through its row."""

    def __init__(self, row: Architecture, module: nn.Module, path: str):
        self.row, self.module, self.path = row, module, path
        self.attention = module.get_submodule(row.attention)

    def linear(self, name: str) -> nn.Linear:
        """The linear layer called `name` in the anatomy's words."""
        return self.module.get_submodule(self.row.modules[name])

    def linear_path(self, name: str) -> str:
        """Its full path below the whole model, as in `state_dict()`."""
        return f"{self.path}.{self.row.modules[name]}"

    @property
    def heads(self) -> int:
        return self.attention.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.attention.attention_head_size

    @property
    def neurons(self) -> int:
        return self.linear("ffn_in").out_features

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
    row = row_of_model(model)
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return [Layer(row, module, f"{prefix}{row.layers}.{index}") for index, module in enumerate(base.get_submodule(row.layers))]
