"""The work of `compress sweep`: several runs side by side."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from compressor.errors import CheckError, UserError
from pipelines.cli.shown import near, say
from pipelines.engine.attempt import checks_failed
from pipelines.file.config import find_pipeline
from pipelines.file.overrides import split_key
from pipelines.sweeps.proposals import require_optuna
from pipelines.sweeps.ray_engine import on_ray
from pipelines.sweeps.sweep import preview_sweep
from pipelines.sweeps.sweep import sweep as run_all
from pipelines.sweeps.sweep_preview import STAGE_COLUMNS, TrialPreview, counted, stage_rows
from pipelines.sweeps.sweep_summary import COMPARED, SweepResult
from pipelines.sweeps.sweep_trials import Search, SweepPlan, axes_of, part_of
from pipelines.sweeps.table_file import Grid, read_table
from pipelines.sweeps.trial_events import Engine, in_turn
from pipelines.sweeps.trial_jobs import load_first
from pipelines.sweeps.trial_run import faults_of, place_of
from pipelines.sweeps.worker_processes import in_processes
from pipelines.terminal.console_table import table
from pipelines.terminal.plain_console import PlainConsole, can_move


def sweep(
    file: str,
    over: tuple[str, ...],
    only: tuple[str, ...],
    grid: Path | None,
    seeds: int | None,
    subsets: int | None,
    share: float | None,
    overrides: tuple[str, ...],
    engine: str,
    address: str | None,
    workers: int | None,
    threads: int | None,
    scale: str | None,
    folder: Path | None,
    search: int | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run every trial, and show the table; or say what would run."""
    path = find_pipeline(file)
    found = search_of(search, engine, workers)
    compared = part_of(axes_of(over, grid, read_table(path, scale)), only)
    plan = replace(plan_of(compared, seeds, subsets, share, folder), search=found)
    settings = [*overrides, *([f"threads={threads}"] if threads else [])]
    runs = engine_of(engine, address, workers, lambda: _common_threads(path, settings, plan))
    if dry_run:
        _show_preview(preview_sweep(path, plan, overrides=settings, **options))
        return
    console = None if runs is in_turn else PlainConsole(force_terminal=can_move(sys.stdout))
    result = run_all(path, plan, overrides=settings, say=say, console=console, engine=runs, **options)
    show(result)


def plan_of(grid: Grid, seeds: int | None, subsets: int | None, share: float | None, folder: Path | None) -> SweepPlan:
    """The plan; the options say how often a trial runs, or else the table file does. Raises UserError E115."""
    if folder is not None and not folder.is_dir():
        raise UserError("E115", f"--folder {folder}: not a folder", "Give the folder of the data")
    given = (seeds, subsets) if seeds is not None or subsets is not None else (grid.seeds, grid.subsets)
    return SweepPlan(grid, *given, share, folder)


def search_of(trials: int | None, engine: str, workers: int | None) -> Search | None:
    """The search that --search names, if any. Raises UserError E115, E901."""
    if trials is None:
        return None
    if engine == "ray" and workers is None:
        what = "--search with --engine ray needs --workers: it decides from which results a trial is chosen"
        raise UserError("E115", what, "Add --workers N: N trials at a time, on all nodes together")
    require_optuna()
    return Search(trials, workers or 1)


def _show_preview(trials: list[TrialPreview]) -> None:
    """Show what every trial would reuse and run, and the sums of each stage."""
    count = len(trials)
    for number, trial in enumerate(trials, start=1):
        say(f"[{number:>{len(str(count))}}/{count}] {trial.name}  {trial.line}")
    table(STAGE_COLUMNS, stage_rows(trials))
    click.echo(counted(trials))


def show(result: SweepResult) -> None:
    """Print the tables, of a search only that of its trials; failed trials and failed checks end with exit code 3.

    Raises CheckError E810, E615.
    """
    if result.search:
        table(result.search.columns, result.search.rows)
    else:
        table(result.columns, result.rows)
    for line in result.notes:
        say(line)
    if result.comparisons:
        table(COMPARED, [row.cells() for row in result.comparisons])
    click.echo(result.counts)
    for line in result.search.told(here=True) if result.search else ():
        say(line)
    say(f"sweep: {near(result.folder / 'sweep.md')}, {near(result.folder / 'sweep.html')}")
    if result.failed:
        codes = ", ".join(f"{one.code} in {name}" for name, error in result.failed.items() for one in faults_of(error))
        what = f"{len(result.failed)} {result.unit}{'s' if len(result.failed) > 1 else ''} failed: {codes}"
        raise CheckError("E810", what, "Each is told above; the same command runs them again, and keeps the others")
    if result.failures:
        raise checks_failed([{**failure, "stage": place_of(failure)} for failure in result.failures])


def _common_threads(path: Path, settings: Sequence[str], plan: SweepPlan) -> int | None:
    """Number of threads of all trials. Raises UserError E115 where a compared key sets it, and what `load_first` does."""
    rows = itertools.chain(*(plan.grid.rows(axis) for axis in plan.axes))
    if any(split_key(key) == ["threads"] for row in rows for key in row):
        what = "the number of threads is compared, and trials side by side all have the same"
        raise UserError("E115", what, "Leave out --workers and --engine: one trial at a time may have its own")
    return load_first(path, plan, settings).threads


def engine_of(engine: str, address: str | None, workers: int | None, threads_of: Any) -> Engine:
    """The engine that the options name. Raises UserError E121, E115."""
    if address is not None and engine != "ray":
        raise UserError("E115", "--address is not used by --engine local", "Drop it, or give --engine ray")
    if engine == "local" and (workers or 1) == 1:
        return in_turn
    threads = threads_of()
    if threads is None:
        raise UserError(
            "E121",
            "trials side by side need a fixed number of threads: results depend on it, so it is not taken from the machine",
            f"Add --threads {_fair(workers)} (cores over workers), or `threads` to the file, and keep it for all of the sweep",
        )
    if engine == "local":
        return functools.partial(in_processes, workers=workers)
    return functools.partial(on_ray, workers=workers, threads=threads, address=address)


def _fair(workers: int | None) -> int:
    from compressor.processor import physical_cores

    return max(1, physical_cores() // (workers or 1))
