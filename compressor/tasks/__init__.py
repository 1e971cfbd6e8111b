"""A labelled task: its configuration, and how the user's files are read and checked.

The kinds are for single sentences or pairs (classes, numbers), words with tags, prompts or sources with texts, and others.
`task_kind.TaskKind` defines what differs between them; a new one is a file in `kinds/` and a row in `KINDS`.
"""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from compressor.arguments import NAME_PATTERN
from compressor.tasks.decoding.decode_config import DecodeConfig


class Columns(NamedTuple):
    """The columns of a kind of task where a pipeline names none; `least` and `most` columns of texts make a row."""

    text: str | list[str]
    label: str
    least: int = 1
    most: int = 1


KINDS = {
    "classification": Columns("text", "label", most=2),
    "regression": Columns("text", "label", most=2),
    "tokens": Columns("tokens", "tags"),
    "generation": Columns("prompt", "target"),
    "multilabel": Columns("text", "labels", most=2),
    "spans": Columns(["question", "context"], "answers", least=2, most=2),
    "marked": Columns(["text", "span1", "span2"], "label", least=2, most=3),
    "choices": Columns(["text", "choices"], "label", least=2, most=21),
    "text2text": Columns("source", "target", most=9),
}
"""Default columns of every kind of task; each kind is a file in `kinds/`."""

GENERATED = ("generation", "text2text")
"""The kinds whose models write texts."""

MOST_TOKENS = 8_192
"""Largest length that a row may be given."""

TABLES = (".tsv", ".csv")
"""Suffixes of data files with a line of fields for each row."""
PARQUET = ".parquet"
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

    def count(self, rows: int) -> int:
        """How many of so many rows are drawn."""
        # the share as written: 0.29 of 100 rows is 29, although 0.29 * 100 is slightly less in floating point
        return int(Fraction(str(self.share)) * rows)

    def sample(self, rows: int) -> list[int]:
        """The numbers of those that are drawn of so many rows, in order."""
        return sorted(random.Random(self.seed).sample(range(rows), self.count(rows)))


TestName = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=64)]
"""The name of a file that is only scored, as it appears in metadata and tables."""


