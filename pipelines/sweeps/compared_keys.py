"""Checks of what a sweep compares: no key is replaced by another one, and each belongs to what is run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from compressor.errors import UserError
from pipelines.file.config import Pipeline
from pipelines.file.overrides import TRAININGS, split_key
from pipelines.sweeps.sweep_trials import SweepTrial
from pipelines.sweeps.table_file import Axes, Grid
from pipelines.sweeps.trial_run import TrialJob

Paths = set[tuple[str, ...]]
"""Where a key is set: the id of a stage (or a key at the top) and the keys below it; of TRAININGS one path for each stage."""


class _Setting(NamedTuple):
    """A key that is set, and by what, as errors call it."""

    mark: str
    paths: Paths


def require_rows_used(grid: Grid) -> None:
    """Raise UserError E115 for a key of named rows that every one of later named rows replaces."""
    rows = {axis: {name: grid.named[axis][name] for name in grid.axes[axis]} for axis in grid.axes if axis in grid.named}
    for (axis, named), (later, replacing) in itertools.combinations(rows.items(), 2):
        always = set.intersection(*({_names(key) for key in keys} for keys in replacing.values()))
        for name, keys in named.items():
            for key in keys:
                if _names(key) in always:
                    raise _replaced(f"{key} of {axis} '{name}'", f"every row of '{later}'")


def require_used(trial: SweepTrial, grid: Grid, overrides: Sequence[str], pipeline: Pipeline, until: str) -> None:
    """Raise UserError E115 for a compared key of a trial that a later one, --set, --seeds or --subsets replaces, or that is
    read by nothing: the name of the pipeline, or a key of a stage after `until`. `pipeline` is the trial's.

    Named rows are set first, then --set, the other compared keys in their order, and at last the seed or the subset.
    """
    compared = [(key, _paths(key, pipeline)) for key in trial.values if key not in trial.named]
    for key, paths in compared:
        _require_run(key, paths, pipeline, until)
    rows = _rows_of(trial, grid, pipeline)
    given = [_Setting(f"--set {text}", _paths(text.partition("=")[0], pipeline)) for text in overrides]
    keys = [[_Setting(f"the compared key {key}", paths)] for key, paths in compared]
    repeats = [_Setting("--seeds" if key == "seed" else "--subsets", _paths(key, pipeline)) for key in trial.repeat]
    for before, after in itertools.combinations((rows, given, *keys, repeats), 2):
        # --set gives the first of the seeds
        for first, second in () if before is given and after is repeats else itertools.product(before, after):
            covered = {path for path in first.paths for other in second.paths if path[: len(other)] == other}
            if covered and covered == first.paths:
                raise _replaced(first.mark, second.mark)


def require_rows_run(trial: SweepTrial, grid: Grid, job: TrialJob) -> None:
    """Raise UserError E115 for a key of a trial's named rows that is read by nothing in its job, as `require_used` does."""
    for key, paths in _rows_of(trial, grid, job.pipeline):
        _require_run(key, paths, job.pipeline, job.until)


def _rows_of(trial: SweepTrial, grid: Grid, pipeline: Pipeline) -> list[_Setting]:
    """What the named rows of a trial set."""
    return [
        _Setting(f"{key} of {axis} '{trial.values[axis]}'", _paths(key, pipeline))
        for axis in trial.named
        for key in grid.named[axis][trial.values[axis]]
    ]


def require_effects(axes: Axes, trials: Sequence[SweepTrial], jobs: Sequence[TrialJob]) -> None:
    """Raise UserError E115 for a compared key, or named rows, of which no value changes what the trials run.

    Two rows of a table may be the same run: figures have one point on two lines.
    """
    runs = [_run_of(job) for job in jobs]
    for axis in (axis for axis, values in axes.items() if len(values) > 1):
        found: dict[str, set[str]] = {}
        for trial, run in zip(trials, runs, strict=True):
            # not the keys of the subset: rows may have other tasks
            found.setdefault(repr((trial.values | {axis: None}, [*trial.repeat.values()][:1])), set()).add(run)
        if all(len(same) == 1 for same in found.values()):
            fix = f"Compare what is used up to '{jobs[0].until}', or name a later stage with --until"
            raise UserError("E115", f"'{axis}' is compared, and changes nothing in what is run", fix)


def _run_of(job: TrialJob) -> str:
    """All that a trial runs, as text."""
    pipeline = job.pipeline
    entries = pipeline.stages[: pipeline.number(job.until, "--until") + 1]
    stages = [(entry.id, entry.name, entry.config) for entry in entries]
    return repr((pipeline.model, pipeline.architecture, pipeline.all_tasks, pipeline.seed, pipeline.threads, stages))


def _require_run(key: str, paths: Paths, pipeline: Pipeline, until: str) -> None:
    """Raise UserError E115 for a key that nothing reads."""
    if paths == {("name",)}:
        what = "the name is compared as a key, and changes nothing in a run"
        raise UserError("E115", what, "Leave it out; --name is that of the sweep")
    ids = [entry.id for entry in pipeline.stages]
    after = ids[ids.index(until) + 1 :]
    if paths and all(path[0] in after for path in paths):
        stage = max((path[0] for path in paths), key=ids.index)
        what = f"{key} is compared, and stage '{stage}' is not run: it comes after '{until}'"
        raise UserError("E115", what, f"Add --until {stage}, or compare another key")


def _names(key: str) -> tuple[str, ...]:
    return tuple(split_key(key) or [key])


def _paths(key: str, pipeline: Pipeline) -> Paths:
    """The paths of a key in the form of --set, each written in one way."""
    first, *rest = _names(key)
    ids = [entry.id for entry in pipeline.stages]
    if first == TRAININGS[:-1] and first not in ids:
        return {(entry.id, *rest) for entry in pipeline.stages if entry.row.trains}
    if first == "stages" and rest and rest[0].isdigit():
        number, *below = rest
        first, rest = ids[int(number)], below[1:]
    # a mapping stands for the list of one item, and a list for its items
    return {(first, *(name for name in rest if name not in ("items", "0")))}


def _replaced(first: str, second: str) -> UserError:
    what = f"{first} and {second} set the same, and only the second one would count"
    return UserError("E115", what, "Keep one of the two")
