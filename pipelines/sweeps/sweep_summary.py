"""The result of a sweep as data: mean and spread of every setting, paired differences between settings, costs, failures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import CompressError
from export.latency.core_time import disturbance
from pipelines.file.overrides import split_key
from pipelines.sweeps.search_summary import SearchSummary
from pipelines.sweeps.significance import PairedDifference, paired_difference
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial, deciding_key, short_keys
from pipelines.sweeps.table_file import shown_value
from pipelines.sweeps.trial_run import SCORE, TrialOutcome

OUT_OF_REACH = "E520"
"""A target that no cut reaches: a result of a sweep over targets, not a failure."""


Setting = tuple[str, ...]
"""The values of the compared keys, as shown; () where only seeds or subsets differ."""


@dataclass(frozen=True)
class Spread:
    """One metric of one stage over the runs of a setting. `std` is the sample's standard deviation (n - 1), None of a single
    run; `values` are in the order of the seeds, subsets or named runs, None for a run without the metric (it failed, or its
    target is out of reach); the rest is None without any."""

    stage: str
    metric: str
    setting: Setting
    runs: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    values: tuple[float | None, ...]

    def cells(self) -> tuple[str, ...]:
        """The table row: setting, stage, metric, number of runs, mean, std, min, max, each run."""
        figures = (_decimals(value) for value in (self.mean, self.std, self.min, self.max))
        each = " ".join(_decimals(value) or "none" for value in self.values)
        return *self.setting, self.stage, self.metric, str(self.runs), *figures, each


@dataclass(frozen=True)
class Comparison:
    """A metric of two settings that differ in one key, over the same seeds or subsets."""

    stage: str
    metric: str
    first: Setting
    second: Setting
    difference: PairedDifference

    def cells(self) -> tuple[str, ...]:
        """The table row: metric, the two settings, pairs, mean difference, interval, verdict."""
        found = self.difference
        interval = "" if found.low is None or found.high is None else f"{found.low:+.4f} to {found.high:+.4f}"
        first, second = (", ".join(setting) for setting in (self.first, self.second))
        return self.metric, first, second, str(found.pairs), f"{found.mean:+.4f}", interval, found.verdict


COMPARED = ("metric", "from", "to", "pairs", "difference", "95 % interval", "verdict")


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: its folder with sweep.json, sweep.md, sweep.html and a run folder for each trial; and the summary.

    `failed` are the errors that ended trials, by trial; `unreached` those of targets out of reach; `failures` the checks that
    failed and ended no run, as `TrialOutcome.failures`.
    """

    folder: Path
    titles: tuple[str, ...]
    """The compared keys, as in the table."""
    spreads: list[Spread]
    comparisons: list[Comparison]
    costs: dict[str, dict[Setting, float]]
    """Cost -> setting -> mean over its runs; settings without any are left out."""
    failed: Mapping[str, CompressError] = field(default_factory=dict)
    unreached: Mapping[str, CompressError] = field(default_factory=dict)
    failures: tuple[dict[str, Any], ...] = ()
    artifacts: Mapping[str, int] = field(default_factory=dict)
    """Stage id -> how many different results the trials have: what they share counts once."""
    trials_of_stages: Mapping[str, int] = field(default_factory=dict)
    """Stage id -> how many trials have a result of it: of those that did not fail, and have the stage."""
    mains: Mapping[Setting, str] = field(default_factory=dict)
    """Setting -> the main metric of its task."""
    falling: frozenset[Setting] = frozenset()
    """The settings of whose main metric smaller values are better."""
    search: SearchSummary | None = None
    counts: str = ""
    """How many stages this command ran and reused, in words."""
    tasks: tuple[int, ...] = ()
    """The places in a setting of what decides the task: the columns of a table, whose qualities are not compared."""
    repetitions: tuple[str, ...] = ()
    """The keys whose values repeat each setting, as seeds do, and are no part of it."""
    same_model: tuple[int, ...] = ()
    """The places in a setting of keys whose values all give the same model, as those of `export`: its quality is not compared
    between them."""
    trials: int = 0
    unit: str = "trial"
    """What each of them is called."""
    disturbed: tuple[str, ...] = ()
    """The trials whose latency was measured beside other work."""
    unlearnt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Each trial whose last model is no better than a constant prediction -> the tasks in which it is so; ('',) of a single
    one."""

    @property
    def columns(self) -> tuple[str, ...]:
        return *self.titles, "stage", "metric", "N", "mean", "std", "min", "max", "each run"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [spread.cells() for spread in self.spreads]

    @property
    def notes(self) -> list[str]:
        """What is said of models that learnt nothing, latencies that mislead and keys that are not compared, a line each."""
        keys, names = ", ".join(self.titles[place] for place in self.same_model), ", ".join(self.disturbed)
        count = f"{len(self.disturbed)} of {self.trials} {self.unit}s were timed beside other work"
        what = "its quality, which is not that of exported files, is not compared between them"
        return [
            *([self._blind()] if self.unlearnt else []),
            *([f"{count} ({names}): their latencies mislead."] if names else []),
            *([f"Values of {keys} give the same model: {what}."] if keys else []),
        ]

    def _blind(self) -> str:
        """What is said of models that learnt nothing; of several tasks, in which of them."""
        count, says = f"{len(self.unlearnt)} of {self.trials} {self.unit}s are", "no better than a constant prediction"
        named = [f"{trial}: {', '.join(tasks)}" if any(tasks) else trial for trial, tasks in self.unlearnt.items()]
        if any(map(any, self.unlearnt.values())):
            return f"{count}, in a task, {says} ({'; '.join(named)}): their differences in it say little."
        return f"{count} {says} ({', '.join(named)}): their differences say little."


def summarize(
    folder: Path, plan: SweepPlan, trials: Sequence[SweepTrial], outcomes: Mapping[str, TrialOutcome], stages: Sequence[str]
) -> SweepResult:
    """The result of trials that all ended; `stages` are those whose quality is measured, in order."""
    repetitions = tuple(axis for axis in plan.axes if _repeats(plan, axis))
    axes = [axis for axis in plan.axes if axis not in repetitions]
    tasks = tuple(place for place, axis in enumerate(axes) if deciding_key(plan.grid, axis))
    groups = _groups(trials, axes)
    titles = short_keys(list(plan.axes))
    has = _metrics(groups, outcomes, tasks)
    spreads = [
        _spread(stage, metric, setting, [outcomes[trial.name].quality.get(stage, {}).get(metric) for trial in group])
        for stage, metric in _measured(outcomes.values(), stages)
        for setting, group in groups.items()
        if (stage, metric) in has[setting]
    ]
    last = [spread for spread in spreads if spread.stage == stages[-1]]
    same_model = tuple(place for place in range(len(axes)) if place not in tasks and _gives_one_model(place, groups, outcomes))
    compared = {place: plan.axes[axis] for place, axis in enumerate(axes) if place not in (*tasks, *same_model)}
    mains = _mains(groups, outcomes)
    if plan.grid.named:  # of a table the main metric of each trial's task alone
        last = [spread for spread in last if spread.metric == mains.get(spread.setting)]
    errors = {trial.name: error for trial in trials if (error := outcomes[trial.name].error)}
    return SweepResult(
        folder,
        tuple(titles[axis] for axis in axes),
        spreads,
        # the settings of a search seldom differ in one key alone
        [] if plan.search else list(_comparisons(last, compared)),
        _costs(groups, outcomes),
        {name: error for name, error in errors.items() if not out_of_reach(plan, error)},
        {name: error for name, error in errors.items() if out_of_reach(plan, error)},
        tuple(failure for trial in trials for failure in outcomes[trial.name].failures),
        *_artifacts(outcomes.values()),
        mains,
        frozenset(setting for setting, group in groups.items() if any(outcomes[trial.name].falls for trial in group)),
        tasks=tasks,
        repetitions=repetitions,
        same_model=same_model,
        trials=len(trials),
        unit=plan.unit,
        disturbed=tuple(trial.name for trial in trials if disturbance(outcomes[trial.name].waited)),
        unlearnt={trial.name: tasks for trial in trials if (tasks := outcomes[trial.name].unlearnt)},
    )


def out_of_reach(plan: SweepPlan, error: CompressError) -> bool:
    """Whether a compared target is out of reach: a result."""
    return bool(plan.axes) and error.code == OUT_OF_REACH


def _repeats(plan: SweepPlan, axis: str) -> bool:
    """Whether the named rows of an axis are runs of one setting: each has a seed of its own, and learning rates at most.

    Not in a search, which compares whatever it chooses.
    """
    rows = list(plan.grid.named.get(axis, {}).values())
    if not rows or plan.search or not all("seed" in row for row in rows):
        return False
    others = {(split_key(key) or [key])[-1] for row in rows for key in row} - {"seed"}
    return len({row["seed"] for row in rows}) == len(rows) and others <= {"learning_rate"}


def _groups(trials: Sequence[SweepTrial], axes: Sequence[str]) -> dict[Setting, list[SweepTrial]]:
    """The trials of each setting of these axes: of every one in the order of the others, and of seeds or subsets."""
    groups: dict[Setting, list[SweepTrial]] = {}
    for trial in trials:
        groups.setdefault(tuple(shown_value(trial.values[axis]) for axis in axes), []).append(trial)
    return groups


def _mains(groups: Mapping[Setting, Sequence[SweepTrial]], outcomes: Mapping[str, TrialOutcome]) -> dict[Setting, str]:
    """The main metric of every setting of which a trial did not fail."""
    found = {setting: [outcomes[trial.name].main for trial in group] for setting, group in groups.items()}
    return {setting: next(filter(None, names)) for setting, names in found.items() if any(names)}


def _measured(outcomes: Sequence[TrialOutcome], stages: Sequence[str]) -> list[tuple[str, str]]:
    """Every (stage, metric) that a trial has: by stage, and within it in the order of the first trial."""
    found = [(stage, metric) for outcome in outcomes for stage, metrics in outcome.quality.items() for metric in metrics]
    return sorted(dict.fromkeys(found), key=lambda pair: stages.index(pair[0]))


Metrics = set[tuple[str, str]]
"""Pairs of a stage and a metric."""


def _metrics(
    groups: Mapping[Setting, Sequence[SweepTrial]], outcomes: Mapping[str, TrialOutcome], tasks: Sequence[int]
) -> dict[Setting, Metrics]:
    """The metrics of every setting; one of which all trials failed has those which the others of its task have."""
    qualities = {setting: [outcomes[trial.name].quality for trial in group] for setting, group in groups.items()}
    found = {
        setting: {(stage, metric) for quality in runs for stage, metrics in quality.items() for metric in metrics}
        for setting, runs in qualities.items()
    }
    return {setting: metrics or _expected(setting, found, tasks) for setting, metrics in found.items()}


def _expected(setting: Setting, found: Mapping[Setting, Metrics], tasks: Sequence[int]) -> Metrics:
    """The metrics that all other settings of a setting's task have, or, where these failed, those of any task."""
    known = {other: metrics for other, metrics in found.items() if metrics}
    alike = [metrics for other, metrics in known.items() if all(other[place] == setting[place] for place in tasks)]
    if alike:
        return set.intersection(*alike)
    others = set.intersection(*known.values()) if known else set()
    # in a table each task has a score, and the other metrics are those of other tasks
    return {(stage, metric) for stage, metric in others if metric == SCORE} or others


