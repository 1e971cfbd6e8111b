"""Small modules put into a frozen model: adapters and prefixes. They cannot be merged; a checkpoint carries them along."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from compressor.deltas.links import Change
from compressor.deltas.sources import Masked, Own, Reparametrized

PREFIX_ATTENTION = "sdpa_with_prefix"
"""The name under which attention with prefixes is known to transformers."""


class Insert(Change):
    """A change that is code, not a weight."""

    def __init__(self, source: Own | Masked | Reparametrized, group: str = ""):
        super().__init__()
        self.source, self.group = source, group

    @property
    def size(self) -> int:
        """An adapter's inner width, a prefix's positions."""
        raise NotImplementedError

    def join(self, owner: nn.Module) -> None:
        """Become part of what `owner` computes."""


class Adapter(Insert):
    """h + up(ReLU(down(h))): a bottleneck behind a sublayer's last linear layer, before its dropout and residual.

    Houlsby et al. 2019 put one behind attention and one behind the FFN; Pfeiffer et al. 2021 behind the FFN alone.
    """

    kind = "adapter"

    @staticmethod
    def tensors(hidden: Tensor, bottleneck: int, std: float) -> dict[str, Tensor]:
        """down (b, d) from N(0, 0.02²), up (d, b) from N(0, `std`²), biases 0; `hidden` (d,) gives size, type and device.

        With `std` 0 the model starts as it was.
        """
        width = hidden.shape[0]
        return {
            "down": hidden.new_empty(bottleneck, width).normal_(std=0.02),
            "down_bias": hidden.new_zeros(bottleneck),
            "up": hidden.new_empty(width, bottleneck).normal_(std=std) if std else hidden.new_zeros(width, bottleneck),
            "up_bias": hidden.new_zeros(width),
        }

    @property
    def size(self) -> int:
        return self.source.size("down")[0]

    def forward(self, hidden: Tensor) -> Tensor:
        read = self.source.read
        inner = functional.relu(functional.linear(hidden, read("down"), read("down_bias")))
        return hidden + functional.linear(inner, read("up"), read("up_bias"))

    def after(self, module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        """Forward hook of the linear layer it stands behind."""
        return self(output)

    def join(self, owner: nn.Module) -> None:
        owner.register_forward_hook(self.after)


class Prefix(Insert):
    """Trained keys and values before those of the input (Li and Liang 2021), one (length, key and value heads · size) each.

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
        """(batch, heads, tokens, size) -> (batch, heads, length + tokens, size)."""
        batch, heads, _, size = states.shape
        before = self.source.read(name).view(-1, heads, size).transpose(0, 1)
        return torch.cat([before.expand(batch, -1, -1, -1).to(states.dtype), states], dim=2)

    def settled(self) -> Prefix:
        return Prefix(self.source.settled(), self.group) if isinstance(self.source, Reparametrized) else self

    def cut(self, rows: Tensor) -> Prefix:
        """The same prefix for an attention that keeps `rows` of its key matrix."""
        return Prefix(Own({name: self.source.read(name).detach()[:, rows].clone() for name in ("keys", "values")}), self.group)


def inserts_of(owner: nn.Module) -> list[Insert]:
    """What was inserted at this module, in order."""
    return list(owner.inserts) if hasattr(owner, "inserts") else []


def insert(owner: nn.Module, change: Insert) -> None:
    """Put an adapter behind a linear layer, or a prefix into an attention."""
    if not hasattr(owner, "inserts"):
        owner.inserts = nn.ModuleList()
    owner.inserts.append(change)
    change.join(owner)


def settle_inserts(model: nn.Module) -> None:
    """Leave every insert as it is stored, in place: what only training needed is dropped."""
    for owner in list(model.modules()):
        for place, change in enumerate(inserts_of(owner)):
            owner.inserts[place] = change.settled()


def take_out(model: nn.Module, owner: nn.Module) -> None:
    """Undo every `insert` at `owner`; with its last prefix the model's attention is what it was."""
    gone = inserts_of(owner)
    del owner.inserts
    for key, hook in list(owner._forward_hooks.items()):
        if any(getattr(hook, "__self__", None) is change for change in gone):
            del owner._forward_hooks[key]
    if hasattr(model, "attention_without_prefixes") and not any(isinstance(module, Prefix) for module in model.modules()):
        model.set_attn_implementation(model.attention_without_prefixes)


def use_prefixes(model: nn.Module) -> None:
    """Let the attention of `model` look for prefixes."""
    if model.config._attn_implementation != PREFIX_ATTENTION:
        model.attention_without_prefixes = model.config._attn_implementation
        model.set_attn_implementation(PREFIX_ATTENTION)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments):
    """transformers' sdpa attention with this module's prefixes in front of keys and values."""
    for change in inserts_of(module):
        if attention_mask is not None:
            # prefixes are seen by every token: true in a boolean mask, 0 in an additive one
            seen = attention_mask.dtype == torch.bool
            attention_mask = functional.pad(attention_mask, (change.size, 0), value=seen)
        key, value = change.extend("keys", key), change.extend("values", value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


def _mask(**arguments) -> Tensor | None:
    """A causal mask is always written out: prefixes shift the diagonal that sdpa's `is_causal` would assume."""
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


AttentionInterface.register(PREFIX_ATTENTION, _attention)
AttentionMaskInterface.register(PREFIX_ATTENTION, _mask)
