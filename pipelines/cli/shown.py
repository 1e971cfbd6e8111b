"""Lines that several commands print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError
from compressor.printable import printable
from compressor.run_store import RUN_AGAIN
from pipelines.reporting.report_table import heads_of
from pipelines.terminal.console_table import table


def say(line: str, err: bool = False) -> None:
    """Print a line for people, which may hold texts, labels and names of untrusted files. JSON for programs is not escaped."""
    click.echo(printable(line), err=err)


def note(text: str) -> None:
    """Lines beside the result, on stderr; none where there is nothing to tell."""
    for line in text.split("\n") if text else ():
        say(line, err=True)


def summary(run: Path) -> None:
    """The headline of a run's report, the notes without which it would mislead, and the summary as a table. Raises UserError
    E803 where the report is damaged."""
    path = run / "report.json"
    try:
        report = json.loads(path.read_bytes())
        heads = _heads(report)
        rows = [[str(row[key]) for key in heads] for row in report["summary"]]
        # reports of earlier versions have no notes in brief
        lines = [f"{report['headline']}.", *(f"- {line}" for line in report.get("brief", []))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError("E803", "unreadable or damaged", RUN_AGAIN, str(path)) from None
    for line in lines:
        say(line)
    table(list(heads.values()), rows)


def _heads(report: dict[str, Any]) -> dict[str, str]:
    """The keys of the summary that the terminal shows, and the heads of their columns: on the page there are more."""
    if "shown" in report:
        return {key: key for key in report["shown"]}
    heads = heads_of(report)
    return {key: heads[key] for key in ("metric", "dense", "compressed", "change")}


def near(place: Path) -> Path:
    """The path relative to the current folder if it is below that."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
