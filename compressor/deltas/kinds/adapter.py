"""Bottleneck adapters: small modules after a sublayer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.deltas.inserts import Insert, inserts_of
from compressor.deltas.links import Stack
from compressor.deltas.sources import TensorSource


class Adapter(Insert):
    """h + up(ReLU(down(h))): a bottleneck after a sublayer's last linear layer, before its dropout and residual.

    Houlsby et al. 2019 put one after attention and one after the FFN; Pfeiffer et al. 2021 only after the FFN.
    """

    kind = "adapter"

    @staticmethod
    def tensors(hidden: Tensor, bottleneck: int, std: float) -> dict[str, Tensor]:
        """down (b, d) from N(0, 0.02²), up (d, b) from N(0, `std`²), biases 0; `hidden` (d,) gives size, type and device.

        With `std` 0 the model's initial outputs are unchanged.
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

    def bottleneck(self, hidden: Tensor) -> Tensor:
        """up(ReLU(down(h)))."""
        read = self.source.read
        inner = functional.relu(functional.linear(hidden, read("down"), read("down_bias")))
        return functional.linear(inner, read("up"), read("up_bias"))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.bottleneck(hidden)

    def after(self, module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        """Forward hook on the linear layer that the adapter follows."""
        return self(output)

    def join(self, owner: nn.Module) -> None:
        owner.register_forward_hook(self.after)


class NormAdapter(Adapter):
    """LN(s + up(ReLU(down(LN(s))))) for the sum s of an FFN's output and its input: Pfeiffer's adapter as AdapterHub has it.

    It is inserted at the norm, which is computed twice (Pfeiffer et al. 2020); a second one there adds to the sum that the
    first one leaves, and reads its norm.
    """

    kind = "norm_adapter"

    def join(self, owner: nn.Module) -> None:
        # a norm gives its sum to no second hook, so the one of the first adapter computes all
        if inserts_of(owner)[0] is self:
            super().join(owner)

    def after(self, module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        total = arguments[0]
        for change in inserts_of(module):
            total = total + change.bottleneck(output)
            output = module.forward(total)
        return output


class ParallelAdapter(Adapter):
    """h + s · up(ReLU(down(x))) for the output h of an FFN and its input x (He et al. 2022, section 4.1 and table 1)."""

    kind = "parallel_adapter"

    def __init__(self, source: TensorSource, scale: float, group: str):
        super().__init__(source, group)
        self.scale, self.seen = scale, None

    def settings(self) -> dict:
        return {**super().settings(), "scale": self.scale}

    def before(self, module: nn.Module, arguments: tuple) -> None:
        """Forward pre-hook on the FFN's first linear layer, whose input is x."""
        self.seen = arguments[0]

    def after(self, module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        # an FFN without neurons has only its outgoing layer left, which gets x itself
        x, self.seen = arguments[0] if getattr(module, "emptied", False) else self.seen, None
        return output + self.scale * self.bottleneck(x)

    def enter(self, model: nn.Module) -> None:
        from compressor.models.anatomy import layers_of

        for layer in layers_of(model):
            if "ffn_out" in layer.names and any(change is self for change in inserts_of(layer.linear("ffn_out"))):
                layer.linear("ffn_in").register_forward_pre_hook(self.before)

    def leave(self, model: nn.Module) -> None:
        for module in model.modules():
            for key, hook in list(module._forward_pre_hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del module._forward_pre_hooks[key]


class AdapterStack(Stack):
    """y + up[slot](ReLU(down[slot](y))): the adapters of many tasks after one layer, padded with zeros to the widest.

    down (slots, d, b), down_bias (slots, 1, b), up (slots, b, d), up_bias (slots, 1, d).
    """

    def __init__(self, adapters: Sequence[Adapter | None]):
        super().__init__()
        first = next(filter(None, adapters))
        (width, _), like = first.source.size("up"), first.source.read("up")
        bottleneck, slots = max(adapter.size for adapter in adapters if adapter), len(adapters)
        shapes = {"down": (width, bottleneck), "down_bias": (1, bottleneck), "up": (bottleneck, width), "up_bias": (1, width)}
        for name, shape in shapes.items():
            stacked = like.new_zeros(slots, *shape)
            for slot, adapter in enumerate(adapters):
                if adapter:
                    tensor = torch.atleast_2d(adapter.source.read(name).detach())
                    tensor = tensor if name.endswith("bias") else tensor.T
                    stacked[slot, : tensor.shape[0], : tensor.shape[1]] = tensor
            self.register_parameter(name, nn.Parameter(stacked, requires_grad=False))

    def product(self, x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
        inner = functional.relu(y @ self.down.index_select(0, slot) + self.down_bias.index_select(0, slot))
        return y + inner @ self.up.index_select(0, slot) + self.up_bias.index_select(0, slot)
