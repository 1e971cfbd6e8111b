"""YAML text -> plain data in which every value remembers its line, read by YAML 1.2's core schema.

PyYAML speaks YAML 1.1, where `5e-4` is text, `no` is false, `12:30` is 750 and the last of two equal keys wins. Here only
its parser is used; what a scalar means, and that a key comes once, is decided below.
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

MAX_VALUES = 10_000
"""More values than this is no pipeline: it is aliases that multiply."""
MAX_DEPTH = 30

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
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if not FLOAT.fullmatch(text):
        return text
    value = float(text.replace(".", "") if text[-1] in "fFnN" else text)
    if not math.isfinite(value):
        raise ValueError
    return value


def dotted(path: KeyPath) -> str:
    """('stages', 1, 'tune', 'rank') -> 'stages[1].tune.rank'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


@dataclass
class Source:
    """The data of one file, and where each value stands: `marks` maps a key path to 'FILE:LINE' or to a --set option."""

    data: Any
    marks: dict[KeyPath, str] = field(default_factory=dict)

    def locate(self, path: KeyPath) -> KeyPath:
        """The path as the file spells it: parts that the file leaves out (a config's implied wrappers) are dropped."""
        found, here = [], self.data
        for part in path:
            if part in here if isinstance(here, dict) else isinstance(here, list) and part in range(len(here)):
                here = here[part]
                found.append(part)
        return tuple(found)

    def get(self, path: KeyPath) -> Any:
        """The value at a path that `locate` gave; None where the file has none."""
        here = self.data
        for part in path:
            here = here.get(part) if isinstance(here, dict) else here[part]
        return here

    def where(self, path: KeyPath) -> str:
        """'pipeline.yaml:7: stages[1].tune.rank', with the line of the nearest part that the file holds."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                mark = self.marks[path[:length]]
                return mark if mark.startswith("--set") or not path else f"{mark}: {dotted(path)}"
        return dotted(path)

    def put(self, path: KeyPath, value: Any, mark: str) -> None:
        """Set the value at `path`, whose parent exists, and note where it came from."""
        self.get(path[:-1])[path[-1]] = value
        for stale in [known for known in self.marks if known[: len(path)] == path]:
            del self.marks[stale]
        self.marks[path] = mark


def read_yaml(path: Path) -> Source:
    """Read a pipeline file. Raises UserErrors with every E101 (not YAML) and E106 (key twice) fault in it."""
    if path.is_dir():
        raise UserError("E101", "a folder, not a pipeline file", "Name the .yaml file inside it", str(path))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError("E101", f"cannot be read ({error.strerror})", "Check the path and its permissions", str(path)) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError("E101", "not UTF-8", "Convert it: iconv -f latin1 -t utf-8", f"{path}:{line}") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Source:
    """Parse YAML text; `name` is what errors call it. Raises UserErrors E101, E104, E106."""
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            if isinstance(token, yaml.TagToken):
                place = f"{name}:{token.start_mark.line + 1}"
                raise UserError(
                    "E101", f"tag '{''.join(filter(None, token.value))}'", "Remove it: tags are not used here", place
                )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
        raise UserError("E101", f"not YAML ({problem})", "Check indentation, brackets and quotes there", place) from None
    except RecursionError:
        raise UserError("E101", "nested too deeply", "Write fewer levels", name) from None
    builder = _Builder(name)
    source = Source(None if root is None else builder.build(root, ()), builder.marks)
    source.marks.setdefault((), f"{name}:1")
    if builder.errors:
        raise UserErrors(builder.errors)
    return source


class _Builder:
    """Walks the node graph once, writing down lines and faults."""

    def __init__(self, name: str):
        self.name = name
        self.marks: dict[KeyPath, str] = {}
        self.errors: list[UserError] = []
        self.count = 0

    def build(self, node: yaml.Node, path: KeyPath, line: int | None = None, above: tuple[int, ...] = ()) -> Any:
        """The value of a node. `line` is its key's line; `above` are the nodes around it, to see an alias that holds itself."""
        self.count += 1
        line = node.start_mark.line + 1 if line is None else line
        self.marks[path] = f"{self.name}:{line}"
        if len(above) == MAX_DEPTH:
            raise UserError("E101", "nested too deeply", "Write fewer levels", self.marks[path])
        if id(node) in above or self.count > MAX_VALUES:
            raise UserError("E101", "aliases that multiply or hold themselves", "Write the values out", self.marks[path])
        above = (*above, id(node))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, place), None, above) for place, item in enumerate(node.value)]
        return {key: self.build(value, (*path, key), at, above) for key, at, value in self.keys(node, path)}

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.style is not None:  # quoted or a block: text
            return node.value
        try:
            return scalar(node.value)
        except ValueError:
            self.fault("E104", f"{node.value[:40]} is no finite number", "Write a finite number", path)

    def keys(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, int, yaml.Node]]:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.fault("E101", "a key that is a list or a mapping", "Use a word as key", path, line)
            elif key.value in first:
                inside = (*path, key.value)
                self.fault("E106", f"key given twice, first in line {first[key.value]}", "Keep one of them", inside, line)
            else:
                first[key.value] = line
                yield key.value, line, value

    def fault(self, code: str, what: str, mend: str, path: KeyPath, line: int | None = None) -> None:
        mark = self.marks[path] if line is None else f"{self.name}:{line}"
        self.errors.append(UserError(code, what, mend, f"{mark}: {dotted(path)}".removesuffix(": ")))
