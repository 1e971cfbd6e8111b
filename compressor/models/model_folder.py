"""One gate for folders of models: what is in them is checked once, at the door, before anything is built or written.

Needs no torch: config.json, the tokenizer's files, and every safetensors file with all its numbers. What only transformers can
tell (a model of this config, the shapes of its tensors) is `models.hollow`, on meta. A finding is a UserError of the door's
code: E304 for a pretrained folder, E305 for a checkpoint or a state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressError, UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What a checkpoint carries along so that rows are tokenized as in training."""

JSON_BYTES, JSON_DEPTH, DIGITS = 64 * 2**20, 32, 100
"""The largest JSON file that is read, its deepest nesting, and the digits of its longest whole number: tokenizers say 10^30."""

SLICE = 2**22
"""Numbers that are looked at at once."""


class Damage(Exception):
    """What is wrong with a folder (a predicate: "has no config.json") and what to do, before a door gives it a code."""

    def __init__(self, what: str, mend: str = "Save or download the folder again"):
        self.what, self.mend = what, mend
        super().__init__(what)


@contextmanager
def door(code: str, subject: str, where: str = "") -> Iterator[None]:
    """Any Damage becomes a UserError of this code that begins with `subject`."""
    try:
        yield
    except Damage as damage:
        raise UserError(code, f"{subject} {damage.what}", damage.mend, where) from None


@contextmanager
def reading_by_library(what: str, mend: str = "Save or download the folder again") -> Iterator[None]:
    """Whatever a library raises on a stranger's file is Damage: `what` and the library's reason."""
    try:
        yield
    except (CompressError, Damage):
        raise
    except BaseException as error:  # transformers and its parts raise every type there is; a panic of Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Damage(f"{what} ({reason_of(error)})", mend) from error


def reason_of(error: BaseException) -> str:
    """A library's error in a short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


# JSON


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of plain UTF-8, nested JSON_DEPTH deep at most, its numbers finite and of DIGITS digits at most.

    Raises Damage.
    """
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= JSON_BYTES else None
    except OSError as error:
        raise Damage(f"has a {path.name} that cannot be read ({error.strerror})") from None
    if raw is None:
        raise Damage(f"has a {path.name} of {size:,} bytes; at most {JSON_BYTES:,} are read")
    found = _parsed(_text(raw, path.name), path.name)
    if not isinstance(found, dict):
        raise Damage(f"has a {path.name} that is no JSON object but {_KINDS.get(type(found), 'a number')}")
    if _deeper_than(found, JSON_DEPTH):
        raise Damage(f"has a {path.name} that is nested more than {JSON_DEPTH} deep")
    return found


_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
_MARKS = {b"\xef\xbb\xbf": "a byte order mark", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def _text(raw: bytes, name: str) -> str:
    for mark, what in _MARKS.items():
        if raw.startswith(mark):
            raise Damage(f"has a {name} with {what} at its start", "Save it as UTF-8 without a byte order mark")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damage(f"has a {name} that is not UTF-8 (byte {error.start:,})", "Save it as UTF-8") from None


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise Damage(f"has a {name} that is nested more than {JSON_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise Damage(f"has a {name} that is not JSON (line {error.lineno}: {error.msg})") from None
    except ValueError as error:  # of _whole and _finite
        raise Damage(f"has a {name} with {error}") from None


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]}, which is not finite")
    return number


def _deeper_than(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [inner for one in level if isinstance(one, (dict, list)) for inner in _inside(one)]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)


def _inside(value: dict | list) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value


# config.json

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_VALUE_HEADS = ("num_key_value_heads",)
HEAD_SIZES = ("head_dim", "d_kv")
NEURONS = ("intermediate_size", "hidden_dim", "n_inner", "d_ff")
POSITIONS = ("max_position_embeddings", "n_positions")
"""What architectures call their sizes in config.json."""

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
"""Key of config.json -> the least and the most that it may say: far beyond any model, far below what fills a memory."""

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
ATTENTIONS = ("attn_implementation", "_attn_implementation")
SAFE_ATTENTIONS = (None, "eager", "sdpa")


