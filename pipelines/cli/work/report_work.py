"""The work of `compress report`: what a run came to, from what it left on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from compressor.errors import UserError
from pipelines.cli.shown import near, note, say, summary
from pipelines.engine.attempt import Attempt, last_attempt
from pipelines.engine.lockfile import Failure
from pipelines.reporting.kept import plan_table
from pipelines.runs.finished import open_run, plan_of
from pipelines.terminal.console_table import PARITY_COLUMNS, parity_cells, table


def report(run: Path, plan: bool) -> None:
    """Show how a run went, or what is left of each layer."""
    if not plan:
        _show_report(run)
        return
    note(open_run(run).outdated)
    if layers := plan_of(run):
        table(*plan_table(layers))
    else:
        say("no heads, neurons or layers were removed")


def _show_report(run: Path) -> None:
    """Show the status of the last attempt at a run, the summary of its report and its path. Raises UserError E805 where there
    is neither, E803 for damaged files."""
    attempt, page = last_attempt(run), run / "report.html"
    reported = (run / "report.json").is_file()
    if attempt is not None and not attempt.finished:
        _show_unfinished(attempt)
        if reported:
            click.echo("\nthe run before it, which finished:")
            _show_failures(open_run(run).failures)
    elif not reported:
        raise UserError("E805", "this run has no report", "Give a run's folder, and run its report stage", str(run))
    elif attempt is not None:
        _show_failures(attempt.failures)
    if reported:
        summary(run)
        say(f"report: {near((page if page.is_file() else run / 'report.json').absolute())}")


def _show_failures(failures: Iterable[Failure]) -> None:
    for failure in failures:
        say(f"FAILED {failure.stage}: {failure.line()}")


def _show_unfinished(attempt: Attempt) -> None:
    """Show an unfinished attempt: its error, its stages, the parity checks so far, and what to do."""
    say(attempt.headline())
    if attempt.error:
        for line in attempt.error.shown():
            say(line)
        if attempt.error.log:
            say(f"log: {attempt.error.log}")
    say(f"stages finished: {', '.join(stage.id for stage in attempt.stages) or 'none'}")
    _show_failures(attempt.failures)
    if attempt.parity:
        click.echo("\nproven so far:")
        table(PARITY_COLUMNS, [parity_cells(str(record.get("stage", "")), record) for record in attempt.parity])
    say("The same command continues: what is finished is kept.")