def _gives_one_model(place: int, groups: Mapping[Setting, Sequence[SweepTrial]], outcomes: Mapping[str, TrialOutcome]) -> bool:
    """Whether all values of a key give the same model in each run, all other keys equal."""
    models: dict[Any, list[str]] = {}
    for setting, group in groups.items():
        for number, trial in enumerate(group):
            if model := outcomes[trial.name].model:
                models.setdefault((setting[:place], setting[place + 1 :], number), []).append(model)
    several = [of_run for of_run in models.values() if len(of_run) > 1]
    return bool(several) and all(len(set(of_run)) == 1 for of_run in several)


def _spread(stage: str, metric: str, setting: Setting, values: list[float | None]) -> Spread:
    known = [value for value in values if value is not None]
    if not known:
        return Spread(stage, metric, setting, 0, None, None, None, None, tuple(values))
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(stage, metric, setting, len(known), statistics.fmean(known), std, min(known), max(known), tuple(values))


def _comparisons(spreads: Sequence[Spread], axes: Mapping[int, Sequence[Any]]) -> Iterator[Comparison]:
    """Of every metric: the first value of a key against each other one, all other keys equal, where there are several runs.

    `axes` are the values of each key that is compared, by its place in a setting.
    """
    by_setting = {(spread.metric, spread.setting): spread for spread in spreads if len(spread.values) > 1}
    for metric, setting in by_setting:
        for place, values in axes.items():
            first = (*setting[:place], shown_value(values[0]), *setting[place + 1 :])
            if setting == first or (metric, first) not in by_setting:
                continue
            before, after = by_setting[metric, first], by_setting[metric, setting]
            if difference := paired_difference(before.values, after.values):
                yield Comparison(after.stage, metric, first, setting, difference)


def _costs(
    groups: Mapping[Setting, Sequence[SweepTrial]], outcomes: Mapping[str, TrialOutcome]
) -> dict[str, dict[Setting, float]]:
    costs: dict[str, dict[Setting, float]] = {}
    for name in dict.fromkeys(name for outcome in outcomes.values() for name in outcome.costs):
        for setting, group in groups.items():
            values = [outcomes[trial.name].costs[name] for trial in group if name in outcomes[trial.name].costs]
            if values:
                costs.setdefault(name, {})[setting] = statistics.fmean(values)
    return costs


def _artifacts(outcomes: Sequence[TrialOutcome]) -> tuple[dict[str, int], dict[str, int]]:
    """By stage: how many different results there are, and how many trials have one."""
    results: dict[str, list[str]] = {}
    for outcome in outcomes:
        for entry, artifact, _ in outcome.stages:
            results.setdefault(entry, []).append(artifact)
    return {entry: len(set(ids)) for entry, ids in results.items()}, {entry: len(ids) for entry, ids in results.items()}


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
