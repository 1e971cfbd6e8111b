"""The result of a sweep as data: mean and spread of every setting, paired differences between settings, costs, failures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import CompressError
from pipelines.file.overrides import split_key
from pipelines.sweeps.search_summary import SearchSummary
from pipelines.sweeps.significance import PairedDifference, paired_difference
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial, deciding_key, short_keys
from pipelines.sweeps.table_file import shown_value
from pipelines.sweeps.trial_run import TrialOutcome

OUT_OF_REACH = "E520"
"""A target that no cut reaches: a result of a sweep over targets, not a failure."""


Setting = tuple[str, ...]
"""The values of the compared keys, as shown; () where only seeds or subsets differ."""


@dataclass(frozen=True)
class Spread:
    """One metric of one stage over the runs of a setting. `std` is the sample's standard deviation (n - 1), 0 for a single run;
    `values` are in the order of the seeds, subsets or named runs, None for a run without the metric (it failed, or its target
    is out of reach); the rest is None without any."""

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
    failed and ended no run, as `RunResult.failures`, each with its trial in `stage`.
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

    @property
    def columns(self) -> tuple[str, ...]:
        return *self.titles, "stage", "metric", "N", "mean", "std", "min", "max", "each run"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [spread.cells() for spread in self.spreads]


def summarize(
    folder: Path, plan: SweepPlan, trials: Sequence[SweepTrial], outcomes: Mapping[str, TrialOutcome], stages: Sequence[str]
) -> SweepResult:
    """The result of trials that all ended; `stages` are those whose quality is measured, in order."""
    repetitions = tuple(axis for axis in plan.axes if _repeats(plan, axis))
    axes = [axis for axis in plan.axes if axis not in repetitions]
    tasks = tuple(place for place, axis in enumerate(axes) if deciding_key(plan.grid, axis))
    groups = _groups(trials, axes)
    titles = short_keys(list(plan.axes))
    spreads = [
        _spread(stage, metric, setting, [outcomes[trial.name].quality.get(stage, {}).get(metric) for trial in group])
        for stage, metric in _measured(outcomes.values(), stages)
        for setting, group in groups.items()
        if _has(metric, [outcomes[trial.name].quality.get(stage, {}) for trial in group])
    ]
    last = [spread for spread in spreads if spread.stage == stages[-1]]
    compared = {place: plan.axes[axis] for place, axis in enumerate(axes) if place not in tasks}
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
        _artifacts(outcomes.values()),
        mains,
        frozenset(setting for setting, group in groups.items() if any(outcomes[trial.name].falls for trial in group)),
        tasks=tasks,
        repetitions=repetitions,
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


def _has(metric: str, qualities: Sequence[Mapping[str, float]]) -> bool:
    """Whether a setting has a metric, or failed wholly: other tasks have other metrics."""
    return any(metric in quality for quality in qualities) or not any(qualities)


def _spread(stage: str, metric: str, setting: Setting, values: list[float | None]) -> Spread:
    known = [value for value in values if value is not None]
    if not known:
        return Spread(stage, metric, setting, 0, None, None, None, None, tuple(values))
    std = statistics.stdev(known) if len(known) > 1 else 0.0
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


def _artifacts(outcomes: Sequence[TrialOutcome]) -> dict[str, int]:
    results: dict[str, set[str]] = {}
    for outcome in outcomes:
        for entry, artifact, _ in outcome.stages:
            results.setdefault(entry, set()).add(artifact)
    return {entry: len(names) for entry, names in results.items()}


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
