"""YAML text -> plain data with the line of every value, parsed by YAML 1.2's core schema.

PyYAML speaks YAML 1.1, where `5e-4` is text, `no` is false, `12:30` is 750 and the last of two equal keys wins. Only its
parser is used; scalars are interpreted, and duplicate keys refused, below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import UserError, UserErrors
from compressor.text_files import FileKind, read_text

MAX_VALUES = 10_000
"""Largest number of values: more are data, or aliases that multiply."""
MAX_DEPTH = 30
MAX_DIGITS = 4_000
"""Largest number of digits of an integer. Python refuses to convert more than 4,300."""
MOST_FAULTS = 100
"""Largest number of faults reported, so that a file with thousands is refused quickly."""
PIPELINE = FileKind(
    noun="pipeline file",
    most=256 * 1024,
    missing=("E101", "Check the path"),
    folder=("E101", "Name the .yaml file inside it"),
    size=("E101", "Name the pipeline file, not a data file"),
    encoding="E101",
)

GIVERS = SET, SWEEP = "--set", "the sweep's"
"""What gives keys and values that are in no pipeline file: an option; and a sweep, by --over, a grid file, its seeds or its
subsets."""

KeyPath = tuple[str | int, ...]

NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def scalar(text: str) -> str | int | float | bool | None:
    """The value of a plain (unquoted) scalar, by YAML 1.2's core schema (section 10.3.2).

    Raises ValueError for infinity, not-a-number and integers beyond any use.
    """
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    if INT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ValueError
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if not FLOAT.fullmatch(text):
        return text
    value = float(text.replace(".", "") if text[-1] in "fFnN" else text)
    if not math.isfinite(value):
        raise ValueError
    return value


def dotted(path: KeyPath) -> str:
    """('stages', 1, 'tune', 'rank') -> 'stages[1].tune.rank'; a long key is shortened."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part:.60}" for part in path).removeprefix(".")


@dataclass
class YamlSource:
    """The data of one file, and the location of each value: `marks` maps a key path to 'FILE:LINE', or to a word of GIVERS and
    the key with its value."""

    data: Any
    marks: dict[KeyPath, str] = field(default_factory=dict)
    written: dict[KeyPath, str] = field(default_factory=dict)
    """The unquoted scalars that are no text, as they are written: '1e-3' where the value is 0.001."""

    def locate(self, path: KeyPath) -> KeyPath:
        """The path as written in the file: parts that the file leaves out (a config's implied wrappers) are dropped."""
        parts, value = [], self.data
        for part in path:
            if part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value)):
                value = value[part]
                parts.append(part)
        return tuple(parts)

    def get(self, path: KeyPath) -> Any:
        """The value at a path from `locate`; None where the file has none."""
        value = self.data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else value[part]
        return value

    def where(self, path: KeyPath) -> str:
        """'pipeline.yaml:7: stages[1].tune.rank', with the line of the nearest part that the file contains."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                mark = self.marks[path[:length]]
                return mark if mark.startswith(GIVERS) or not path else f"{mark}: {dotted(path)}"
        return dotted(path)

    def has(self, path: KeyPath) -> bool:
        """Whether there is a value at `path`, if only null."""
        return self.locate(path) == path

    def put(self, path: KeyPath, value: Any, mark: str) -> None:
        """Set the value at `path`, and record where it came from; mappings on the way that are missing, or null, are made."""
        for length in range(1, len(path)):
            if not self.has(path[:length]) or self.get(path[:length]) is None:
                self.get(path[: length - 1])[path[length - 1]] = {}
                self.marks[path[:length]] = mark
        self.get(path[:-1])[path[-1]] = value
        self._forget(path)
        self.marks[path] = mark

    def drop(self, path: KeyPath) -> None:
        """Remove the key at `path`, which exists."""
        del self.get(path[:-1])[path[-1]]
        self._forget(path)

    def nest(self, path: KeyPath, name: str) -> None:
        """Put the value at `path` under a key of a mapping in its place: [...] -> {name: [...]}."""
        self.get(path[:-1])[path[-1]] = {name: self.get(path)}
        mark = self.marks.get(path)
        for facts in (self.marks, self.written):
            inside = [other for other in facts if other[: len(path)] == path]
            facts.update({(*path, name, *other[len(path) :]): facts.pop(other) for other in inside})
        if mark is not None:  # a value inside one that was put as a whole has none of its own
            self.marks[path] = mark

    def _forget(self, path: KeyPath) -> None:
        for facts in (self.marks, self.written):
            for stale in [other for other in facts if other[: len(path)] == path]:
                del facts[stale]


def read_yaml(path: Path) -> YamlSource:
    """Read a pipeline file. Raises UserErrors with every E101 (not YAML) and E106 (key twice) fault in it."""
    return parse(read_text(path, PIPELINE), str(path))


def parse(text: str, name: str) -> YamlSource:
    """Parse YAML text; `name` is the file's name in errors. Raises UserErrors E101, E104, E106."""
    try:
        root = _Bounded(text, name).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise UserError("E101", f"not YAML ({problem})", "Check indentation, brackets and quotes there", place) from None
    builder = _Builder(name)
    source = YamlSource(None if root is None else builder.build(root, ()), builder.marks, builder.written)
    source.marks.setdefault((), f"{name}:1")
    if builder.errors:
        raise UserErrors(first_of(builder.errors))
    return source


