"""Grids: the compared keys of `--grid`, and of a table file, a pipeline whose `grid` and `scales` make it the table of a paper.

The values of a key are a list; or, of a search, a range LOW..HIGH; or, where several keys belong together, a mapping of names
to the keys that each sets.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.text_files import written_as_path
from pipelines.file.config import TABLE_KEYS
from pipelines.file.faults import nearest
from pipelines.file.overrides import Preset, key_path, named_at
from pipelines.file.yaml_source import KeyPath, YamlSource, read_yaml
from pipelines.sweeps.search_ranges import Range, read_range

Axes = dict[str, list[Any] | Range]
"""Key as in `--set`, or what named rows are called -> its values, or their names, each once; or the range of a search."""

Named = dict[str, dict[str, dict[str, Any]]]
"""What named rows are called -> name of each -> the keys that it sets."""


@dataclass(frozen=True)
class Grid:
    """What a sweep compares: `axes`, of which those in `named` set several keys at once; what all trials set (`common`); and
    how often each is run by default."""

    axes: Axes = field(default_factory=dict)
    named: Named = field(default_factory=dict)
    common: tuple[Preset, ...] = ()
    seeds: int | None = None
    subsets: int | None = None

    def presets(self, values: Mapping[str, Any]) -> tuple[Preset, ...]:
        """What is set for these values, by axis: the later, the more specific."""
        named = ((f"{axis} {name}", self.named[axis][name]) for axis, name in values.items() if axis in self.named)
        return (*self.common, *named)

    def rows(self, axis: str) -> list[dict[str, Any]]:
        """What each value of an axis sets: the keys of a named row, or the axis itself; a range is one value."""
        values = self.axes[axis]
        values = [values] if isinstance(values, Range) else values
        return [self.named[axis][value] if axis in self.named else {axis: value} for value in values]

    def with_axes(self, axes: Axes, named: Named) -> Grid:
        """The same with more axes; those of equal name are replaced."""
        return Grid(self.axes | axes, {**self.named, **named}, self.common, self.seeds, self.subsets)


def read_grid(path: Path, table: Grid) -> Grid:
    """A table's grid (or an empty one) with the axes of the file of `--grid`.

    Raises UserError E115, E120, E123, and E101 or E106 of its YAML.
    """
    return _extended(table, read_yaml(path), ())


def read_table(path: Path, scale: str | None) -> Grid:
    """The grid of a pipeline file at one of its `scales`; an empty one of an ordinary pipeline.

    Raises UserError E115 (unknown scale, or none), E120, E123, E101, E106.
    """
    source = read_yaml(path)
    data = source.data if isinstance(source.data, dict) else {}
    if scale is not None and "scales" not in data:
        raise UserError("E115", f"--scale {scale}: the file has no scales", "Leave the option out", source.where(()))
    if not data.keys() & {"grid", "scales"}:
        return Grid()
    scales = _mapping(source, ("scales",)) if "scales" in data else {}
    if scales and scale not in scales:
        what = f"no scale '{scale:.60}'" if scale else "the table can be run at several scales"
        raise UserError("E115", what, nearest(scale or "", list(scales), "Give --scale"), source.where(("scales",)))
    chosen = _mapping(source, ("scales", scale)) if scale else {}
    grid = Grid(*_axes(source, ("grid",))) if "grid" in data else Grid()
    if "grid" in chosen:
        grid = _extended(grid, source, ("scales", scale, "grid"))
    for axis, values in grid.axes.items():
        if axis not in grid.named:
            _require_no_files(axis, values, source)
    keys = {key: value for key, value in chosen.items() if key not in TABLE_KEYS}
    repeats = {key: chosen.get(key, data.get(key)) for key in ("seeds", "subsets")}
    for key, count in repeats.items():
        if count is not None and not (isinstance(count, int) and count > 1):
            place = ("scales", scale, key) if key in chosen else (key,)
            raise UserError("E120", f"{key} is no number of 2 or more", "Write e.g. seeds: 5", source.where(place))
    return Grid(grid.axes, grid.named, ((f"scale {scale}" if scale else "table", keys),), **repeats)


def _extended(grid: Grid, source: YamlSource, path: KeyPath) -> Grid:
    """The grid with the axes at a path of a file. Raises UserError E120 where a list for named rows names others."""
    axes, named = _axes(source, path)
    for axis, values in axes.items():
        if axis in grid.named and axis not in named:
            axes[axis] = _known(values, grid.named[axis], source, (*path, axis))
    return grid.with_axes(axes, named)


def _require_no_files(key: str, values: list[Any] | Range, source: YamlSource) -> None:
    """Raises UserError E120 for a plain key of a table that names files: it is set as by --set, from the current folder."""
    listed = [] if isinstance(values, Range) else values
    named = named_at(key_path(source, key))
    if named == "file" or (named == "model" and any(written_as_path(value) and not value.startswith("/") for value in listed)):
        fix = f"Write named rows, whose paths are those of the table: {key.split('.')[0]}: {{NAME: {{{key}: FILE}}, ...}}"
        raise UserError("E120", f"'{key}' names files, and its values have no names", fix, source.where(("grid",)))


def _known(values: list[Any] | Range, names: Mapping[str, Any], source: YamlSource, path: KeyPath) -> list[str]:
    """The rows or columns that a list at a path names. Raises UserError E120 for one that the table has not, E115 for one that
    is named twice."""
    listed = [str(values)] if isinstance(values, Range) else values
    found = [cell_of(value, source.written.get((*path, place)), names) for place, value in enumerate(listed)]
    if (odd := next((cell for cell in found if cell not in names), None)) is not None:
        fix = nearest(odd, list(names), "Name its own")
        raise UserError("E120", f"the table has no '{odd:.60}' here", fix, source.where(path))
    require_once(found, source.where(path))
    return found


def _mapping(source: YamlSource, path: KeyPath) -> dict[str, Any]:
    value = source.get(path)
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise UserError("E120", "not a mapping of names to keys", "Write NAME: {KEY: VALUE}", source.where(path))
    return value


def _axes(source: YamlSource, path: KeyPath) -> tuple[Axes, Named]:
    fix = "Write one key a line with a list of two values or more: tune.rank: [4, 8]"
    data = source.get(path)
    if not isinstance(data, dict) or not data:
        raise UserError("E120", "a grid is a mapping of keys to lists of values", fix, source.where(path))
    axes, named = {}, {}
    for key, values in data.items():
        where = source.where((*path, key))
        if isinstance(values, dict) and values:
            named[key] = {name: _mapping(source, (*path, key, name)) for name in values}
            values = list(values)
        elif isinstance(key, str) and isinstance(values, str) and (found := read_range(key, values, where)):
            axes[key] = found
            continue
        elif not isinstance(key, str) or not isinstance(values, list) or len(values) < 2:
            raise UserError("E120", f"'{key}' has no list of several values", fix, where)
        require_no_null(values, where, "E120")
        require_once(values, where)
        axes[key] = values
    return axes, named


def shown_value(value: Any) -> str:
    """A value as a cell of a table: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cell_of(value: Any, written: str | None, cells: Collection[str]) -> str:
    """The cell that a value of a list names: as it is `written` in YAML where there is such a cell, for a name such as 1e-3 is
    also a number; else as a table shows it."""
    return written if written in cells else shown_value(value)


def require_no_null(values: list[Any], where: str, code: str) -> None:
    """Raise UserError of a code, E115 or E120, for null among the values of a key: it means the default, and a table would not
    say which that is."""
    if None in values:
        fix = "Write the key's default value, or named rows of a grid file, which may set null: size: {none: {KEY: null}, ...}"
        raise UserError(code, f"{where}: null is no value to compare", fix)


def require_once(values: list[Any], where: str) -> None:
    """Raise UserError E115 for a value that appears twice, and for two that a table would show alike, such as 8 and '8'."""
    if any(values.count(value) > 1 for value in values):
        raise UserError("E115", f"{where}: a value appears twice", "Write each value once")
    cells = [shown_value(value) for value in values]
    alike = [value for value, cell in zip(values, cells, strict=True) if cells.count(cell) > 1]
    if alike:
        what = f"{where}: {alike[0]!r:.60} and {alike[1]!r:.60} are written alike in a table"
        raise UserError("E115", what, "Keep one of the two, the number or the text")
