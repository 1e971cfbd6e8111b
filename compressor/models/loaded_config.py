"""What a config says once transformers has read it: functions that it knows, and outputs that are ours to choose."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from compressor.models.files.damage import Damage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ACTIVATIONS = ("hidden_act", "activation_function", "activation", "hidden_activation")
"""What architectures call the function in their FFN."""


def check_activations(config: PretrainedConfig) -> None:
    """Raises Damage for a function that transformers does not know."""
    from transformers.activations import ACT2FN

    for key in ACTIVATIONS:
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            close = difflib.get_close_matches(name, ACT2FN, 1)
            fix = f"Did you mean '{close[0]}'?" if close else "Name one that transformers knows, such as gelu"
            raise Damage(f"says {key}: '{name:.40}' in its config.json, which transformers does not know", fix)


def plain_outputs(config: PretrainedConfig) -> PretrainedConfig:
    """Set in `config` that a model returns named outputs without hidden states and attention weights, whatever its folder was
    saved with: they would be kept in training, and become outputs of its graph. And that it computes a feed-forward layer at
    once: in chunks it gives the same, but refuses rows that these do not divide, and a hook sees the last chunk alone. Returns
    it."""
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    if getattr(config, "chunk_size_feed_forward", 0):
        config.chunk_size_feed_forward = 0
    return config