def first_of(faults: list[UserError]) -> list[UserError]:
    """The first MOST_FAULTS faults; the last one mentions how many more there are."""
    if len(faults) <= MOST_FAULTS:
        return faults
    last, more = faults[MOST_FAULTS - 1], len(faults) - MOST_FAULTS
    return [*faults[: MOST_FAULTS - 1], UserError(last.code, last.what, f"{last.fix} (and {more:,} more faults)", last.where)]


class _Bounded(yaml.SafeLoader):
    """PyYAML's composer, stopping at the first tag, at a level that is too deep and at too many values.

    It checks events as they are parsed, so the rest is never scanned: a file of brackets is refused at its thirty-first.
    """

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.source, self.depth, self.nodes = name, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        place = f"{self.source}:{event.start_mark.line + 1}"
        if tag := getattr(event, "tag", None):
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            raise UserError("E101", f"tag '{shown:.60}'", "Remove it: tags are not used here", place)
        self.nodes += 1
        if self.depth > MAX_DEPTH:
            raise UserError("E101", "nested too deeply", f"Write at most {MAX_DEPTH} levels", place)
        if self.nodes > 2 * MAX_VALUES + 1:  # keys count as nodes, too
            raise _too_many(place)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _too_many(place: str) -> UserError:
    return UserError("E101", f"more than {MAX_VALUES:,} values", "Name the pipeline file, not a data file", place)


class _Builder:
    """Walks the node graph once, recording lines and faults."""

    def __init__(self, name: str):
        self.name = name
        self.marks: dict[KeyPath, str] = {}
        self.written: dict[KeyPath, str] = {}
        self.errors: list[UserError] = []
        self.count = 0
        self.seen: set[int] = set()
        self.repeated = False
        """Whether a value occurs several times, through aliases."""

    def build(self, node: yaml.Node, path: KeyPath, line: int | None = None, above: tuple[int, ...] = ()) -> Any:
        """The value of a node. `line` is its key's line; `above` are the nodes around it, to detect a recursive alias."""
        self.count += 1
        line = node.start_mark.line + 1 if line is None else line
        self.marks[path] = f"{self.name}:{line}"
        self.repeated |= id(node) in self.seen
        self.seen.add(id(node))
        if len(above) == MAX_DEPTH:
            raise UserError("E101", "nested too deeply", f"Write at most {MAX_DEPTH} levels", self.marks[path])
        if id(node) in above or (self.count > MAX_VALUES and self.repeated):
            raise UserError("E101", "aliases that multiply or contain themselves", "Write the values out", self.marks[path])
        if self.count > MAX_VALUES:
            raise _too_many(self.marks[path])
        above = (*above, id(node))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, place), None, above) for place, item in enumerate(node.value)]
        return {key: self.build(value, (*path, key), at, above) for key, at, value in self.keys(node, path)}

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.style is not None:  # quoted or a block: text
            return self.text(node, path)
        try:
            value = scalar(node.value)
        except ValueError:
            value = node.value if len(node.value) <= 40 else f"{node.value[:37]}..."
            what = f"a number of {len(node.value):,} digits" if INT.fullmatch(node.value) else f"{value} is no finite number"
            self.fault("E104", what, "Write a finite number", path)
            return None
        if not isinstance(value, str):
            self.written[path] = node.value
        return value

    def text(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        """A text; a character beyond U+FFFF may be two escapes, \\uD83D\\uDE42, as in JSON."""
        try:
            return node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            what = "an unpaired surrogate (\\uD800 to \\uDFFF), half of a character"
            self.fault("E101", what, "Write the whole character, or remove it", path)
            return node.value

    def keys(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, int, yaml.Node]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.fault("E101", "a key that is a list or a mapping", "Use a word as key", path, line)
            elif (name := self.text(key, path)) in first:
                self.fault("E106", f"key given twice, first in line {first[name]}", "Keep one of them", (*path, name), line)
            else:
                first[name] = line
                yield name, line, value

    def fault(self, code: str, what: str, fix: str, path: KeyPath, line: int | None = None) -> None:
        mark = self.marks[path] if line is None else f"{self.name}:{line}"
        self.errors.append(UserError(code, what, fix, f"{mark}: {dotted(path)}".removesuffix(": ")))
