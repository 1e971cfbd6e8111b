"""Prefixes: trained keys and values in an attention, and the transformers attention function that uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compressor.compression import compression_of
from compressor.deltas.inserts import Insert, inserts_of
from compressor.deltas.sources import PlainTensors

PREFIX_ATTENTION = "sdpa_with_prefix"
"""Name under which attention with prefixes is registered in transformers."""


class Prefix(Insert):
    """Trained keys and values prepended to those of the input (Li and Liang 2021), each (length, key/value heads · size).

    They are parameters themselves, or computed by a network that is trained and then dropped (`Reparametrized`).
    """

    kind = "prefix"

    @staticmethod
    def tensors(key: Tensor, length: int) -> dict[str, Tensor]:
        """keys and values (length, rows of the key matrix), from N(0, 0.02²)."""
        return {name: key.new_empty(length, key.shape[0]).normal_(std=0.02) for name in ("keys", "values")}

    @property
    def size(self) -> int:
        return self.source.size("keys")[0]

    def extend(self, name: str, states: Tensor) -> Tensor:
        """Prepend the prefix: (batch, heads, tokens, size) -> (batch, heads, length + tokens, size)."""
        batch, heads, _, size = states.shape
        before = self.source.read(name).view(-1, heads, size).transpose(0, 1)
        return torch.cat([before.expand(batch, -1, -1, -1).to(states.dtype), states], dim=2)

    def settled(self) -> Prefix:
        plain = self.source.settled()
        return self if plain is self.source else Prefix(plain, self.group)

    def enter(self, model: nn.Module) -> None:
        use_prefixes(model)

    def leave(self, model: nn.Module) -> None:
        plain = compression_of(model).plain_attention
        if plain and not any(isinstance(module, Prefix) for module in model.modules()):
            model.set_attn_implementation(plain)

    def cut(self, rows: Tensor) -> Prefix:
        """The same prefix for an attention pruned to `rows` of its key matrix."""
        return Prefix(
            PlainTensors({name: self.source.read(name).detach()[:, rows].clone() for name in ("keys", "values")}), self.group
        )


def use_prefixes(model: nn.Module) -> None:
    """Switch `model` to the attention implementation that supports prefixes."""
    if model.config._attn_implementation != PREFIX_ATTENTION:
        compression_of(model).plain_attention = model.config._attn_implementation
        model.set_attn_implementation(PREFIX_ATTENTION)


def with_prefixes(
    attention: nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and the mask of an attention with its prefixes prepended; as they are where it has none."""
    for change in inserts_of(attention):
        if attention_mask is not None:
            # prefixes are seen by every token: true in a boolean mask, 0 in an additive one
            seen = attention_mask.dtype == torch.bool
            attention_mask = functional.pad(attention_mask, (change.size, 0), value=seen)
        key, value = change.extend("keys", key), change.extend("values", value)
    return key, value, attention_mask


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments):
    """transformers' sdpa attention with this module's prefixes."""
    key, value, attention_mask = with_prefixes(module, key, value, attention_mask)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


def _mask(**arguments) -> Tensor | None:
    """Build the causal mask explicitly: prefixes shift the diagonal that sdpa's `is_causal` would assume."""
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


AttentionInterface.register(PREFIX_ATTENTION, _attention)
AttentionMaskInterface.register(PREFIX_ATTENTION, _mask)
