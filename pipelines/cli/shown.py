"""Lines that several commands print."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compressor.errors import UserError
from pipelines.terminal.console_table import table


def note(text: str) -> None:
    """A line beside the result, on stderr; none where there is nothing to tell."""
    if text:
        click.echo(text, err=True)


def summary(run: Path) -> None:
    """The summary of a run's report as a table. Raises UserError E803 where the report is damaged."""
    path = run / "report.json"
    try:
        report = json.loads(path.read_bytes())
        keys = report.get("shown", ["metric", "dense", "compressed", "change"])
        rows = [[str(row[key]) for key in keys] for row in report["summary"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fix = "Run the pipeline again: what is finished is kept"
        raise UserError("E803", "unreadable or damaged", fix, str(path)) from None
    table(keys, rows)


def near(place: Path) -> Path:
    """The path relative to the current folder if it is below that."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
