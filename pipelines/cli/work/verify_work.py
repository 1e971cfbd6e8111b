"""The work of `compress verify`: repeat every check of a finished run and print a row for each."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compressor.errors import CheckError
from pipelines.cli.shown import say
from pipelines.engine.attempt import last_attempt
from pipelines.runs.finished import open_run
from pipelines.terminal.console_table import PARITY_COLUMNS, table


def verify(run: Path, no_serve: bool, stage: str | None, model: str | None, as_json: bool) -> None:
    """Run every check again and print a row for each; exit with 3 if one failed."""
    if last_attempt(run) is None:
        open_run(run)  # a folder without a run is told before torch is imported, which takes seconds
    from pipelines.runs.verify import to_json
    from pipelines.runs.verify import verify as run_all

    checks = run_all(run, serve=not no_serve, model=model, stage=stage)
    if as_json:
        click.echo(json.dumps(to_json(run, checks), indent=1, ensure_ascii=False))
    else:
        table(PARITY_COLUMNS, [check.cells() for check in checks])
        for check in checks:
            if not check.passed:
                say(f"{check.stage}: {check.fault}", err=True)
    if not all(check.passed for check in checks):
        click.get_current_context().exit(CheckError.exit_code)
