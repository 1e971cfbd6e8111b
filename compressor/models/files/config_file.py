"""What a model's config.json may say: types, bounds, and nothing that names other files or code. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.models.files.damage import Damage, shown
from compressor.models.files.weight_files import StoredTensor

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_VALUE_HEADS = ("num_key_value_heads",)
HEAD_SIZES = ("head_dim", "d_kv")
NEURONS = ("intermediate_size", "hidden_dim", "n_inner", "d_ff")
POSITIONS = ("max_position_embeddings", "n_positions")
"""Names of sizes in config.json."""

LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(HIDDEN, (1, 2**17)),
    **dict.fromkeys(LAYERS, (1, 1000)),
    **dict.fromkeys(HEADS + KEY_VALUE_HEADS, (1, 2**12)),
    **dict.fromkeys(HEAD_SIZES, (1, 2**13)),
    **dict.fromkeys(NEURONS, (1, 2**20)),
    **dict.fromkeys(POSITIONS, (1, 2**25)),
    "vocab_size": (1, 2**24),
    "embedding_size": (1, 2**17),
    "type_vocab_size": (0, 2**20),
    "num_labels": (0, 2**20),
}
"""Key of config.json -> its least and greatest value: far beyond any model, far below what would exhaust memory."""

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
ATTENTIONS = ("attn_implementation", "_attn_implementation")
SAFE_ATTENTIONS = (None, "eager", "sdpa")
ABSOLUTE = ("bert", "roberta", "xlm-roberta", "electra")
"""Types that have only absolute positions since transformers 5."""
RELATIVE = ("relative_key", "relative_key_query")
"""Positions that several types had until then, and none has today."""
MPNET_BUCKETS = 32
"""Buckets of relative positions that transformers' MPNet looks up, whatever its config.json says."""


def check_config(config: Mapping[str, Any], *, has_row: bool) -> None:
    """Check types and bounds of the values in config.json. With `has_row` the architecture has a row, so keys are known.

    Raises Damage.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise Damage(f"has no model_type in its config.json that is a name, but {shown(model_type)}")
    _check_limits(config, has_row)
    _check_words(config)
    _check_positions(config)
    if has_row:
        _check_sizes(config)
        _check_ids(config)


def _check_limits(config: Mapping[str, Any], has_row: bool, top_level: bool = True) -> None:
    """Check the numeric limits. In unknown architectures a key may hold something else, but no number out of bounds.

    Nested configs (not `top_level`) may contain 0: a pruned block's neurons.
    """
    for key, (least, most) in LIMITS.items():
        value = config.get(key)
        if value is None or not (has_row or isinstance(value, (int, float))):
            continue
        least = least if top_level else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            what = f"says {key}: {shown(value)} in its config.json"
            raise Damage(what, f"It must be a whole number from {least} to {most:,}")
    for inner in config.values():  # the parts of a composite model have their own configs
        if isinstance(inner, dict):
            _check_limits(inner, has_row=False, top_level=False)


def _check_words(config: Mapping[str, Any]) -> None:
    """Reject keys that would make transformers read other files, run other code or load other weights."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise Damage(f"says architectures: {shown(names)} in its config.json", "It must be a list of class names")
    if config.get("quantization_config") is not None:
        raise Damage("holds quantized weights (quantization_config in its config.json)", "Give the model in full precision")
    for key in ATTENTIONS:
        if config.get(key) not in SAFE_ATTENTIONS:
            what = f"asks for {key}: {shown(config[key])} in its config.json"
            raise Damage(what, "Remove the key: it may name foreign code")


def _check_positions(config: Mapping[str, Any]) -> None:
    """Reject positions that transformers 5 does not compute any more: it would add absolute ones and say nothing. Reject an
    MPNet with fewer buckets than it looks up: it could not run."""
    kind = config.get("position_embedding_type")
    if kind in RELATIVE or (config["model_type"] in ABSOLUTE and kind not in (None, "absolute")):
        what = f"says position_embedding_type: {shown(kind)} in its config.json, which transformers 5 does not compute"
        raise Damage(what, "Take a model with absolute positions")
    buckets = config.get("relative_attention_num_buckets", MPNET_BUCKETS)
    if config["model_type"] == "mpnet" and (type(buckets) is not int or buckets < MPNET_BUCKETS):
        what = f"says relative_attention_num_buckets: {shown(buckets)} in its config.json"
        raise Damage(what, f"It must be a whole number from {MPNET_BUCKETS}: transformers' MPNet looks up {MPNET_BUCKETS}")


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int] | None:
    return next(((key, config[key]) for key in keys if config.get(key) is not None), None)


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Check that the heads divide the hidden size evenly, and the key/value heads the heads."""
    hidden, heads = _first(config, HIDDEN), _first(config, HEADS)
    shared, own_size = _first(config, KEY_VALUE_HEADS), _first(config, HEAD_SIZES)
    # a T5 omits d_kv if it is 64
    free = own_size is not None or config["model_type"].endswith("t5")
    if hidden and heads and not free and hidden[1] % heads[1]:
        raise Damage(
            f"says {hidden[0]}: {hidden[1]} and {heads[0]}: {heads[1]} in its config.json",
            "The heads must share the hidden size evenly",
        )
    if heads and shared and heads[1] % shared[1]:
        raise Damage(
            f"says {heads[0]}: {heads[1]} and {shared[0]}: {shared[1]} in its config.json",
            "Key and value heads must share the heads evenly",
        )


def _check_ids(config: Mapping[str, Any]) -> None:
    for key in TOKEN_IDS:
        value = config.get(key)
        ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if not all(token is None or type(token) is int for token in ids):
            raise Damage(f"says {key}: {shown(value)} in its config.json", "It must be the number of a token")


def check_layers(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that there are no more layers than tensors: building a thousand layers takes seconds. Raises Damage."""
    for key in LAYERS:
        if isinstance(config.get(key), int) and config[key] > len(tensors):
            what = f"says {key}: {config[key]} in its config.json, and its weights are {len(tensors)} tensors"
            raise Damage(what, "Give the config.json that belongs to the weights")
