"""A short description of many changes: blocks with equal changes are described once. Torch-free.

`storage.describe` lists every matrix of every block; a header of 4 KiB has room for a few lines. So one row covers all blocks
(their number in the path is `*`) and all matrices with the same change, and values that differ between blocks are a list with
one value per block. The tensors have no names: they are concatenated in the order of `slots`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BUFFERS = ("masks", "values", "indices")
"""The concatenated tensors of a file in reading order: packed bits, floats, int32."""

SECTIONS = ("links", "inserts")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_BLOCKS = 10_000


class Slot(NamedTuple):
    """One tensor of a layout: its name in `storage.describe`, its buffer, its shape (of a mask: before packing)."""

    name: str
    buffer: str
    shape: tuple[int, ...]


def compact(changes: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Shorten the description from `storage.describe`. `shapes`: tensor name -> (buffer, shape), without masks."""
    layout: dict[str, Any] = {
        "prototypes": {
            name: {**settings, **_sizes(f"prototypes|{name}|", shapes)} for name, settings in changes["prototypes"].items()
        }
    }
    if "tasks" in changes:
        layout["tasks"] = dict(changes["tasks"])
    for section in SECTIONS:
        entries = {
            path: [{**settings, **_sizes(f"{section}|{path}|{n}|", shapes)} for n, settings in enumerate(records)]
            for path, records in changes[section].items()
        }
        layout[section] = _rows(json.loads(json.dumps(entries)))
    return layout


def _sizes(prefix: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, dict[str, Any]]:
    """{"values": {name: shape}, "indices": {name: shape}} of one change; indices as long as the values: the values' name."""
    result: dict[str, dict[str, Any]] = {}
    for name, (buffer, shape) in shapes.items():
        if name.startswith(prefix):
            result.setdefault(buffer, {})[name.removeprefix(prefix)] = list(shape)
    values = {tuple(shape): name for name, shape in result.get("values", {}).items()}
    if "indices" in result:  # often of different length in every matrix, so the lengths are stored only once
        result["indices"] = {name: values.get(tuple(shape), shape) for name, shape in result["indices"].items()}
    return result


def _rows(entries: dict[str, list[dict]]) -> list[list]:
    """[paths, blocks, changes] for each group of paths with equal changes."""
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for path, changes in entries.items():
        number = _NUMBER.search(path)
        template = _NUMBER.sub("*", path, count=1)
        kinds = " ".join(change["kind"] for change in changes)
        groups.setdefault((template, kinds), {})[number[0] if number else ""] = changes
    rows: dict[str, list] = {}
    for (template, _), blocks in groups.items():
        row = [_ranges(list(blocks)), fold(list(blocks.values()))]
        rows.setdefault(json.dumps(row), [[], *row])[0].append(template)
    return list(rows.values())


def fold(values: list[Any]) -> Any:
    """One value for all if they are equal; otherwise {"each": values}, nested as deep as possible."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: fold([value[key] for value in values]) for key in first}
    if all(isinstance(value, list) and len(value) == len(first) for value in values):
        return [fold(list(column)) for column in zip(*values, strict=True)]
    return {"each": values}


def unfold(value: Any, index: int) -> Any:
    """The value at `index` before `fold`."""
    if isinstance(value, dict):
        if value.keys() == {"each"}:
            return value["each"][index]
        return {key: unfold(inner, index) for key, inner in value.items()}
    return [unfold(inner, index) for inner in value] if isinstance(value, list) else value


def _ranges(numbers: list[str]) -> str:
    """Shorten a list of block numbers: ["0", "1", "2", "5"] -> "0-2,5"; for a path without a number ""."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number and int(number) == int(runs[-1][-1]) + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(run) for run in runs)


def blocks_of(ranges: str) -> list[str]:
    """Reverse of `_ranges`. Raises ValueError for more blocks than any model has."""
    result: list[str] = []
    for run in ranges.split(","):
        first, _, last = run.partition("-")
        count = int(last) - int(first) + 1 if last else 1
        if not 0 < count <= _MOST_BLOCKS - len(result):
            raise ValueError(f"blocks {run}")
        result += [str(int(first) + place) for place in range(count)] if last else [first]
    return result


def _entries(layout: Mapping[str, Any], section: str) -> Iterator[tuple[str, list[dict]]]:
    """(path, changes) of every matrix and module of a section, with the tensor sizes."""
    for paths, ranges, changes in layout[section]:
        for index, number in enumerate(blocks_of(ranges)):
            for path in paths:
                yield path.replace("*", number), unfold(changes, index)


def expand(layout: Mapping[str, Any]) -> dict[str, Any]:
    """Reverse of `compact`: the description that `storage.restore` reads."""
    changes: dict[str, Any] = {section: {} for section in SECTIONS}
    changes["prototypes"] = {name: _settings(change) for name, change in layout["prototypes"].items()}
    if "tasks" in layout:
        changes["tasks"] = layout["tasks"]
    for section in SECTIONS:
        for path, records in _entries(layout, section):
            changes[section][path] = [_settings(change) for change in records]
    return changes


def _settings(change: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in change.items() if key not in ("values", "indices")}


def slots(layout: Mapping[str, Any]) -> Iterator[Slot]:
    """Every tensor of the layout, in the order in which they are stored."""
    for name, change in layout["prototypes"].items():
        yield from _slots_of(f"prototypes|{name}|", change)
    for name, change in layout.get("tasks", {}).items():
        yield from _slots_of(f"tasks|{name}|", change)
    for section in SECTIONS:
        for path, changes in _entries(layout, section):
            for number, change in enumerate(changes):
                yield from _slots_of(f"{section}|{path}|{number}|", change)


class Account(NamedTuple):
    """Sizes of one kind of change where paths share a description; counts over all its `blocks`."""

    kind: str
    place: str
    blocks: int
    scalars: int
    indices: int
    mask_entries: int


def accounts(layout: Mapping[str, Any]) -> Iterator[Account]:
    """The sizes in a layout as a table. Parts of a fused weight are separate entries, named with their rows."""
    for name, change in layout["prototypes"].items():
        yield Account("prototype", name, 1, *_counts([change]))
    for name, change in layout.get("tasks", {}).items():
        yield Account("task masks", name, 1, *_counts([change]))
    for section in SECTIONS:
        for paths, ranges, changes in layout[section]:
            blocks = [unfold(changes, index) for index in range(len(blocks_of(ranges)))]
            for path in paths:
                for number, change in enumerate(blocks[0]):
                    rows = "[{}:{}]".format(*change["rows"]) if "rows" in change else ""
                    yield Account(change["kind"], path + rows, len(blocks), *_counts([block[number] for block in blocks]))


def _counts(changes: list[Mapping[str, Any]]) -> tuple[int, int, int]:
    """(scalars, indices, mask entries)."""
    sizes = dict.fromkeys(("values", "indices", "masks"), 0)
    for change in changes:
        for slot in _slots_of("", change):
            sizes[slot.buffer] += math.prod(slot.shape)
    return tuple(sizes.values())


def _slots_of(prefix: str, change: Mapping[str, Any]) -> Iterator[Slot]:
    for buffer in BUFFERS:
        for name, shape in change.get(buffer, {}).items():
            shape = change["values"][shape] if isinstance(shape, str) else shape
            if not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"shape {shape}")
            yield Slot(prefix + name, buffer, tuple(shape))
