"""Which models can be exported, by their config alone: a plan tells of the others before anything is trained. Needs no onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compressor.errors import UserError

if TYPE_CHECKING:
    from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig


NEW_FREQUENCIES = ("dynamic", "longrope")
"""Rope types that change their frequencies in the forward pass: the exporter cannot follow the first, and of the second a graph
keeps those of short rows."""


def require_traceable(config: PretrainedConfig) -> None:
    """Raises UserError E622 for a config whose model PyTorch's exporter cannot follow, or follows for short rows alone: one
    that computes the frequencies of its rotary positions anew for a longer row."""
    rotary = getattr(config, "rope_parameters", None) or {}
    # one table for all blocks, or one for each type of block
    tables = [rotary, *(table for table in rotary.values() if isinstance(table, Mapping))]
    kinds = [kind for kind in NEW_FREQUENCIES if any(kind in str(table.get("rope_type")) for table in tables)]
    if kinds:
        what = f"this model cannot be traced (rope_type: {kinds[0]} computes its frequencies anew for a longer row)"
        raise UserError("E622", what, "Use a model with another rope_type")


def require_growing_cache(config: PretrainedConfig) -> None:
    """Raises UserError E623 where a generative model of this config has a cache of anything but keys and values that grow with
    the tokens, such as a window of the last ones."""
    from transformers import DynamicCache, EncoderDecoderCache

    # a GPT-2 with cross-attention has two caches, whether there is an encoder or not
    crossed = getattr(config, "add_cross_attention", False)
    require_growing(EncoderDecoderCache(DynamicCache(), DynamicCache()) if crossed else DynamicCache(config=config))


def require_growing(cache: DynamicCache | EncoderDecoderCache) -> None:
    """`require_growing_cache` of a cache itself. Raises UserError E623."""
    from transformers.cache_utils import DynamicLayer

    strange = [part for part in getattr(cache, "layers", [cache]) if type(part) is not DynamicLayer]
    if strange:
        raise no_keys_and_values(type(strange[0]).__name__)


def no_keys_and_values(what: str) -> UserError:
    """The error for a cache that is not exported."""
    return UserError("E623", f"the cache of this model does not hold keys and values ({what})", "Export another model")
