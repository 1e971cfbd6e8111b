"""The work of `compress store`: what the store of a folder of runs holds, and the removal of what none of them uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from compressor.cost import human_bytes
from compressor.errors import UserError
from pipelines.cli.shown import note, say
from pipelines.runs.stored import ARTIFACT, WORK, Stored, remove, stored, unused
from pipelines.terminal.console_table import table

COLUMNS = ("result", "size", "age, days", "used by")
DAYS = 7
MOST_NAMES = 3


def store(out: Path, remove_unused: bool, remove_caches: bool, older_than: float | None, as_json: bool) -> None:
    """Show the results, or remove some of them and show those."""
    removes = remove_unused or remove_caches
    if older_than is not None and not removes:
        raise UserError("E112", "--older-than is of what is removed", "Add --remove-unused or --remove-caches")
    contents = stored(out)
    rows = contents.rows
    if removes:
        if contents.unread:
            raise contents.unread
        asked = [*(unused(rows) if remove_unused else ()), *(unused(rows, caches=True) if remove_caches else ())]
        rows = _removed(out, asked, DAYS if older_than is None else older_than)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
        return
    if contents.unread:
        note(f"note: {contents.unread.where}: {contents.unread.what}")
    if removes:
        for row in rows:
            say(f"{row.name} ({human_bytes(row.bytes)})")
        say(f"removed: {_counted(rows)}")
    else:
        table(COLUMNS, [(row.name, human_bytes(row.bytes), f"{row.days:.1f}", _users(row)) for row in rows])
        say(f"in all: {_counted(rows)}; used by no run: {_counted(unused(rows))}")


def _removed(out: Path, asked: Sequence[Stored], days: float) -> list[Stored]:
    """Remove those that are old enough, or from which nothing can go on, and that no process uses; returns them, and tells of
    the others."""
    young = [row for row in asked if row.days < days and row.kind != WORK]
    results = list(remove(out, [row for row in asked if row not in young], days))
    for reason in dict.fromkeys(reason for _, reason in results if reason):
        note(f"kept, {reason}: {_counted([row for row, other in results if other == reason])}")
    if young:
        note(f"kept, younger than {days:g} days: {_counted(young)}; --older-than 0 removes these, too")
    return [row for row, reason in results if not reason]


def _users(row: Stored) -> str:
    """The first runs of an artifact and how many more there are; of another result what it is."""
    if row.kind != ARTIFACT:
        return f"({row.kind})"
    more = len(row.runs) - MOST_NAMES
    named = ", ".join(row.runs[:MOST_NAMES])
    return f"{named} and {more} more" if more > 0 else named or "no run"


def _counted(rows: Sequence[Stored]) -> str:
    return f"{len(rows)} {'result' if len(rows) == 1 else 'results'}, {human_bytes(sum(row.bytes for row in rows))}"
