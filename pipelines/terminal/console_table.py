"""Printing tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from pipelines.terminal.plain_console import PlainConsole


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header: first column left-aligned, figures right-aligned. 120 wide where there is no terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for place, title in enumerate(header):
        # names wrap to the next line: truncated names could look equal
        table.add_column(title, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    PlainConsole(width=None if PlainConsole().is_terminal else 120).print(table, markup=False)


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
        " > ".join(filter(None, (figure(side, ".1f", 100) for side in sides))),
        " to ".join(filter(None, (figure(edge, "+.1f", 100) for edge in edges))),
        figure(record.get("worst_row"), "d"),
        _verdict(record),
    )


def _verdict(record: Mapping[str, Any]) -> str:
    """'passed', 'not shown', 'beyond its bound' or 'FAILED'; '' where there was no comparison."""
    if record.get("passed") is None:
        return ""
    verdict = record.get("verdict")
    return "FAILED" if not record["passed"] and verdict in (None, "refused") else str(verdict or "passed")


def figure(value: Any, form: str, times: int = 1) -> str:
    """A number in a format of Python's, times `times`; '' for anything else."""
    kinds = int if form == "d" else int | float
    return format(value * times, form) if isinstance(value, kinds) and not isinstance(value, bool) else ""
