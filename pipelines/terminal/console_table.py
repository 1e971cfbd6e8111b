"""Printing tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from compressor.printable import printable
from pipelines.reporting.format import rounded
from pipelines.terminal.plain_console import PlainConsole


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header: first column left-aligned, figures right-aligned. 120 wide where there is no terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for place, title in enumerate(map(_shown, header)):
        # names wrap to the next line: truncated names could look equal
        table.add_column(title, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_shown, row))
    PlainConsole(width=None if PlainConsole().is_terminal else 120).print(table, markup=False)


def _shown(cell: str) -> str:
    return "\n".join(map(printable, cell.split("\n")))


PARITY_COLUMNS = ("stage: check", "rows", "max |Δ|", "mean |Δ|", "agree", "metric, %", "change", "worst", "")


def parity_cells(stage: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The row of a comparison's record under PARITY_COLUMNS; figures missing from the record are left out."""
    interval, sides = record.get("metric_interval"), [record.get(key) for key in ("metric_reference", "metric_candidate")]
    edges = interval if isinstance(interval, list | tuple) else ()
    return (
        f"{stage}: {record.get('hop', '')}",
        figure(record.get("rows"), "d"),
        figure(record.get("max_difference"), ".1e"),
        figure(record.get("mean_difference"), ".1e"),
        figure(record.get("agreement"), ".1%"),
        " > ".join(filter(None, map(_in_hundredths, sides))),
        " to ".join(filter(None, (_in_hundredths(edge, "+") for edge in edges))),
        figure(record.get("worst_row"), "d"),
        _verdict(record),
    )


def _verdict(record: Mapping[str, Any]) -> str:
    """'passed', 'not shown', 'beyond its bound' or 'FAILED'; '' where there was no comparison."""
    if record.get("passed") is None:
        return ""
    verdict = record.get("verdict")
    return "FAILED" if not record["passed"] and verdict in (None, "refused") else str(verdict or "passed")


def _in_hundredths(value: Any, sign: str = "") -> str:
    """A share times 100, rounded as in a report, with the sign '+' as a change; '' for anything else."""
    return figure(rounded(100 * value, 1), f"{sign}.1f") if figure(value, "f") else ""


def figure(value: Any, form: str) -> str:
    """A number in a format of Python's; '' for anything else."""
    kinds = int if form == "d" else int | float
    return format(value, form) if isinstance(value, kinds) and not isinstance(value, bool) else ""
