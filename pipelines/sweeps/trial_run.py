"""One trial: an ordinary run of a pipeline, and what the sweep keeps of it. It is called in this process or in any other."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from compressor.errors import CheckError, CompressError, UserError, UserErrors
from compressor.models.architectures import add_row
from compressor.models.reference import resolve
from compressor.printable import printable
from compressor.run_store import LOCK_FILE
from compressor.tasks.task_kind import kind_for
from pipelines.engine.lockfile import read_lock
from pipelines.engine.stage import Artifact
from pipelines.file.config import Pipeline
from pipelines.stages.recover.config import CONTROL
from pipelines.stages.training_config import BUDGETS
from pipelines.stages.training_verdicts import verdicts
from pipelines.terminal.last_resort import coded
from pipelines.terminal.plain_console import PlainConsole

if TYPE_CHECKING:
    from pipelines.engine.invocation import RunResult

Quality = dict[str, dict[str, float]]
"""Stage id -> metric -> value, of one run; with a target, also its predicted and measured values."""

MEAN_OF_TASKS = "mean of tasks"
END = "end"
"""In place of a stage: the last one that measures quality, where trials have different stages, with its main metric first."""
SCORE = "score"
"""The main metric of each trial's own task, where trials have different tasks."""

LONGEST_WAIT = 180
"""Seconds for which a trial waits for its run folder: a killed sweep's process may need a moment to end, and an NFS 4 server
holds the lock of a lost machine until its lease ends, by default after 90."""
MEASUREMENTS = "measurements.json"


@dataclass(frozen=True)
class TrialJob:
    """What a worker needs to run a trial: the checked pipeline, whose name is the path of the run folder below `out`; or what
    is wrong with the pipeline."""

    name: str
    pipeline: Pipeline | None
    out: Path
    until: str
    stages: tuple[str, ...]
    """The stages whose quality is summarized."""
    fault: UserError | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    """sha256 that each of its data files, by path, and models, by reference, had when the sweep started."""
    warns: bool = False
    """Whether it says where memory or disk will not do: one trial of a sweep."""


@dataclass(frozen=True)
class TrialOutcome:
    """What a trial gave: the quality of its stages and its costs by name, or the error that ended it.

    `stages` are (stage id, artifact, whether it was reused); `failures` the failed checks that did not stop the run, each with
    its `trial`; `main` is the main metric of the last stage in `quality`, of which smaller values are better if it `falls`;
    `model` is the artifact of the last model of the run; `waited` the share of time that the processes whose latency was
    measured waited for a core; `unlearnt` are the tasks in which the last model is no better than a constant prediction: of a
    single one its name is ''.
    """

    quality: Quality = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    stages: tuple[tuple[str, str, bool], ...] = ()
    failures: tuple[dict[str, Any], ...] = ()
    error: CompressError | None = None
    seconds: float = 0.0
    main: str = ""
    falls: bool = False
    model: str = ""
    waited: float = 0.0
    unlearnt: tuple[str, ...] = ()

    @property
    def score(self) -> float | None:
        """The main metric of the last stage that measures quality; None of a trial that failed."""
        return self.quality[list(self.quality)[-1]][self.main] if self.main else None


Perform = Callable[[TrialJob, Console | None], TrialOutcome]


def perform(job: TrialJob, console: Console | None) -> TrialOutcome:
    """Run a trial; without a console it shows its progress on the terminal. Errors are part of the outcome."""
    if job.fault is not None:
        return TrialOutcome(error=_without_frames(job.fault))
    clock = time.monotonic()
    try:
        with naming(job.name):
            if job.pipeline.architecture is not None:
                add_row(job.pipeline.architecture)
            result = _run(job, console)
            _require_unchanged(job, result.folder)
            (quality, main), costs = _quality(job, result.artifacts), costs_of(result.artifacts)
    except Exception as error:
        fault = _without_frames(coded(error, f"trial {job.name}", [job.out / job.pipeline.name / "logs"], job.out))
    else:
        stages = tuple((entry, artifact.id, entry in result.reused) for entry, artifact in result.artifacts.items())
        failures = tuple({"trial": job.name, **failure} for failure in result.failures)
        falls = job.pipeline.task is not None and kind_for(job.pipeline.task).metric.falls
        models, seconds = _models(job, result.artifacts), time.monotonic() - clock
        model = result.artifacts[models[-1]].id if models else ""
        facts = {"main": main, "falls": falls, "model": model, "waited": waited_in(result.artifacts)}
        last = models[-1] if job.stages == (END,) else job.stages[-1]
        facts["unlearnt"] = unlearnt_in(job.pipeline, result.artifacts, last)
        return TrialOutcome(quality, costs, stages, failures, seconds=seconds, **facts)
    _free_memory()  # out of the except clause, which holds the error
    return TrialOutcome(error=fault, seconds=time.monotonic() - clock)