def check_config(config: Mapping[str, Any], *, known: bool) -> None:
    """Types and bounds of what config.json says. With `known` the architecture has a row: its keys mean what we think.

    Raises Damage.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise Damage(f"has no model_type in its config.json that is a name, but {_shown(model_type)}")
    _check_limits(config, known)
    _check_words(config)
    if known:
        _check_sizes(config)
        _check_ids(config)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_limits(config: Mapping[str, Any], known: bool, whole: bool = True) -> None:
    """Elsewhere the same key may hold a list, or nothing of the kind, but no number that is out of bounds.

    What is not the `whole` config may say 0: a pruned block's neurons.
    """
    for key, (least, most) in LIMITS.items():
        value = config.get(key)
        if value is None or not (known or isinstance(value, (int, float))):
            continue
        least = least if whole else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            what = f"says {key}: {_shown(value)} in its config.json"
            raise Damage(what, f"It must be a whole number from {least} to {most:,}")
    for inner in config.values():  # the parts of a model of several have configs of their own
        if isinstance(inner, dict):
            _check_limits(inner, known=False, whole=False)


def _check_words(config: Mapping[str, Any]) -> None:
    """Keys that would let transformers read other files, run other code or find other weights than these."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise Damage(f"says architectures: {_shown(names)} in its config.json", "It must be a list of class names")
    if config.get("quantization_config") is not None:
        raise Damage("holds quantized weights (quantization_config in its config.json)", "Give the model in full precision")
    for key in ATTENTIONS:
        if config.get(key) not in SAFE_ATTENTIONS:
            what = f"asks for {key}: {_shown(config[key])} in its config.json"
            raise Damage(what, "Remove the key: it may name foreign code")


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int] | None:
    return next(((key, config[key]) for key in keys if config.get(key) is not None), None)


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Heads share the hidden size, and key and value heads the heads, evenly."""
    hidden, heads = _first(config, HIDDEN), _first(config, HEADS)
    shared, own_size = _first(config, KEY_VALUE_HEADS), _first(config, HEAD_SIZES)
    # a T5 leaves d_kv out where it is 64
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
        several = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if not all(one is None or type(one) is int for one in several):
            raise Damage(f"says {key}: {_shown(value)} in its config.json", "It must be the number of a token")


# safetensors

FLOATS = {
    # the bits of a number as an unsigned integer, those that are not its sign, and from where on they are no finite float32
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x47F0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("<u1", 0x7F, 0x7C),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),
}
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file: its shape, its type in the file's words, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, the whole file held against them: types, shapes, offsets, length.

    Raises Damage.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # the library checks length, JSON, types, and that the offsets follow one another to the last byte
        with safe_open(path, "numpy"):
            pass
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise Damage(f"has a {path.name} that cannot be read ({reason_of(error)})") from None
    entries.pop("__metadata__", None)
    return {
        name: Stored(tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def check_finite(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Every number of the file's float tensors is finite, in float32 too, and no tensor is of a type that nothing here reads.

    Raises Damage.
    """
    import numpy as np

    content = np.memmap(path, np.uint8, "r")
    for name, tensor in tensors.items():
        if tensor.dtype in INTEGERS:
            continue
        if tensor.dtype not in FLOATS:
            raise Damage(f"has a tensor of type {tensor.dtype} in {path.name}: {name}", "Save the weights as float32")
        word, magnitude, limit = FLOATS[tensor.dtype]
        size, wrong = np.dtype(word).itemsize, 0
        for first in range(0, tensor.numbers, SLICE):
            count = min(SLICE, tensor.numbers - first)
            bits = np.frombuffer(content, word, count, tensor.start + first * size)
            wrong += int(np.count_nonzero((bits & bits.dtype.type(magnitude)) >= limit))
        if wrong:
            what = f"has weights that are not finite (NaN or infinity): {wrong:,} of {tensor.numbers:,} numbers of {name}"
            raise Damage(f"{what} in {path.name}", "Take the weights from before training went wrong")


def weight_names(folder: Path) -> list[str]:
    """The files that transformers reads, relative to the folder: one, or the shards that an index names. Raises Damage."""
    # the same order as transformers: where both are there, it never looks at the index
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    return sorted(set(_weight_map(folder).values()))


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> its file, every one of them inside the folder. Raises Damage."""
    index = read_json(folder / INDEX)
    found, facts = index.get("weight_map"), index.get("metadata")
    if not (isinstance(found, dict) and found and all(isinstance(name, str) and name for name in found.values())):
        raise Damage(f"has no weight_map in its {INDEX} that names files")
    if not isinstance(facts, dict):
        raise Damage(f"has no metadata in its {INDEX}")
    for name in sorted(set(found.values())):
        _check_inside(folder, name)
    return found


def _check_inside(folder: Path, name: str) -> None:
    """Raise Damage for a file of the index that lies elsewhere."""
    mend = "Every file that the index names must lie in the folder"
    if "\0" in name or "\\" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise Damage(f"names a file outside of it in its {INDEX}: {_shown(name)}", mend)
    try:
        target, root = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, or half of a character
        raise Damage(f"names a file in its {INDEX} that cannot be found: {_shown(name)}", mend) from None
    # in the hub's cache every file of a snapshot is a link to a blob beside the snapshots
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise Damage(f"names a file in its {INDEX} that is a link out of it: {_shown(name)}", mend)


PICKLED = "Pickled weights are not read: convert them. A checkpoint with adapters or prefixes is no base"


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the files that transformers reads, by name; headers only. Raises Damage."""
    found: dict[str, Stored] = {}
    for name in weight_names(folder):
        if not (folder / name).is_file():
            raise Damage(f"has no {name}", PICKLED)
        tensors = read_header(folder / name)
        if double := sorted(found.keys() & tensors.keys()):
            raise Damage(f"has two files with the same tensor, {double[0]}")
        found |= tensors
    return found


