"""Bottleneck adapters after the FFN (Pfeiffer et al. 2021) or after attention and FFN (Houlsby et al. 2019).

`adapterhub` is the former as AdapterHub computes it: it reads the norm of the FFN's output plus input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from torch import nn


BEHIND = {"pfeiffer": ("ffn_out",), "houlsby": ("output", "ffn_out"), "adapterhub": ("ffn_out",)}
"""The matrices behind which a placement puts adapters."""


def attach_adapters(model: nn.Module, options: Options) -> None:
    """Insert an adapter after every matrix of the placement. Its up-projection starts at 0, so outputs start unchanged.

    Raises UserError E407 for `adapterhub` where no norm follows the FFN.
    """
    from compressor.deltas.inserts import insert
    from compressor.deltas.kinds.adapter import Adapter, NormAdapter
    from compressor.deltas.sources import PlainTensors
    from compressor.models.anatomy import layers_of

    kind = NormAdapter if options.placement == "adapterhub" else Adapter
    for layer in layers_of(model):
        for name in BEHIND[options.placement]:
            if name in layer.names:
                source = PlainTensors(Adapter.tensors(layer.matrix(name).original[:, 0], options.bottleneck, std=0.0))
                insert(layer.norm_after_ffn if kind is NormAdapter else layer.linear(name), kind(source, options.group))


def sizes(shape: ModelShape, options: Options) -> list[int]:
    """Entries of each adapter tensor: b d, b, d b and d for down, its bias, up and its bias."""
    b = options.bottleneck
    return [entries for _, d, _ in shape.matrices(BEHIND[options.placement]) for entries in (b * d, b, d * b, d)]


def size(hidden: int, bottleneck: int) -> int:
    """Parameters of one adapter: 2 b d + b + d."""
    return 2 * bottleneck * hidden + bottleneck + hidden


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ (2 b d + b + d) over the adapters."""
    return sum(sizes(shape, options))


METHOD = Method(
    name="adapter",
    summary="small bottleneck modules behind the blocks' sublayers",
    formula="2bd+b+d per adapter",
    attach=attach_adapters,
    count=count,
    learning_rate=1e-3,
    source="Houlsby et al. 2019, section 2.1; Pfeiffer et al. 2021, section 3.2",
    reads=("bottleneck", "placement"),
    many_tasks=True,
    mergeable=False,
)