class TaskConfig(BaseModel):
    """The `task:` block of a pipeline. `text` names one column, or as many as the kind reads (`KINDS`): two for sentence pairs,
    a column for each choice. The default columns are the kind's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal[tuple(KINDS)] = Field(
        default="classification", description="what is predicted for a row: a class, a number, tags, a text, ..."
    )
    train: Path = Field(
        description="rows to train on: .csv, .tsv, .jsonl, .parquet, .conll or .txt, optionally compressed (.gz); "
        "or a data set of the hub, hub:OWNER/NAME[:CONFIG]/SPLIT[:ROWS]"
    )
    validation: Path = Field(description="rows that quality is measured on")
    text: str | list[str] = Field(
        default="text", description="the column of the text, or a list: two for pairs; text2text: each named in the source"
    )
    label: str = Field(default="label", validate_default=True, description="the column of the labels, tags or targets")
    max_length: int = Field(
        default=128, ge=4, le=MOST_TOKENS, description="maximum tokens of a row: longer rows are truncated, or refused (E213)"
    )
    subset: Subset | None = Field(default=None, description="train on a random share of the rows only")
    metric: str | None = Field(
        default=None,
        description="the main metric, by which models are compared, chosen and refused; default: the kind's first of "
        "`compress list metrics`",
    )
    positive: str | Annotated[int, Field(ge=-(2**53), le=2**53)] | None = Field(
        default=None, description="the class that f1 and accuracy_f1 judge; default: the second of two, in order"
    )
    test: Path | Annotated[dict[TestName, Path], Field(min_length=1, max_length=20)] | None = Field(
        default=None, description="rows that are only scored: a file, or files by name; nothing is chosen by them"
    )
    header: bool | None = Field(
        default=None, description="false: .csv and .tsv files have no line of names; columns are column1, column2, ..."
    )
    broken_rows: Literal["skip"] | None = Field(
        default=None,
        description="skip: leave out rows of .csv and .tsv files with another number of fields than the first line; "
        "`compress check` and `compress run` name their lines. Default: such a row is an error",
    )
    decode: DecodeConfig | None = Field(
        default=None, description="generation, text2text: also generate a text for each validation prompt and score it"
    )
    prefix: str | None = Field(
        default=None, min_length=1, max_length=1000, description="text2text: put before each source, such as 'summarize: '"
    )
    target_length: int | None = Field(
        default=None,
        ge=2,
        le=MOST_TOKENS,
        description="text2text: maximum tokens of a target, longer ones are cut; default: no limit",
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
    def _as_many_as_the_kind_reads(cls, text: str | list[str], info: ValidationInfo) -> str | list[str]:
        kind, count = info.data.get("kind", "classification"), len(text) if isinstance(text, list) else 1
        least, most = KINDS[kind].least, KINDS[kind].most
        if isinstance(text, list) and len(set(text)) < len(text):
            raise ValueError("a pair needs two different columns" if most == 2 else "text names a column twice")
        if not least <= count <= most:
            raise ValueError(_wrong_number(kind, least, most))
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

    @field_validator("positive", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, bool) else value  # as the labels of a .jsonl file are read

    @field_validator("test")
    @classmethod
    def _has_names_of_its_own(cls, test: Path | dict[str, Path] | None) -> Path | dict[str, Path] | None:
        if isinstance(test, dict) and "validation" in test:
            raise ValueError("validation is what reports call the rows of `validation`: give the file another name")
        return test

    @field_validator("header", "broken_rows")
    @classmethod
    def _has_tables(cls, value: bool | str | None, info: ValidationInfo) -> bool | str | None:
        test = info.data.get("test")
        files = [info.data.get("train"), info.data.get("validation"), *(test.values() if isinstance(test, dict) else [test])]
        if value is not None and not any(path and ending(path) in TABLES for path in files):
            raise ValueError(f"{info.field_name} is used by {' and '.join(TABLES)} files, and the task names none")
        return value

    @field_validator("decode")
    @classmethod
    def _generates(cls, decode: DecodeConfig | None, info: ValidationInfo) -> DecodeConfig | None:
        if decode is not None and info.data.get("kind") not in GENERATED:
            raise ValueError(f"decode is used by tasks of kind {' and '.join(GENERATED)}")
        return decode

    @field_validator("prefix", "target_length")
    @classmethod
    def _has_sources(cls, value: str | int | None, info: ValidationInfo) -> str | int | None:
        if value is not None and info.data.get("kind") != "text2text":
            raise ValueError(f"{info.field_name} is used by tasks of kind text2text")
        return value

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)

    @property
    def tests(self) -> dict[str, Path]:
        """The files that are only scored, by name; a single one is called `test`."""
        return self.test if isinstance(self.test, dict) else {"test": self.test} if self.test else {}


def named_files(task: TaskConfig) -> dict[tuple[str, ...], Path]:
    """The data files of a task by the key that names each: ("train",), or ("test", NAME) of several."""
    one = not isinstance(task.test, dict)
    tests = {("test",) if one else ("test", name): path for name, path in task.tests.items()}
    return {("train",): task.train, ("validation",): task.validation, **tests}


def _wrong_number(kind: str, least: int, most: int) -> str:
    """What is wrong with the number of columns in `text`."""
    if (least, most) == (1, 2):
        return "text names one column, or two for sentence pairs"
    reads = "one column" if most == 1 else f"{least} columns" if least == most else f"{least} to {most} columns"
    return f"a task of kind {kind} reads {reads}"


def data_files(task: TaskConfig) -> list[Path]:
    """The files whose content affects the result, for fingerprints."""
    return list(named_files(task).values())
