"""The result of a search: its trials from best to worst, the best one as a command, and a figure of quality by trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.engine.disk import RUNS
from pipelines.file.config import RECIPES, Pipeline, command_of, run_command
from pipelines.file.overrides import TRAININGS, key_path, with_folder
from pipelines.file.pipeline_file import PipelineFile
from pipelines.reporting.figures import COMPRESSED, DENSE, Figure, layout
from pipelines.sweeps.search_trials import score_of
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial, short_keys
from pipelines.sweeps.table_file import shown_value
from pipelines.sweeps.trial_run import TrialOutcome


@dataclass(frozen=True)
class SearchScore:
    """A trial of a search: its number, from 1; its values; the main metric of each run, None where one failed; their mean,
    None if any did."""

    number: int
    values: Mapping[str, Any]
    runs: tuple[float | None, ...]
    score: float | None


@dataclass(frozen=True)
class SearchSummary:
    """The trials of a search, in order; `metric` is what makes one the best, the least if it `falls`; of the best one, its
    first `run`, and the `command` that runs its settings (`here`: with the folders that were given, so that nothing is made
    again), or what no command can be given in `beyond`."""

    trials: tuple[SearchScore, ...]
    metric: str
    run: str = ""
    command: str = ""
    here: str = ""
    beyond: str = ""
    falls: bool = False

    @property
    def ranked(self) -> list[SearchScore]:
        """From best to worst; of equal ones the first; those that failed at the end."""
        known = [trial for trial in self.trials if trial.score is not None]
        failed = [trial for trial in self.trials if trial.score is None]
        return [*sorted(known, key=lambda trial: trial.score if self.falls else -trial.score), *failed]

    @property
    def best(self) -> SearchScore | None:
        """The best trial; None if all failed."""
        return next((trial for trial in self.ranked[:1] if trial.score is not None), None)

    def told(self, code: Callable[[str], str] = str, *, here: bool = False) -> list[str]:
        """What came out, and how the best trial is run alone (`here`, or anywhere), a line each; `code` formats commands and
        files."""
        best, count = self.best, len(self.trials)
        if best is None:
            return [f"None of {count} trials has a result."]
        runs = f", mean of {len(best.runs)} runs" if len(best.runs) > 1 else ""
        lock = code(f"{self.run}/pipeline.lock.yaml")
        return [
            f"Best of {count} trials: number {best.number}, {self.metric} {best.score:.4f}{runs}.",
            f"Run it alone: {code(self.here if here else self.command)}"
            if self.command
            else f"No command runs it alone, because of {self.beyond}: its pipeline is in {lock}.",
        ]

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of `rows`."""
        return "trial", *short_keys(list(self.trials[0].values)).values(), self.metric, "each run"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A table of the trials, from best to worst."""
        return [
            (
                f"{trial.number:03}",
                *map(shown_value, trial.values.values()),
                _decimals(trial.score),
                " ".join(_decimals(score) or "failed" for score in trial.runs),
            )
            for trial in self.ranked
        ]


def summarize_search(
    plan: SweepPlan,
    runs: Sequence[Sequence[SweepTrial]],
    outcomes: Mapping[str, TrialOutcome],
    stage: str,
    path: Path,
    pipeline: Pipeline,
    overrides: Sequence[str],
    out: Path,
) -> SearchSummary:
    """The summary of a search that ended; `runs` are those of each trial, `stage` is the one whose main metric counts, `path`
    is the file of `pipeline`, `out` is the folder of runs and store."""
    trials = []
    for number, group in enumerate(runs, start=1):
        found = [outcomes[run.name] for run in group]
        trials.append(SearchScore(number, group[0].values, tuple(outcome.score for outcome in found), score_of(found)))
    main = next((outcome.main for outcome in outcomes.values() if outcome.main), "quality")
    falls = any(outcome.falls for outcome in outcomes.values())
    summary = SearchSummary(tuple(trials), f"{main} after {stage}", falls=falls)
    if summary.best is None:
        return summary
    run = runs[summary.best.number - 1][0]
    keys = _row_keys(run)
    if beyond := _beyond(plan, keys):
        return replace(summary, run=run.name, beyond=beyond)
    # paths of a row are relative to the pipeline's folder, those of --set to the current one
    located = {key: with_folder(pipeline.source_folder, key_path(pipeline.source, key), keys[key]) for key in keys}
    after = [*overrides, *replace(run, repeat={}).settings]
    settings, settings_here = ([*SweepTrial("", row).settings, *after] for row in (keys, located))
    file, place = path.stem if RECIPES in path.parents else str(path), [] if out == RUNS else ["--out", str(out)]
    here = run_command(file, settings_here, *place)
    return replace(summary, run=run.name, command=command_of(path, settings), here=here)


def _row_keys(run: SweepTrial) -> dict[str, Any]:
    """What the named rows of a run set, in the order in which it is set: top-level keys first, and a later row's last."""
    pairs = [pair for _, row in run.presets for pair in row.items()]
    keys: dict[str, Any] = {}
    for key, value in sorted(pairs, key=lambda pair: pair[0] not in PipelineFile.model_fields):
        keys.pop(key, None)  # what is set last stands last, behind what it contains
        keys[key] = value
    return keys


def _beyond(plan: SweepPlan, row_keys: Mapping[str, Any]) -> str:
    """What of a run no `compress run` can be given, in words; '' if a command sets all of it."""
    if plan.data is not None:
        return "the data of --folder"
    if "stages" in row_keys:
        return "the stages of its named row"
    # of a row it is the key of stages that lack it, in a command that of all
    trainings = next((key for key in row_keys if key.startswith(TRAININGS)), None)
    return f"{trainings} of its named row" if trainings else ""


def search_figure(search: SearchSummary) -> Figure:
    """The main metric by trial, and the best up to each."""
    known = [trial for trial in search.trials if trial.score is not None]
    better = min if search.falls else max
    best = [better(trial.score for trial in known[: place + 1]) for place in range(len(known))]
    numbers = [trial.number for trial in known]
    texts = [", ".join(f"{key} {shown_value(value)}" for key, value in trial.values.items()) for trial in known]
    data = [
        {
            "type": "scatter",
            "name": "trial",
            "mode": "markers",
            "x": numbers,
            "y": [trial.score for trial in known],
            "text": texts,
            "hovertemplate": "%{text}: %{y:.4f}",
            "marker": {"color": DENSE, "size": 9},
        },
        {
            "type": "scatter",
            "name": "best up to here",
            "mode": "lines",
            "x": numbers,
            "y": best,
            "hoverinfo": "skip",
            "line": {"color": COMPRESSED, "width": 1.5, "shape": "hv"},
        },
    ]
    failed = len(search.trials) - len(known)
    caption = f"{search.metric} of each trial, in the order in which they were chosen, and the best up to each."
    caption += f" {failed} failed and are left out." if failed else ""
    axes = {"xaxis": {"title": {"text": "trial"}}, "yaxis": {"title": {"text": search.metric}}}
    return Figure("search", "Quality by trial", caption, data, layout(400, **axes) | {"showlegend": True}, wide=True)


def _decimals(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
