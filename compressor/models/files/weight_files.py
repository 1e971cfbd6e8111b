"""The safetensors files of a model folder: which they are, what they hold, and that every number is finite. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from compressor.digests import kept_while_unchanged
from compressor.inside import is_inside
from compressor.models.files.damage import Damage, read_json, reason_of, shown

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

DELTA = "compress_delta"
"""The metadata key of a delta file (`compressor.storage.delta_file`)."""

SLICE = 2**22
"""Numbers that are checked at a time."""

FLOATS = {
    # integer type of a number's bits, mask of all but the sign, and the first value that is no longer a finite float32
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x47F0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("<u1", 0x7F, 0x7C),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),
}
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: its shape, its safetensors dtype, and the offset of its bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; checks types, shapes, offsets and length of the whole file.

    Raises Damage.
    """
    try:
        # the library checks length, JSON, types, and that offsets are contiguous up to the last byte
        with safe_open(path, "numpy"):
            pass
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise Damage(f"has a {path.name} that cannot be read ({reason_of(error)})") from None
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or infinite numbers, None where there is none. For a file, without loading it:
    `check_finite`."""
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def check_finite(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that all float numbers are finite, in float32 too, and that no tensor has an unsupported type.

    Raises Damage.
    """
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
    """The weight files that transformers reads, relative to the folder: one, or the shards of an index. Raises Damage."""
    # the same order as transformers: if both exist, it ignores the index
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    return sorted(set(_weight_map(folder).values()))


def tensor_files(folder: Path) -> list[str]:
    """The names of the folder's files of tensors; a delta file that lies beside a model is no part of it."""
    return sorted(path.name for path in folder.glob("*.safetensors") if path.name == WEIGHTS or not _is_delta(path))


def _is_delta(path: Path) -> bool:
    try:
        with safe_open(path, framework="np") as stream:
            return DELTA in (stream.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> its file, all of them inside the folder. Raises Damage."""
    index = read_json(folder / INDEX)
    file_of, facts = index.get("weight_map"), index.get("metadata")
    if not (isinstance(file_of, dict) and file_of and all(isinstance(name, str) and name for name in file_of.values())):
        raise Damage(f"has no weight_map in its {INDEX} that names files")
    if not isinstance(facts, dict):
        raise Damage(f"has no metadata in its {INDEX}")
    for name in sorted(set(file_of.values())):
        _check_inside(folder, name)
    return file_of


def _check_inside(folder: Path, name: str) -> None:
    """Raise Damage for a file of the index that is outside the folder."""
    fix = "Every file that the index names must lie in the folder"
    if "\0" in name or "\\" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise Damage(f"names a file outside of it in its {INDEX}: {shown(name)}", fix)
    try:
        inside = is_inside(folder / name, folder)
    except (OSError, RuntimeError, ValueError):  # circular links, or an invalid character
        raise Damage(f"names a file in its {INDEX} that cannot be found: {shown(name)}", fix) from None
    if not inside:
        raise Damage(f"names a file in its {INDEX} that is a link out of it: {shown(name)}", fix)


PICKLED = "Pickled weights are not read: convert them. A checkpoint with adapters or prefixes is no base"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files that transformers reads, by name; headers only. Raises Damage."""
    stored: dict[str, StoredTensor] = {}
    for name in weight_names(folder):
        if not (folder / name).is_file():
            raise Damage(f"has no {name}", PICKLED)
        tensors = read_header(folder / name)
        if double := sorted(stored.keys() & tensors.keys()):
            raise Damage(f"has two files with the same tensor, {double[0]}")
        stored |= tensors
    return stored


def check_weights(folder: Path) -> dict[str, StoredTensor]:
    """`stored_tensors`, after a check of every number in every file. Raises Damage."""
    stored, names = stored_tensors(folder), weight_names(folder)
    if names != [WEIGHTS]:
        for tensor, name in _weight_map(folder).items():
            if tensor not in stored:
                raise Damage(f"lacks a tensor that its {INDEX} places in {name}: {shown(tensor)}")
    for name in names:
        _check_numbers(folder / name)
    return stored


@kept_while_unchanged
def _check_numbers(path: Path) -> None:
    check_finite(path, read_header(path))
