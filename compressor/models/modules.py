"""Names of a block's linear layers (query, key, ...), and the config type for a choice of them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

MODULES = (
    "query",
    "key",
    "value",
    "output",
    "cross_query",
    "cross_key",
    "cross_value",
    "cross_output",
    "ffn_in",
    "ffn_gate",
    "ffn_out",
)
"""In the order of the computation; `all` in a config means every one that the architecture has. `ffn_gate` is the gated half
of a GLU, `cross_*` is a decoder's attention to its encoder."""

REST = "everything else"
EVERYTHING = (*MODULES, REST)
"""Every parameter of the pretrained base: the matrices of the blocks, and the REST: embeddings, norms, biases."""


@dataclass(frozen=True)
class Span:
    """The weights of a removable unit of a block: rows of some matrices, columns of another.

    - `words`: what a report calls such units;
    - `in_attention`: units are heads of an attention; otherwise a unit is one row of each matrix and one column;
    - `tiled`: units are so many that they are removed in multiples of the tile that a matrix kernel computes at once;
    - `scores_columns`: the columns count in a unit's score by magnitude, not the rows alone (DSEE section 3.3).
    """

    rows: tuple[str, ...]
    columns: str
    words: str
    in_attention: bool = False
    tiled: bool = False
    scores_columns: bool = False

    @property
    def scored(self) -> tuple[str, ...]:
        """The modules whose magnitudes are a unit's score."""
        return (*self.rows, self.columns) if self.scores_columns else self.rows


STRUCTURES = {
    "heads": Span(("query", "key", "value"), "output", "heads", in_attention=True),
    "cross_heads": Span(
        ("cross_query", "cross_key", "cross_value"), "cross_output", "cross-attention heads", in_attention=True
    ),
    "neurons": Span(("ffn_in", "ffn_gate"), "ffn_out", "FFN neurons", tiled=True, scores_columns=True),
}
"""If several query heads share a key and value head, a unit of `heads` is such a group."""

TILED = tuple(name for name, span in STRUCTURES.items() if span.tiled)
"""Structures that are removed in tiles."""


def _expand_wide(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    # compared in a list: in a file a name may be anything, also what has no hash
    every = isinstance(names, list | tuple) and len(names) == len(EVERYTHING) and all(name in names for name in EVERYTHING)
    if every or names in (["everything"], ("everything",)):
        return EVERYTHING
    return _expand(value)


def _expand(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"give 'all' or some of {', '.join(MODULES)}")
    if list(names) == ["all"]:
        return MODULES
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise ValueError(f"unknown module '{unknown[0]}'; use 'all' or some of {', '.join(MODULES)}")
    return tuple(name for name in MODULES if name in names)


Name = Literal["all", *MODULES]
Modules = Annotated[tuple[str, ...], BeforeValidator(_expand, json_schema_input_type=Name | list[Name])]
"""`all`, one name or several -> a tuple in the anatomy's order."""

WideName = Literal["all", "everything", *MODULES]
WideModules = Annotated[tuple[str, ...], BeforeValidator(_expand_wide, json_schema_input_type=WideName | list[WideName])]
"""The same, or `everything`: also what is not a matrix of a block."""