def check_weights(folder: Path) -> dict[str, Stored]:
    """`stored_tensors`, with every number of every file looked at. Raises Damage."""
    found, names = stored_tensors(folder), weight_names(folder)
    if names != [WEIGHTS]:
        for tensor, name in _weight_map(folder).items():
            if tensor not in found:
                raise Damage(f"lacks a tensor that its {INDEX} places in {name}: {_shown(tensor)}")
    for name in names:
        check_finite(folder / name, read_header(folder / name))
    return found


# the tokenizer


TRIAL = ("a good film, 1\u00bd \u4e2d", "zq\U0001f600")
"""Two texts, with words that no vocabulary holds."""


def check_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """tokenizer.json loads and has no word beyond the embedding; the files beside it are JSON objects. Raises Damage."""
    from tokenizers import Tokenizer

    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if name.endswith(".json") and name != "tokenizer.json" and (folder / name).is_file():
            read_json(folder / name)
    with reading_by_library("has a tokenizer.json that cannot be read"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = tokenizer.get_vocab(with_added_tokens=True)
    if not words:
        raise Damage("has a tokenizer.json without a vocabulary")
    with reading_by_library("has a tokenizer.json that cannot read a text"):
        tokenizer.encode(TRIAL[0])
        tokenizer.encode(*TRIAL)
    most, (last, number) = config.get("vocab_size"), max(words.items(), key=lambda item: item[1])
    if isinstance(most, int) and number >= most:
        what = f"has a token {number} ({_shown(last)}) in its tokenizer.json, where its config.json says vocab_size: {most}"
        raise Damage(what, "Give the tokenizer that the model was trained with")


# the whole


def check_pretrained(folder: Path, *, known: bool = True) -> None:
    """A dense pretrained folder, whole and sound. With `known`: of an architecture that has a row.

    Raises Damage; UserError E301 for an architecture without a row.
    """
    from compressor.models.architectures import COMPRESSED, row_of

    if not (folder / CONFIG).is_file():
        raise Damage(f"has no {CONFIG}", _where_config_is(folder))
    tensors = stored_tensors(folder)
    if not (folder / "tokenizer.json").is_file():
        raise Damage("has no tokenizer.json", "Save its fast tokenizer beside the weights")
    config = read_json(folder / CONFIG)
    if config.get("per_layer_config") or str(config.get("model_type")).startswith(COMPRESSED):
        raise Damage("is pruned already", "Start from the dense model")
    if (folder / "adapter_config.json").is_file():
        mend = "Merge it with peft, or give the base alone"
        raise Damage("is a peft adapter (adapter_config.json): transformers would read another base", mend)
    check_config(config, known=False)
    if known:
        row = row_of(config["model_type"])
        check_config(config, known=True)
        if row.head_on_end and type(config.get("eos_token_id", 1)) is not int:
            what = f"says eos_token_id: {_shown(config['eos_token_id'])} in its config.json"
            raise Damage(what, "Its task head reads the state of one token: name that")
    check_layers(config, tensors)
    check_tokenizer(folder, config)
    check_weights(folder)


def check_layers(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    """No more layers than there are tensors: a model of a thousand takes seconds to build. Raises Damage."""
    for key in LAYERS:
        if isinstance(config.get(key), int) and config[key] > len(tensors):
            what = f"says {key}: {config[key]} in its config.json, and its weights are {len(tensors)} tensors"
            raise Damage(what, "Give the config.json that belongs to the weights")


def _where_config_is(folder: Path) -> str:
    """How to go on where there is no config.json: into the folder below, if it has one."""
    below = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    if not below:
        return "Give the folder that holds config.json"
    return f"Did you mean its folder '{'model' if 'model' in below else below[0]}', which has one? Add it to the path"
