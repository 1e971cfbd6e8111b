"""The trials of a search: each is chosen when there is room for it, by the results of those before.

The values of a trial are recorded in the sweep's folder before it runs, with the scores of those that have ended, so a search
that was stopped or killed has the same trials as an undisturbed one. Trials themselves are resumed as those of any sweep.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.tasks.task_kind import kind_for
from pipelines.engine.store import replace_files
from pipelines.file.config import Pipeline
from pipelines.sweeps.proposals import Tried, Values, propose
from pipelines.sweeps.search_ranges import Range
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial
from pipelines.sweeps.table_file import Axes
from pipelines.sweeps.trial_run import TrialJob, TrialOutcome, named

RECORD = "search.json"


class SearchTrials:
    """The trials of a search in `folder`, in order; `make` turns a run of one into a job, `say` prints a line.

    Trial n is chosen from the results of the trials 1 to n - `lag`, whatever else has ended by then: so the trials do not
    depend on which one happens to be faster. With `lag` trials under way there is a run for each of the workers.
    """

    def __init__(
        self,
        plan: SweepPlan,
        pipeline: Pipeline,
        folder: Path,
        make: Callable[[SweepTrial], TrialJob],
        say: Callable[[str], None],
    ):
        self.plan, self.runs = plan, []
        """`runs` are those of each trial that was chosen."""
        self.lag = 1 + math.ceil((plan.search.workers - 1) / plan.repeats)
        self._pipeline, self._path, self._make, self._say = pipeline, folder / RECORD, make, say
        self._falls = pipeline.task is not None and kind_for(pipeline.task).metric.falls
        self._chosen: list[Values] = []
        self._scores: list[float | None] = []
        self._outcomes: dict[str, TrialOutcome] = {}
        self._ended: set[int] = set()
        self._record = self._read()

    @property
    def trials(self) -> list[SweepTrial]:
        """Every run of every trial that was chosen, in order."""
        return [run for runs in self.runs for run in runs]

    def jobs(self) -> Iterator[TrialJob | None]:
        """Every run of every trial; None where the results for the choice of the next trial are not all there."""
        while (number := len(self._chosen)) < self.plan.search.trials:
            if not set(range(number - self.lag + 1)) <= self._ended:
                yield None
                continue
            self._choose()
            for run in self.runs[-1]:
                yield self._job(run)

    def hear(self, run: str, outcome: TrialOutcome) -> None:
        """Keep what a run gave, and with the last one of a trial the trial's score."""
        self._outcomes[run] = outcome
        number = next(place for place, runs in enumerate(self.runs) if run in [trial.name for trial in runs])
        if all(trial.name in self._outcomes for trial in self.runs[number]):
            self._ended.add(number)
            self._scores[number] = score_of([self._outcomes[trial.name] for trial in self.runs[number]])
            self._compare(number)
            if len(self._ended) == self.plan.search.trials:  # before, the choice of the next trial writes
                self._write()

    def _choose(self) -> None:
        number = len(self._chosen)
        if number < len(self._record):
            values = self._record[number]["values"]
        else:
            last = number - self.lag
            history = [
                Tried(values, score, pending=place > last)
                for place, (values, score) in enumerate(zip(self._chosen, self._scores, strict=True))
            ]
            values = propose(self.plan.axes, self._pipeline.seed, history, falls=self._falls)
        self._chosen.append(values)
        self._scores.append(None)
        self.runs.append(self.plan.tried(number + 1, values, self._pipeline))
        self._write()

    def _job(self, run: SweepTrial) -> TrialJob:
        """The job of a run; of values that do not fit together, one that ends with their error."""
        try:
            return self._make(run)
        except UserError as error:
            fault = error if error.where.startswith("trial ") else named(error, run.name)
            return TrialJob(run.name, None, self._path.parent, "", (), fault)

    def _compare(self, number: int) -> None:
        """Forget the recorded trials that were chosen by another result than this one."""
        old = self._record[number]["score"] if number < len(self._record) else None
        score = self._scores[number]
        if old in (None, score) or score is None:
            return
        if len(self._record) > len(self._chosen):
            self._say(f"trial {number + 1} scores {score:.6g}, and {old:.6g} before: later trials are chosen anew")
        self._record = self._record[: len(self._chosen)]

    def _read(self) -> list[dict[str, Any]]:
        """The recorded trials of the same search."""
        try:
            record = json.loads(self._path.read_bytes())
            found = [{"values": dict(trial["values"]), "score": _score(trial["score"])} for trial in record["trials"]]
            same = (record["over"], record["seed"]) == (recorded(self.plan.axes), self._pipeline.seed)
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, RecursionError):
            self._say(f"{self._path} is damaged: all trials are chosen anew")
            return []
        fits = all(_holds(self.plan.axes, trial["values"]) for trial in found)
        if not same or not fits:
            self._say(f"{self._path} is of another search: all trials are chosen anew")
        return found if same and fits else []

    def _write(self) -> None:
        trials = [{"values": values, "score": score} for values, score in zip(self._chosen, self._scores, strict=True)]
        # those that this search has not come to, or whose runs are repeated now
        for number, old in enumerate(self._record):
            if number >= len(trials):
                trials.append(old)
            elif number not in self._ended:
                trials[number] = old
        content = {"over": recorded(self.plan.axes), "seed": self._pipeline.seed, "trials": trials}
        replace_files({self._path: f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode()})


def _score(value: Any) -> float | None:
    return None if value is None else float(value)


def score_of(outcomes: Sequence[TrialOutcome]) -> float | None:
    """The mean of the main metric over the runs of a trial; None if one of them failed: it must not be the best."""
    scores = [outcome.score for outcome in outcomes]
    if None in scores or not all(map(math.isfinite, scores)):
        return None
    return statistics.fmean(scores)


def recorded(axes: Axes) -> dict[str, Any]:
    """The compared keys as data: a range as its text."""
    return {key: str(values) if isinstance(values, Range) else values for key, values in axes.items()}


def _holds(axes: Axes, values: Mapping[str, Any]) -> bool:
    return values.keys() == axes.keys() and all(
        axis.holds(values[key]) if isinstance(axis, Range) else values[key] in axis for key, axis in axes.items()
    )