def _without_frames(error: CompressError) -> CompressError:
    """A copy without traceback and cause: their frames hold the trial's model, and the sweep keeps the error to its end."""
    if isinstance(error, UserErrors):
        return UserErrors([_without_frames(fault) for fault in error.errors])
    return copy.copy(error)


def _free_memory() -> None:
    """Free what a failed trial leaves: a model in reference cycles, and the memory of the GPU that torch keeps for itself."""
    gc.collect()
    if "torch" in sys.modules:
        with contextlib.suppress(RuntimeError):  # the error of the trial may have left CUDA unusable
            sys.modules["torch"].cuda.empty_cache()


def _run(job: TrialJob, console: Console | None) -> RunResult:
    """Run the pipeline, once no other process holds its run folder."""
    from pipelines.engine.runner import run_pipeline

    deadline, shown = time.monotonic() + LONGEST_WAIT, console or PlainConsole(stderr=True)

    def warn(line: str) -> None:
        text = f"warning: {printable(line)}"
        if job.warns and isinstance(shown, TrialConsole):
            shown.warn(text)
        elif job.warns:
            shown.print(text, markup=False, highlight=False, soft_wrap=True)

    while True:
        try:
            return run_pipeline(job.pipeline, job.out, until=job.until, console=console, warn=warn)
        except UserError as error:
            if error.code != "E802" or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _require_unchanged(job: TrialJob, folder: Path) -> None:
    """Raise UserError E807 where a run has read another file or model than the trials before it: a table compares results of
    the same data."""
    lock = read_lock(folder / LOCK_FILE)
    others = [reference for entry in job.pipeline.stages for reference in entry.row.beside.models_of(entry.config).values()]
    read = {reference: resolve(reference, job.pipeline.source_folder).sha256 for reference in others}
    read |= {lock["model"]["reference"]: lock["model"]["sha256"], **lock["data"]}
    for name, sha256 in read.items():
        if job.digests.get(name, sha256) != sha256:
            fix = "Run the same command again, and do not change it meanwhile: the other trials are of what it was before"
            raise UserError("E807", "changed since the sweep started", fix, name)


def check_line(failure: Mapping[str, Any]) -> str:
    """A line for one of an outcome's `failures`: 'E610 export (seed-0): int8 is left out.'"""
    return f"{failure['code']} {place_of(failure)}: {failure['what']}."


def place_of(failure: Mapping[str, Any]) -> str:
    """'export (seed-0)': where a check failed."""
    return f"{failure['stage']} ({failure['trial']})"


def _models(job: TrialJob, artifacts: Mapping[str, Artifact]) -> list[str]:
    """The stages of a run that published a model, in order."""
    return [entry.id for entry in job.pipeline.stages if entry.id in artifacts and entry.row.publishes_model]


def _quality(job: TrialJob, artifacts: Mapping[str, Artifact]) -> tuple[Quality, str]:
    """The quality of the job's stages, of each the main metric first, and that metric of the last one."""
    main = kind_for(job.pipeline.task).metric.key if job.pipeline.task else MEAN_OF_TASKS
    if job.stages != (END,):
        return {stage: {main: of[main], **of} for stage, of in quality_of(artifacts, job.stages).items()}, main
    last = _models(job, artifacts)[-1]
    metrics = quality_of(artifacts, [last])[last]
    return {END: {SCORE: metrics[main], **metrics}}, SCORE


def quality_of(artifacts: Mapping[str, Artifact], stages: Sequence[str]) -> Quality:
    """The metrics in the artifacts' metadata: every float of `quality`, which excludes its interval and row count, and of the
    `tests` (files that are only scored), with the name of the file.

    Of many tasks, those of each, after the mean of their main metrics.
    """
    qualities = {}
    for stage in stages:
        metadata = artifacts[stage].metadata
        target = metadata.get("target", {})
        qualities[stage] = _of_tasks(metadata["tasks"]) if "tasks" in metadata else _every_file(metadata)
        qualities[stage] |= {name: target[name] for name in ("predicted", "measured") if name in target}
    return qualities


def unlearnt_in(pipeline: Pipeline, artifacts: Mapping[str, Artifact], stage: str) -> tuple[str, ...]:
    """The tasks in which a stage's model is no better than a constant prediction; the name of a single one is ''."""
    metadata = artifacts[stage].metadata
    if pipeline.task is None:
        return tuple(row["task"] for row in metadata["tasks"] if any(verdicts(kind_for(pipeline.tasks[row["task"]]), row)))
    # trainings alone record what a constant reaches; it is of the validation rows, which are those of every stage
    constant = next((one.metadata["constant"] for one in artifacts.values() if "constant" in one.metadata), None)
    return ("",) if any(verdicts(kind_for(pipeline.task), {"constant": constant, **metadata})) else ()


