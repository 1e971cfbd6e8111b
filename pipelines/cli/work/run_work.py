"""The work of `compress run`: the stages, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from compressor.training.processes import helping
from pipelines.cli.shown import near, note, summary
from pipelines.engine.attempt import checks_failed
from pipelines.engine.invocation import RunResult
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import Pipeline, find_pipeline, load_pipeline
from pipelines.runs.helping import help_to_train, helped
from pipelines.terminal.console_table import table


def run(file: str, overrides: Sequence[str], dry_run: bool, **options: Any) -> None:
    """Run the stages, or say which would; then show what came of them. Raises the checks that failed and did not end it.

    Under torchrun the first process does this, and the others help it to train.
    """

    def load() -> Pipeline:
        return load_pipeline(find_pipeline(file), overrides)

    if helping():
        help_to_train(load, options["out"])
        return
    with helped():
        pipeline = load()
        result = run_pipeline(pipeline, dry_run=dry_run, warn=lambda line: note(f"warning: {line}"), **options)
    if dry_run:
        _show_plan(pipeline, result, options["until"])
        return
    _show_summary(result)
    if result.failures:
        raise checks_failed(result.failures)


def _show_plan(pipeline: Pipeline, result: RunResult, until: str | None) -> None:
    """Show a dry run's result: reuse or run for every stage, then the plan's table before and after."""
    count = len(pipeline.stages) if until is None else pipeline.number(until, "--until") + 1
    for number, entry in enumerate(pipeline.stages[:count], start=1):
        place = f"[{number:>{len(str(count))}}/{count}]"
        click.echo(f"{place} {entry.id:<12} {'reuse' if entry.id in result.reused else 'run'}")
    if result.plan is not None:
        table(("", "before", "after"), result.plan.rows())


def _show_summary(result: RunResult) -> None:
    """Show the summary of the run's report and its path, or the quality of every task of a multi-task training."""
    if (result.folder / "report.json").is_file():
        summary(result.folder)
    for artifact in result.artifacts.values():
        if (tasks := artifact.metadata.get("tasks")) and not result.report:
            rows = [
                (task["task"], task["metric"], f"{task['quality'][task['metric']]:.4f}", f"{task['bytes']:,}", task["file"])
                for task in tasks
            ]
            table(("task", "metric", "quality", "bytes", "file"), rows)
    label, place = ("report", result.report) if result.report else ("run", result.folder)
    click.echo(f"{label}: {near(place)}")
