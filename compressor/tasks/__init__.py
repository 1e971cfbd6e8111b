"""A labelled task: its configuration, and how the user's files are read and checked.

Two kinds for single sentences or sentence pairs (classes, numbers), one for words with tags, and one for prompts with texts.
`task_kind.TaskKind` defines what differs between them; a new one is a file in `kinds/` and a row in `KINDS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from compressor.tasks.decoding.decode_config import DecodeConfig


class Columns(NamedTuple):
    """The columns of a kind of task where a pipeline names none, and whether a row may be a pair of two texts."""

    text: str
    label: str
    pairs: bool


KINDS = {
    "classification": Columns("text", "label", pairs=True),
    "regression": Columns("text", "label", pairs=True),
    "tokens": Columns("tokens", "tags", pairs=False),
    "generation": Columns("prompt", "target", pairs=False),
}
"""Default columns of every kind of task; each kind is a file in `kinds/`."""

PACKED = ".gz"
"""Suffix of a gzipped data file, after the suffix of its format."""


def ending(path: Path) -> str:
    """Extension by which a data file is read: '.tsv' for train.tsv and for train.tsv.gz."""
    return Path(path.stem).suffix if path.suffix == PACKED else path.suffix


class Subset(BaseModel):
    """A random sample of the training rows: floor(`share` x rows) of them, without replacement, in the file's order.

    One `seed` draws the same rows every time; labels are not balanced. All validation rows are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(gt=0, lt=1, description="share of the training rows")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of the draw")


class TaskConfig(BaseModel):
    """The `task:` block of a pipeline. `text` names one column, or two for sentence pairs; the default columns are `tokens` and
    `tags` for token classification, `prompt` and `target` for generation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal[tuple(KINDS)] = Field(
        default="classification", description="what is predicted for a row: a class, a number, tags or a text"
    )
    train: Path = Field(description="rows to train on: .csv, .tsv, .jsonl, .conll or .txt, optionally compressed (.gz)")
    validation: Path = Field(description="rows that quality is measured on")
    text: str | list[str] = Field(default="text", description="the column of the text, or a list of two for pairs")
    label: str = Field(default="label", validate_default=True, description="the column of the labels, tags or targets")
    max_length: int = Field(
        default=128, ge=4, le=8192, description="maximum tokens of a row: longer rows are truncated, or refused (E213)"
    )
    subset: Subset | None = Field(default=None, description="train on a random share of the rows only")
    decode: DecodeConfig | None = Field(
        default=None, description="generation: also generate a text for each validation prompt and score it"
    )

    @model_validator(mode="before")
    @classmethod
    def _columns_of_the_kind(cls, raw: Any) -> Any:
        kind = raw.get("kind") if isinstance(raw, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            return raw
        return {"text": KINDS[kind].text, "label": KINDS[kind].label, **raw}

    @field_validator("text")
    @classmethod
    def _one_or_two_columns(cls, text: str | list[str], info: ValidationInfo) -> str | list[str]:
        if isinstance(text, list) and len(text) not in (1, 2):
            raise ValueError("text names one column, or two for sentence pairs")
        if isinstance(text, list) and len(set(text)) < len(text):
            raise ValueError("a pair needs two different columns")
        if isinstance(text, list) and len(text) > 1 and not KINDS[info.data.get("kind", "classification")].pairs:
            raise ValueError(f"a task of kind {info.data['kind']} reads one column")
        return text

    @field_validator("label")
    @classmethod
    def _no_text(cls, label: str, info: ValidationInfo) -> str:
        text = info.data.get("text", ())
        if label in ((text,) if isinstance(text, str) else text):
            raise ValueError("label and text must be different columns")
        if len(label.splitlines()) != 1:
            raise ValueError("label must be the name of a column, in one line")
        return label

    @field_validator("decode")
    @classmethod
    def _generates(cls, decode: DecodeConfig | None, info: ValidationInfo) -> DecodeConfig | None:
        if decode is not None and info.data.get("kind") != "generation":
            raise ValueError("decode is used by tasks of kind generation")
        return decode

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


def data_files(task: TaskConfig) -> list[Path]:
    """The files whose content affects the result, for fingerprints."""
    return [task.train, task.validation]