def _of_tasks(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    main = [row["quality"][row["metric"]] for row in rows]
    each = {f"{row['task']} {name}": value for row in rows for name, value in _every_file(row).items()}
    return {MEAN_OF_TASKS: sum(main) / len(main), **each}


def _every_file(facts: Mapping[str, Any]) -> dict[str, float]:
    """The metrics on the validation rows, and those on files that are only scored."""
    tests = facts.get("tests", {}).items()
    scored = {f"{name}, {file}": value for file, quality in tests for name, value in _floats(quality).items()}
    return {**_floats(facts["quality"]), **scored}


def _floats(facts: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in facts.items() if isinstance(value, float)}


def costs_of(artifacts: Mapping[str, Artifact]) -> dict[str, float]:
    """What a run's model costs, of what its stages measured: trainable parameters, bytes, latency of the fastest file."""
    costs: dict[str, float] = {}
    for artifact in artifacts.values():
        metadata = artifact.metadata
        if isinstance(trainable := metadata.get("trainable"), dict) and "body" in trainable:
            costs["trainable parameters"] = trainable["body"]
        stored = artifact.folder.rglob("*.safetensors") if artifact.kind == "model" else ()
        # the control of a recovery is only compared with, and the deltas at smaller budgets are other results
        beside = [artifact.folder / name for name in (CONTROL, BUDGETS)]
        if sizes := [path.stat().st_size for path in stored if path.parent not in beside]:
            costs["bytes of the stored model"] = sum(sizes)
        if artifact.kind == "onnx":
            files = metadata.get("files", {}).get("compressed", {})
            sizes = [file["bytes"] for precisions in files.values() for file in precisions.values()]
            costs |= {"bytes of the smallest exported file": min(sizes)} if sizes else {}
        if artifact.kind == "measurements":
            costs |= _latency(artifact.folder / MEASUREMENTS)
    return costs


def waited_in(artifacts: Mapping[str, Artifact]) -> float:
    """The largest share of time that the processes timed by a run's stages waited for a core; 0 where none was timed."""
    paths = (artifact.folder / MEASUREMENTS for artifact in artifacts.values() if artifact.kind == "measurements")
    return max((json.loads(path.read_bytes()).get("waited", 0.0) for path in paths if path.is_file()), default=0.0)


def _latency(path: Path) -> dict[str, float]:
    """Median latency of the fastest compressed file, at the last batch and length that were measured."""
    if not path.is_file():
        return {}
    cells = [row["latency"][-1] for row in json.loads(path.read_bytes())["candidates"] if row["model"] == "compressed"]
    if not cells:
        return {}
    return {f"latency in ms at {cells[0]['batch']} × {cells[0]['length']}": min(cell["p50"] for cell in cells)}


@contextlib.contextmanager
def naming(trial: str) -> Iterator[None]:
    """Context in which errors keep their class and code, and name the trial."""
    try:
        yield
    except CompressError as error:
        raise named(error, trial) from error


def named(error: CompressError, trial: str) -> CompressError:
    """The error with the trial before its location."""
    if isinstance(error, UserErrors):
        return UserErrors([named(fault, trial) for fault in error.errors])
    place = f"trial {trial}"
    # a subclass may be made from something else
    kind = next(kind for kind in (CheckError, UserError, CompressError) if isinstance(error, kind))
    return kind(error.code, error.what, error.fix, f"{place}, {error.where}" if error.where else place)


def faults_of(error: CompressError) -> list[CompressError]:
    """The mistakes that an error is made of, or the error itself."""
    return list(error.errors) if isinstance(error, UserErrors) else [error]


class TrialConsole(PlainConsole):
    """The console of a trial that runs elsewhere: it calls `tell` with "said" and every line printed on it, and with "warned"
    and every warning, one at a time."""

    def __init__(self, tell: Callable[[Literal["said", "warned"], str], None]):
        self._lines = _Lines(tell)
        super().__init__(file=self._lines, width=120, force_terminal=False)

    def warn(self, line: str) -> None:
        """Tell a line that stays where the sweep is shown."""
        self._lines.tell("warned", line)


class _Lines(io.TextIOBase):
    def __init__(self, tell: Callable[[Literal["said", "warned"], str], None]):
        self._tell, self._lock = tell, threading.Lock()

    def tell(self, kind: Literal["said", "warned"], text: str) -> None:
        with self._lock:  # a run prints from a second thread, too
            for line in filter(None, map(str.strip, text.splitlines())):
                self._tell(kind, line)

    def write(self, text: str) -> int:
        self.tell("said", text)
        return len(text)
