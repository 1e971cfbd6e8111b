"""Attention in the form that CPU runtimes recognize: softmax(Q K^T * scale + mask) V, one operator after the other.

transformers traces torch's scaled_dot_product_attention, which ONNX has no operator for: its decomposition scales queries
and keys apart and guards every softmax against rows without a key. OpenVINO then quantizes each part by itself, which doubles
the time of an int8 file, and ONNX Runtime's CPU fuses none of it. The plain form computes the same logits; transformers'
fusions for CUDA know both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from compressor.deltas.kinds.prefix import PREFIX_ATTENTION, with_prefixes
from compressor.pruning.position_bias import KEPT_HEADS_ATTENTION, bias_of

NAME = "compress_plain"
"""Of the implementation, in transformers' tables while a graph is traced."""
REPLACED = ("sdpa", PREFIX_ATTENTION, KEPT_HEADS_ATTENTION)
"""The implementations that the plain form computes the same as: torch's, with prefixes, and with a bias of fewer heads."""


class PlainAttention:
    """An implementation for transformers' attention interface, for one trace.

    A row without any token to attend to gets 0 from every attention, as from torch's scaled_dot_product_attention. A query
    without a key in a row with some (padding on the left, or outside a window) gets any finite state: nothing attends to it.
    """

    def __init__(self) -> None:
        self.masks: list[tuple[Tensor, Tensor]] = []
        """Each float mask with a 1 for every row that has a token, (batch, 1, 1, 1)."""

    def mask(
        self, *, q_length: int, mask_function: Any, attention_mask: Tensor | None = None, dtype=torch.float32, **keywords: Any
    ) -> Tensor:
        """Float mask (batch, 1, queries, keys): 0 where a query sees a key, else half the least number, so that sums of two
        stay finite."""
        unseen = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype)
        if mask_function is bidirectional_mask_function and attention_mask is not None:
            # of the tokens alone: ten operators less than by indices, and `rewrites.joined_attention` recognizes it
            seen = attention_mask.bool()[:, None, None, :]
            mask = torch.where(seen, torch.zeros((), dtype=dtype), unseen).expand(-1, -1, q_length, -1)
        else:
            keywords |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "attention_mask": attention_mask}
            seen = sdpa_mask(q_length=q_length, mask_function=mask_function, **keywords)
            mask = torch.where(seen, torch.zeros((), dtype=dtype), unseen)
        if attention_mask is not None:
            self.masks.append((mask, attention_mask.bool().any(dim=-1)[:, None, None, None].to(dtype)))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attention of (batch, heads, length, size) tensors: (batch, length, heads, size)."""
        # a row without tokens attends to prefixes, so it has no guard there
        key, value, seen = with_prefixes(module, key, value, attention_mask)
        filled = next((rows for mask, rows in self.masks if mask is seen), None)
        position_bias = bias_of(module, position_bias)
        if key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        for addend in (seen, position_bias):
            scores = scores if addend is None else scores + addend
        states = torch.matmul(torch.softmax(scores, dim=-1), value)
        # with a bias the mask is a sum, as in T5, and torch's own attention spreads over all keys of such a row
        if filled is not None and position_bias is None:
            states = states * filled
        return states.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Let the attention of `model` compute in its plain form within the block. Those architectures that compute it themselves
    (MPNet, DeBERTa) do so already and stay as they are."""
    before = model.config._attn_implementation
    if before not in REPLACED:
        yield
        return
    plain = PlainAttention()
    AttentionInterface.register(NAME, plain.attend)
    AttentionMaskInterface.register(NAME, plain.mask)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for table in (AttentionInterface, AttentionMaskInterface):
            del table._global_mapping[NAME]
