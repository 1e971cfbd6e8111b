"""The work of `compress sweep`: several runs side by side."""

from __future__ import annotations

from typing import Any

import click

from compressor.errors import UserError
from pipelines.cli.shown import near
from pipelines.engine.attempt import checks_failed
from pipelines.file.config import find_pipeline
from pipelines.runs.sweep import sweep as run_all
from pipelines.terminal.console_table import table


def sweep(file: str, kind: str | None, runs: int | None, **options: Any) -> None:
    """Run a pipeline once for each seed, subset or value, and show the table."""
    spread = (kind, runs, options["share"])
    if any(option is not None for option in spread) if options["over"] else None in spread[:2]:
        raise UserError("E115", "a sweep is either --stability with --runs, or --over", "Give one of the two")
    result = run_all(find_pipeline(file), kind or "values", runs, **options, say=click.echo)
    table(result.columns, result.rows)
    click.echo(f"sweep: {near(result.folder / 'sweep.md')}")
    if result.failures:
        raise checks_failed(result.failures)
