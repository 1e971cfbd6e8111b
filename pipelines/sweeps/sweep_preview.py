"""What a sweep would run: of every trial the stages in the store and those to run, and what trials share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.engine.invocation import Run
from pipelines.engine.runner import failures_of, prepare
from pipelines.engine.stage import Artifact, Entry
from pipelines.engine.stage_inputs import fingerprint_of
from pipelines.sweeps.trial_run import TrialJob, naming

STAGE_COLUMNS = ("stage", "trials", "results", "reuse", "run")


@dataclass(frozen=True)
class StagePreview:
    """A stage of a trial: its id, the fingerprint of its result, and whether that is in the store."""

    id: str
    fingerprint: str
    reused: bool


@dataclass(frozen=True)
class TrialPreview:
    """A trial and its stages, in order."""

    name: str
    stages: tuple[StagePreview, ...]

    @property
    def finished(self) -> bool:
        """Whether all of its stages are in the store."""
        return all(stage.reused for stage in self.stages)

    @property
    def line(self) -> str:
        """'reuse select; run tune, prune', or 'reuse select, tune, prune'."""
        parts = {word: [stage.id for stage in self.stages if stage.reused is reused] for word, reused in WORDS.items()}
        return "; ".join(f"{word} {', '.join(ids)}" for word, ids in parts.items() if ids)


WORDS = {"reuse": True, "run": False}


def preview(job: TrialJob) -> TrialPreview:
    """What a trial would reuse and run. Raises UserError E2xx and E3xx of its inputs, E803 (a damaged artifact).

    A stage behind one that must run is told from those of other trials by what goes into it, as its input is not there yet: it
    may turn out to be in the store, where an earlier stage was deleted from it.
    """
    with naming(job.name):
        run = prepare(job.pipeline, job.out, until=job.until)
        return TrialPreview(job.name, tuple(_stages(run)))


def _stages(run: Run) -> Iterator[StagePreview]:
    earlier: list[Artifact] = []
    for number, entry in enumerate(run.entries):
        mark = fingerprint_of(run, number, earlier)
        found = run.store.find(entry.name, mark, entry.id)
        yield StagePreview(entry.id, mark, found is not None)
        earlier.append(found or _to_come(run, entry, mark))
        run.failures += failures_of(earlier[-1])  # part of the fingerprint of a report behind it


def _to_come(run: Run, entry: Entry, mark: str) -> Artifact:
    """What stands for the artifact of a stage that has not run."""
    folder = run.store.folder(entry.name, mark)
    return Artifact(folder, folder.name, entry.row.produces, entry.name, entry.id, {}, {"to come": mark})


def stage_rows(trials: Sequence[TrialPreview]) -> list[tuple[str, ...]]:
    """A row under STAGE_COLUMNS for each stage: trials that have it, different results, and how many are reused and run."""
    results: dict[str, dict[str, bool]] = {}
    for stage in (stage for trial in trials for stage in trial.stages):
        results.setdefault(stage.id, {})[stage.fingerprint] = stage.reused
    return [
        (entry, str(sum(entry in [stage.id for stage in trial.stages] for trial in trials)), *map(str, _counts(marks)))
        for entry, marks in results.items()
    ]


def _counts(marks: Mapping[Any, bool]) -> tuple[int, int, int]:
    reused = sum(marks.values())
    return len(marks), reused, len(marks) - reused


def counted(trials: Sequence[TrialPreview]) -> str:
    """'12 trials: 3 finished, 9 to run; of 36 stages 21 are shared: 10 to run, 5 to reuse'."""
    finished, stages = sum(trial.finished for trial in trials), [stage for trial in trials for stage in trial.stages]
    different = {(stage.id, stage.fingerprint): stage.reused for stage in stages}
    results, reused, run = _counts(different)
    return (
        f"{len(trials)} trials: {finished} finished, {len(trials) - finished} to run; "
        f"of {len(stages)} stages {len(stages) - results} are shared: {run} to run, {reused} to reuse"
    )
