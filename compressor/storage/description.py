"""Schema of a delta file's description, checked once when it is read; afterwards its types and sizes are trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt, StrictStr

from compressor.deltas.registry import KINDS, PROTOTYPES
from compressor.deltas.sources import Prototype
from compressor.storage.layout import SECTIONS, blocks_of, unfold

MOST_CHANGES = 100_000
"""Largest number of changes in a file; even a short header could claim any number."""
LONGEST = 10_000
"""Largest length of a name."""

Name = Annotated[StrictStr, Field(max_length=LONGEST)]
Size = Annotated[StrictInt, Field(ge=0, lt=2**40)]
Shape = Annotated[list[Size], Field(max_length=4)]
Shapes = dict[Name, Shape]
Scalar = StrictBool | StrictInt | FiniteFloat | Name | None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Kept(_Part):
    """What pruning kept: the blocks, and units of each structure."""

    blocks: Annotated[list[Name], Field(max_length=10_000)]
    sizes: dict[Name, Size]


def _checked_kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"no kind of change is called {kind!r:.40}")
    return kind


def _checked_prototype(kind: str) -> str:
    if kind not in PROTOTYPES:
        raise ValueError(f"no kind of prototype is called {kind!r:.40}")
    return kind


class _Change(_Part):
    """One change with its tensors' shapes; the other settings of its class are plain values."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Scalar]

    kind: Annotated[StrictStr, AfterValidator(_checked_kind)]
    group: Name = ""
    rows: Annotated[list[Size], Field(min_length=2, max_length=2)] | None = None
    values: Shapes = {}
    indices: dict[Name, Shape | Name] = {}
    masks: Shapes = {}


class _Prototype(_Part):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Scalar]

    kind: Annotated[StrictStr, AfterValidator(_checked_prototype)] = Prototype.kind
    group: Name = ""
    values: Shapes = {}


class _TaskMasks(_Part):
    combine: Name
    masks: Shapes


# JSON has lists where strict validation wants tuples
_Row = Annotated[tuple[list[Name], StrictStr, Any], Field(strict=False)]


class _Layout(_Part):
    """The changes, in sections of rows [paths, blocks, changes] as `layout.compact` writes them."""

    prototypes: dict[Name, _Prototype]
    tasks: dict[Name, _TaskMasks] = {}
    links: list[_Row]
    inserts: list[_Row]


class _Shared(_Part):
    file: Annotated[Name, Field(pattern=r"^[^/\\\x00]+$")]
    sha256: Name


class _Description(_Part):
    """The whole description except its checksum. Unknown keys of later versions are ignored."""

    format: StrictInt
    base: Name
    base_sha256: Name
    labels: Annotated[list[Name], Field(max_length=10_000)]
    auto_class: Name = ""
    kind: Name = ""
    kept: _Kept | Annotated[dict[Name, Any], Field(max_length=0)]
    changes: _Layout
    head: Shapes | None
    shared: _Shared | None = None
    tasks: Annotated[list[Name], Field(max_length=10_000)] = []


def check(description: Mapping[str, Any]) -> None:
    """Raises ValueError (or pydantic's subclass) for a description that no writer in this project can produce."""
    _Description.model_validate(description)
    count = 0
    for section in SECTIONS:
        for paths, ranges, changes in description["changes"][section]:
            blocks = blocks_of(ranges)
            count += len(paths) * len(blocks)
            if count > MOST_CHANGES:
                raise ValueError(f"more than {MOST_CHANGES} changes")
            for index in range(len(blocks)):
                for change in unfold(changes, index):
                    _Change.model_validate(change)
