"""A sweep: the trials of a plan run on one store by an engine, and are summarized when all have ended.

Every trial is an ordinary run in OUT/NAME-sweep/TRIAL. What trials share is made once, whichever process comes first: artifacts
are named by their content and locked while they are made. The same command resumes a sweep that was stopped or killed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from compressor.arguments import NAME_FIX, NAME_PATTERN
from compressor.errors import CompressError, UserError, UserErrors
from compressor.run_store import RUN_FILE
from pipelines.engine.disk import disk_fault
from pipelines.engine.invocation import Stopped, stopping
from pipelines.engine.preflight import OTHER_OUT, check_folder
from pipelines.engine.store import Locked, lock
from pipelines.file.config import Pipeline
from pipelines.sweeps.search_summary import summarize_search
from pipelines.sweeps.search_trials import SearchTrials
from pipelines.sweeps.sweep_files import FILES, write_files
from pipelines.sweeps.sweep_preview import TrialPreview, preview
from pipelines.sweeps.sweep_summary import SweepResult, out_of_reach, summarize
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial
from pipelines.sweeps.trial_board import TrialBoard, counts_of
from pipelines.sweeps.trial_events import Engine, Jobs, in_turn
from pipelines.sweeps.trial_jobs import JobMaker, last_model, load_first, measured
from pipelines.sweeps.trial_run import END, TrialJob, TrialOutcome, faults_of, perform

WORKER_DIED = "E811"
"""A fault of the machine rather than of the input."""


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
    """Run every trial of a plan, or of its search, and summarize the quality of `stage`, or of every stage up to `until` (by
    default the last that changes the model). A trial that fails does not end the others.

    `say` prints lines; on a `console` that is a terminal a table shows what runs where. Nothing is written before the file and
    data of every trial are validated (of a search: with the values of each list, and the ends of each range). Raises UserError
    E115 and E123 (invalid plan), E111 (unknown stage id), E1xx, E2xx, E3xx, E801, E802 (this sweep is running), what the engine
    raises; UserErrors when every trial failed by a mistake of the user.
    """
    folder, pipeline, trials, make = _checked(path, plan, out, name, overrides, until, stage)
    # those of a search are made when its trials are chosen
    stages, jobs = make.common.stages, [make(trials[0])] if plan.search else make.jobs(trials)
    with _held(folder), _earlier_kept(folder, say):
        board = TrialBoard(plan.count, say, console, functools.partial(out_of_reach, plan), plan.unit)
        search = SearchTrials(plan, pipeline, folder, make, board.note) if plan.search else None
        ended = _run(_first_warns(search.jobs()) if search else [*_first_warns(jobs)], engine, board, search)
        trials = search.trials if search else trials
        outcomes = {trial.name: ended[trial.name] for trial in trials}
        if (errors := [outcome.error for outcome in outcomes.values() if outcome.error]) and len(errors) == len(outcomes):
            _raise_if_mistakes(plan, errors)
        result = summarize(folder, plan, trials, outcomes, stages)
        if search:
            found = summarize_search(plan, search.runs, outcomes, stages[-1], path, pipeline, overrides, out)
            result = replace(result, search=found)
        facts = {"pipeline": pipeline.name, "model": pipeline.model, "set": list(overrides), "until": jobs[0].until}
        write_files(result, facts, plan, trials)
    return replace(result, counts=counts_of(list(outcomes.values())))


def preview_sweep(
    path: Path,
    plan: SweepPlan,
    out: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    until: str | None = None,
    stage: str | None = None,
) -> list[TrialPreview]:
    """What `sweep` would run and reuse for every trial. Writes nothing. Raises the same errors as it does before it runs, and
    UserError E115 for a search, whose trials follow from results."""
    if plan.search is not None:
        what = "--dry-run: the trials of a search are chosen by the results of those before"
        raise UserError("E115", what, "Leave --search out to see every combination, or --dry-run to run it")
    _, _, trials, make = _checked(path, plan, out, name, overrides, until, stage)
    return [preview(job) for job in make.jobs(trials)]


def _checked(
    path: Path,
    plan: SweepPlan,
    out: Path,
    name: str | None,
    overrides: Sequence[str],
    until: str | None,
    stage: str | None,
) -> tuple[Path, Pipeline, list[SweepTrial], JobMaker]:
    """(folder of the sweep, pipeline with the first values, trials, what makes their jobs), validated but for each trial's own
    data."""
    plan.check()
    pipeline = load_first(path, plan, overrides)
    probes = plan.probes(pipeline) if plan.search else []
    trials = [run for alternatives in probes for runs in alternatives for run in runs] if probes else plan.trials(pipeline)
    stages = (END,) if plan.grid.named and stage is None else measured(pipeline, until or last_model(pipeline), stage)
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise UserError("E115", f"a sweep cannot be called {name!r:.100}", NAME_FIX)
    folder = out / (name or f"{pipeline.name}-sweep")
    make = JobMaker(path, plan, overrides, folder.name, TrialJob("", pipeline, out.absolute(), until or "", stages), stage)
    if not probes:  # a search has the same tasks in all trials
        trials = [make.on_own_tasks(trial) for trial in trials]
    for trial in trials:
        check_folder(out, f"{folder.name}/{trial.name}")
    # the pipeline's own run, of the best trial of a search for example, may come later
    if folder.name == pipeline.name or (folder / RUN_FILE).exists():
        raise UserError("E115", "the folder of a run, and not of a sweep", "Give the sweep another --name", str(folder))
    sound = [run for alternatives in probes for run in _sound(alternatives, make)]
    return folder, pipeline, sound or trials, make


def _sound(alternatives: Sequence[list[SweepTrial]], make: JobMaker) -> list[SweepTrial]:
    """The first alternative that is a sound pipeline on sound data. Raises the fault of the first if none is."""
    faults: list[UserError | UserErrors] = []
    for trials in alternatives:
        try:
            make.probe(trials)
            return trials
        except (UserError, UserErrors) as error:
            faults.append(error)
    raise faults[0]


def _run(jobs: Jobs, engine: Engine, board: TrialBoard, search: SearchTrials | None) -> dict[str, TrialOutcome]:
    """The outcome of every trial, by its name; a search is told each before its next trial is asked for."""
    outcomes: dict[str, TrialOutcome] = {}
    try:
        with stopping(), board.shown(), contextlib.closing(engine(jobs, perform)) as events:
            for event in events:
                board.on(event)
                if event.outcome is not None:
                    outcomes[event.trial] = event.outcome
                    if search is not None:
                        search.hear(event.trial, event.outcome)
    except Stopped as stop:
        kept = f"{board.counts['done']} of {board.total} {board.unit}s are finished and kept"
        others = "".join(f"; {board.counts[word]} {word}" for word in ("out of reach", "failed") if board.counts[word])
        board.close(f"Stopped by {stop}: {kept}{others}. The same command continues.")
        stop.reported = True
        raise
    return outcomes


def _first_warns(jobs: Jobs) -> Iterator[TrialJob | None]:
    """The jobs, of which the first says where memory or disk will not do: the others need about as much."""
    for job, first in zip(jobs, itertools.chain([True], itertools.repeat(False)), strict=False):
        yield replace(job, warns=True) if job and first else job


def _raise_if_mistakes(plan: SweepPlan, errors: Sequence[CompressError]) -> None:
    """Raise the errors of all trials as one if each is a mistake in the input."""
    if all(isinstance(error, UserError) and error.code != WORKER_DIED and not out_of_reach(plan, error) for error in errors):
        raise UserErrors([fault for error in errors for fault in faults_of(error)])


@contextlib.contextmanager
def _earlier_kept(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Context of a sweep, whose files replace those of an earlier one at its end. If it fails, a line says whose they are."""
    kept = [name for name in FILES if (folder / name).is_file()]
    try:
        yield
    except BaseException:
        if kept:
            say(f"{', '.join(kept)} in {folder} are still those of an earlier sweep")
        raise


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Create the sweep's folder and hold its process lock. Raises UserError E801, E802."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be created ({error.strerror})"
        raise disk_fault(error) or UserError("E801", what, OTHER_OUT, str(folder)) from None
    try:
        with lock(folder / "sweep.lock"):
            yield
    except Locked as holder:
        what = f"process {holder.pid} is running this sweep here"
        raise UserError("E802", what, "Wait for it, or give this one another --name", str(folder)) from None
