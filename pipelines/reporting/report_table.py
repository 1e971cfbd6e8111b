"""A table of a report, and the cells that its columns make of records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.reporting.format import significant

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its title, `l`(eft) for words or `r`(ight) for numbers, and the cell that it makes of a record."""

    title: str
    align: str
    cell: Callable[[Any], str]


@dataclass(frozen=True)
class ReportTable:
    """A table. `align` has one letter per column: l(eft) for words, r(ight) for numbers. `rows` hold as many strings."""

    id: str
    title: str
    note: str
    columns: tuple[str, ...]
    align: str
    rows: list[tuple[str, ...]]


def heads_of(report: Record) -> dict[str, str]:
    """The keys of a row of the summary, and the heads of their columns, which name the models compared: of a report of a run
    with one task, timed or not."""
    last = report["deployed"]
    if report["measured"] is None:
        return {"metric": "", "dense": "dense", "compressed": f"after {last}", "change": "against dense"}
    _, runtime, _ = last.split()
    return {
        "metric": "",
        "dense": "dense PyTorch",
        "runtime": f"dense {runtime} fp32",
        "compressed": last,
        "change": "against PyTorch",
        "change_runtime": f"against {runtime} fp32",
    }


def made(id: str, title: str, columns: Sequence[Column], records: Iterable[Any], note: str) -> ReportTable:
    """A table with a row for every record."""
    rows = [tuple(column.cell(record) for column in columns) for record in records]
    return ReportTable(
        id, title, note, tuple(column.title for column in columns), "".join(column.align for column in columns), rows
    )


def text(key: str) -> Callable[[Record], str]:
    """A cell that shows the value of a key unchanged, empty if there is none."""
    return lambda record: str(record.get(key, ""))


def count(key: str) -> Callable[[Record], str]:
    """A cell that shows a whole number."""
    return lambda record: f"{record[key]:,}"


def digits(key: str) -> Callable[[Record], str]:
    """A cell that shows three significant digits."""
    return lambda record: significant(record[key])
