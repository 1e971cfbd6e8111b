"""Attention with removed heads where all blocks share one position bias (1, heads, queries, keys): each selects its heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compressor.models.architectures import Architecture

KEPT_HEADS_ATTENTION = "sdpa_of_kept_heads"
"""Name under which attention that selects its heads from the position bias is registered in transformers."""


class KeptHeads(nn.Module):
    """The heads (sorted indices, int64) that an attention still has, out of those of the shared position bias."""

    def __init__(self, heads: Tensor):
        super().__init__()
        self.register_buffer("heads", heads)

    def select(self, attention: nn.Module, arguments: tuple) -> tuple:
        """Forward pre-hook: select this attention's heads of position_bias (batch, heads, queries, keys)."""
        hidden_states, attention_mask, position_bias, *others = arguments
        return (hidden_states, attention_mask, position_bias.index_select(1, self.heads), *others)


def follow(model: nn.Module, row: Architecture, attention: nn.Module, heads: Tensor) -> None:
    """Adapt the shared position bias after a removal of heads. `heads`: kept of those that were there, sorted int64."""
    if row.position_bias is None:
        return
    heads = heads.to(next(attention.parameters()).device)
    if hasattr(attention, "kept_heads"):
        attention.kept_heads.heads = attention.kept_heads.heads[heads]
        return
    attention.kept_heads = KeptHeads(heads)
    if row.position_bias == "argument":
        attention.register_forward_pre_hook(attention.kept_heads.select)
    elif model.config._attn_implementation != KEPT_HEADS_ATTENTION:
        model.set_attn_implementation(KEPT_HEADS_ATTENTION)


def bias_of(attention: nn.Module, position_bias: Tensor | None) -> Tensor | None:
    """The part of a position bias (1, heads, queries, keys) that belongs to the heads that an attention still has."""
    if position_bias is None or not hasattr(attention, "kept_heads"):
        return position_bias
    return torch.index_select(position_bias, 1, attention.kept_heads.heads)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **arguments,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention with the bias of the kept heads; the next block still gets the bias of all heads."""
    bias = bias_of(module, position_bias)
    return sdpa_attention_forward(module, query, key, value, attention_mask, position_bias=bias, **arguments)


AttentionInterface.register(KEPT_HEADS_ATTENTION, _attention)
AttentionMaskInterface.register(KEPT_HEADS_ATTENTION, sdpa_mask)
