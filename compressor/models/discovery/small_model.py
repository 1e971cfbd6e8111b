"""A small random model of any transformers architecture, made from its config.json: the layout is kept, the sizes are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.pytorch_utils import Conv1D

BLOCKS, HEADS, HEAD_SIZE, NEURONS, WORDS, TOKENS = 3, 4, 8, 20, 99, 9
"""All sizes differ, so that the value of an attribute identifies what it counts."""
HIDDEN = HEADS * HEAD_SIZE
WIDTHS = ("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
"""Names of the number of FFN neurons in configs."""
UNREAD = ("architectures", "auto_map", "id2label", "label2id", "model_type", "quantization_config", "dtype", "torch_dtype")
"""Keys that do not describe the layout of the base, or would prevent plain random weights."""


def is_grouped(config: PretrainedConfig) -> bool:
    """Whether several query heads share a key and value head."""
    return getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads)


def small_config(config: PretrainedConfig, *, grouped: bool) -> PretrainedConfig:
    """The same config with few blocks, heads, neurons and words; `grouped`: two query heads share a key and value head.

    Lists with one entry per block are shortened.
    """
    keys = {key: value for key, value in config.to_dict().items() if key not in UNREAD and not key.startswith("_")}
    blocks = config.num_hidden_layers
    keys = {key: value[:BLOCKS] if isinstance(value, list) and len(value) == blocks else value for key, value in keys.items()}
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2 if grouped else HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": WORDS,
        **dict.fromkeys(WIDTHS, NEURONS),
    }
    names = {config.attribute_map.get(key, key): value for key, value in sizes.items()}
    keys |= {key: value for key, value in names.items() if key in keys}
    keys |= {key: _small_id(value) for key, value in keys.items() if key.endswith("_token_id")}
    return AutoConfig.for_model(config.model_type, **{**keys, "initializer_range": 0.2, "use_cache": False})


def _small_id(value: Any) -> Any:
    """A token id below WORDS (padding keeps its 0 or 1, on which positions may rely)."""
    if isinstance(value, list):
        return [_small_id(token) for token in value]
    return 3 if isinstance(value, int) and value >= WORDS else value


def small_model(config: PretrainedConfig) -> nn.Module:
    """The base model (no task head) of a small config, in eval mode: random weights, and biases large enough to be missed."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config, trust_remote_code=False).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            nn.init.normal_(module.weight, std=0.2)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.2)
    return model


def small_inputs() -> dict[str, Tensor]:
    """Two rows of unequal length, padded on the right; no special tokens."""
    input_ids = torch.randint(4, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, TOKENS - 3 :] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def states_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The last hidden states (tokens that are no padding, hidden)."""
    with torch.no_grad():
        return model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
