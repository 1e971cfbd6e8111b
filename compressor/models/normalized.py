"""A config's layers, heads, hidden size and vocabulary under one set of names, whatever its architecture calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig

from compressor.models.architectures import COMPRESSED

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def normalized(config: PretrainedConfig) -> NormalizedTextConfig:
    """`hidden_size`, `num_layers`, `num_attention_heads` and `vocab_size` of a config, pruned or not; for a model type that
    optimum does not know, under transformers' usual names. Reading one that the config lacks raises AttributeError."""
    try:
        names = NormalizedConfigManager.get_normalized_config_class(config.model_type.removeprefix(COMPRESSED))
    except KeyError:
        names = NormalizedTextConfig
    return names(config)
