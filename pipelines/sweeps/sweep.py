"""A sweep: the trials of a plan run on one store by an engine, and are summarized when all have ended.

Every trial is an ordinary run in OUT/NAME-sweep/TRIAL. What trials share is made once, whichever process comes first: artifacts
are named by their content and locked while they are made. The same command resumes a sweep that was stopped or killed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from compressor.errors import UserError, UserErrors
from compressor.tasks.reading import check_data
from pipelines.engine.disk import disk_fault
from pipelines.engine.invocation import Stopped, stopping
from pipelines.engine.preflight import check_folder, check_inputs
from pipelines.engine.stage import NAME_PATTERN
from pipelines.engine.store import Locked, lock
from pipelines.file.config import Pipeline, load_pipeline
from pipelines.sweeps.sweep_files import FILES, write_files
from pipelines.sweeps.sweep_summary import SweepResult, summarize
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial
from pipelines.sweeps.trial_board import TrialBoard, counts_of
from pipelines.sweeps.trial_events import Engine, in_turn
from pipelines.sweeps.trial_run import END, TrialJob, TrialOutcome, naming, perform


def sweep(
    path: Path,
    plan: SweepPlan,
    out: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    until: str | None = None,
    stage: str | None = None,
    say: Callable[[str], None] = print,
    console: Console | None = None,
    engine: Engine = in_turn,
) -> SweepResult:
    """Run every trial of a plan and summarize the quality of `stage`, or of every stage up to `until` (by default the last that
    changes the model). A trial that fails does not end the others.

    `say` prints lines; on a `console` that is a terminal a table shows what runs where. Nothing is written before the file and
    data of every trial are validated. Raises UserError E115 (invalid plan), E111 (unknown stage id), E1xx, E2xx, E3xx, E801,
    E802 (this sweep is running), what the engine raises; UserErrors when every trial failed by a mistake of the user.
    """
    pipeline = load_pipeline(path, overrides, plan.first, plan.data)
    trials = plan.trials(pipeline)
    stages = (END,) if plan.grid.named and stage is None else measured(pipeline, until or last_model(pipeline), stage)
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        fix = "Use letters, digits, '_', '-' and '.', a letter or digit first"
        raise UserError("E115", f"a sweep cannot be called {name!r:.100}", fix)
    folder = out / (name or f"{pipeline.name}-sweep")
    check_inputs(pipeline)
    for trial in trials:
        check_folder(out, f"{folder.name}/{trial.name}")
    # all are read now: editing the file during a long sweep must not affect later trials
    jobs = list(
        _jobs(pipeline, plan, trials, path, overrides, folder, TrialJob("", pipeline, out.absolute(), until or "", stages))
    )
    with _held(folder):
        for file in FILES:  # left by an earlier sweep
            (folder / file).unlink(missing_ok=True)
        outcomes = _run(jobs, engine, TrialBoard(len(jobs), say, console))
        if (errors := [outcome.error for outcome in outcomes.values() if outcome.error]) and len(errors) == len(jobs):
            _raise_if_mistakes(errors)
        result = summarize(folder, plan, trials, outcomes, stages)
        facts = {"pipeline": pipeline.name, "model": pipeline.model, "set": list(overrides), "until": jobs[0].until}
        write_files(result, facts, plan, trials)
    return replace(result, counts=counts_of(list(outcomes.values())))


def _run(jobs: list[TrialJob], engine: Engine, board: TrialBoard) -> dict[str, TrialOutcome]:
    """The outcome of every trial, by its name, in the order of the jobs."""
    outcomes: dict[str, TrialOutcome] = {}
    try:
        with stopping(), board.shown(), contextlib.closing(engine(jobs, perform)) as events:
            for event in events:
                board.on(event)
                if event.outcome is not None:
                    outcomes[event.trial] = event.outcome
    except Stopped as stop:
        board.close(
            f"Stopped by {stop}: {len(outcomes)} of {len(jobs)} trials are finished and kept. The same command continues."
        )
        stop.reported = True
        raise
    return {job.name: outcomes[job.name] for job in jobs}


def _raise_if_mistakes(errors: Sequence[Exception]) -> None:
    """Raise the errors of all trials as one if each is the user's mistake."""
    mistakes = [fault for error in errors if isinstance(error, UserError) for fault in getattr(error, "errors", [error])]
    if all(isinstance(error, UserError) for error in errors):
        raise UserErrors(mistakes)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Create the sweep's folder and hold its process lock. Raises UserError E801, E802."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be created ({error.strerror})"
        raise disk_fault(error) or UserError("E801", what, "Choose another folder with --out", str(folder)) from None
    try:
        with lock(folder / "sweep.lock"):
            yield
    except Locked as holder:
        what = f"process {holder.pid} is running this sweep here"
        raise UserError("E802", what, "Wait for it, or give this one another --name", str(folder)) from None


def _jobs(
    pipeline: Pipeline,
    plan: SweepPlan,
    trials: Sequence[SweepTrial],
    path: Path,
    overrides: Sequence[str],
    folder: Path,
    common: TrialJob,
) -> Iterator[TrialJob]:
    """The job of every trial, its pipeline and data checked."""
    checked = [pipeline.all_tasks]
    for trial in trials:
        own = load_pipeline(path, [*overrides, *trial.settings], trial.presets, plan.data)
        with naming(trial.name):
            for tasks in () if own.all_tasks in checked else (own.all_tasks,):
                for task in tasks.values():
                    check_data(task)
                checked.append(tasks)
            # rows of a table may have other stages than the first
            until = common.until or last_model(own)
            for entry in () if common.stages == (END,) else common.stages:
                own.number(entry, "--stage")
            own.number(until, "--until")
        run = replace(own, name=f"{folder.name}/{trial.name}")
        yield replace(common, name=trial.name, pipeline=run, until=until)


def last_model(pipeline: Pipeline) -> str:
    """The last stage that changes the model. Raises UserError E115 when there is none."""
    # a merged model is bit-equal to the model before it, so its quality is not measured again
    ids = [entry.id for entry in pipeline.stages if entry.row.publishes_model and not entry.row.merges]
    if not ids:
        raise UserError("E115", "no stage of this pipeline measures quality", "Add a tune", pipeline.source.where(("stages",)))
    return ids[-1]


def measured(pipeline: Pipeline, until: str, stage: str | None) -> tuple[str, ...]:
    """The stages whose quality is summarized: every one up to `until` that produces a model, or `stage` alone.

    Raises UserError E111 (unknown, or after `until`), E115 (yields no model).
    """
    last = pipeline.number(until, "--until")
    ids = tuple(entry.id for entry in pipeline.stages[: last + 1] if entry.row.publishes_model)
    if stage is None:
        if not ids:
            raise UserError("E115", f"--until {until}: nothing measures quality up to there", "Name a later stage, or drop it")
        return ids
    if pipeline.number(stage, "--stage") > last:
        raise UserError("E111", f"--stage {stage} comes after --until {until}", "Name a later --until")
    if stage not in ids:
        raise UserError("E115", f"--stage {stage}: it measures no quality", f"Stages that do: {', '.join(ids) or 'none'}")
    return (stage,)
