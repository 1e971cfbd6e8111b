"""Runs a pipeline: what is in the store is reused, what is missing is made, and only whole results are ever published."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from compressor.errors import CheckError, CompressError, UserError
from compressor.processor import default_threads
from compressor.tasks import ending
from pipelines.engine.attempt import CHECKS_FAILED, DONE, FAILED, RUNNING, STOPPED, error_record, write_attempt
from pipelines.engine.disk import disk_fault, nothing_left, shortened
from pipelines.engine.environment import accelerator, machine, package_versions
from pipelines.engine.lockfile import LOCK_FILE
from pipelines.engine.preflight import Ready, check_folder, check_inputs, check_packages, make_plan
from pipelines.engine.stage import TASKS, Artifact, Entry, Inputs, Progress, Stage, dense_of
from pipelines.engine.store import Locked, Store, canonical, digest, fingerprint, lock, replace_files
from pipelines.engine.unchanged import Originals
from pipelines.file.config import Pipeline, with_place, without_id
from pipelines.file.yaml_source import KeyPath
from pipelines.terminal.capture import captured, real_stdout
from pipelines.terminal.last_resort import coded
from pipelines.terminal.progress import Display, human_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from compressor.account import Plan


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, the artifact of every stage by id, the ids that were reused, and the report if there is one.

    `failures` are checks that failed and did not end it: {"stage", "code", "what", "mend"}; an optional stage whose check
    failed has no artifact. After a dry run `artifacts` holds what would be reused and `plan` the closed-form account (None when
    no stage changes it).
    """

    folder: Path
    artifacts: dict[str, Artifact]
    reused: tuple[str, ...]
    report: Path | None = None
    plan: Plan | None = None
    failures: tuple[dict[str, Any], ...] = ()


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; `exit_code` is 130 or 143. Libraries clean up for it as for any KeyboardInterrupt.

    `told` is set when the user has seen it.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.told = False


@dataclass(frozen=True)
class _Workspace:
    """What a stage is given to write in and to speak with."""

    folder: Path
    log_folder: Path
    unfinished: Path
    cache: Path
    again: bool
    log: logging.Logger
    display: Display
    records: list[dict[str, Any]]

    def progress(self, description: str, total: int) -> AbstractContextManager[Progress]:
        return self.display.bar(description, total)

    def say(self, text: str) -> None:
        self.display.result(text)

    def proven(self, record: dict[str, Any]) -> None:
        self.records.append(json.loads(canonical(record)))


@dataclass
class _Run:
    """One invocation: its places, its options and what it has done so far."""

    ready: Ready
    out: Path
    threads: int
    again: frozenset[int]
    stop_after: int
    store: Store = field(init=False)
    folder: Path = field(init=False)
    originals: Originals = field(init=False)
    artifacts: list[Artifact] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of every stage with an artifact, by its id."""
    records: list[dict[str, Any]] = field(default_factory=list)
    proofs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The records of every stage's comparisons, by its id."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    current: str = ""
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.store, self.folder = Store(self.out / ".store"), self.out / self.pipeline.name
        self.originals = Originals(self.ready)

    @property
    def pipeline(self) -> Pipeline:
        return self.ready.pipeline

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The stages of this invocation, up to --until."""
        return self.pipeline.stages[: self.stop_after + 1]

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """The machine, with every package of this run's stages."""
        stages = [entry.row for entry in self.entries]
        extras = [name for stage, entry in zip(stages, self.entries, strict=True) for name in stage.extras(entry.config)]
        return machine(stages, self.threads, dict.fromkeys(extras))

    @property
    def log(self) -> Path | None:
        """The log of the stage it is at."""
        path = self.folder / "logs" / f"{self.current}.log"
        return path if self.current and path.is_file() else None


def run_pipeline(
    pipeline: Pipeline,
    out: Path,
    from_: str | None = None,
    until: str | None = None,
    force: Sequence[str] = (),
    dry_run: bool = False,
    console: Console | None = None,
) -> RunResult:
    """Run the stages of a pipeline in order; the result lies in `out`/NAME and the artifacts in `out`/.store.

    `from_` and every later stage are made again, `until` is the last one, and each of `force` is made again.
    Nothing is written before the model, the data, the options and the folder are found to be right. The lock file and the
    report of the last run that finished stay until this one has; run.json says how far it is, and how it ended.

    Raises UserError E111 (unknown stage id), E2xx, E3xx, E5xx (inputs), E801 (folder), E802 (run in use), E803 (damaged
    artifact), E804 (disk full), E807 (an input changed meanwhile), E901 (package missing); whatever the stages raise;
    CompressError E899 when a stage fails unexpectedly; Stopped on SIGINT and SIGTERM. Checks that failed and did not end it are
    `failures` of the result.
    """
    run = _prepare(pipeline, out, from_, until, force)
    ahead = _look_ahead(run, damaged_is_missing=not dry_run)
    # the account costs an import of torch: a run that makes nothing goes without
    plan = make_plan(run.ready) if dry_run or len(ahead) < len(run.entries) else None
    if dry_run:
        return RunResult(run.folder, {one.entry: one for one in ahead}, tuple(one.entry for one in ahead), plan=plan)
    check_packages(run.entries[len(ahead) :])
    check_folder(run.out, pipeline.name, [f"{entry.id}.log" for entry in run.entries])
    try:
        with _stopping(), _holding(run):
            return _execute(run, console or _console())
    except Exception as error:
        fault = coded(error, "the run", [run.folder / "logs"], run.out)
        if fault is error:
            raise
        raise fault from error


def _prepare(pipeline: Pipeline, out: Path, from_: str | None, until: str | None, force: Sequence[str]) -> _Run:
    last = len(pipeline.stages) - 1 if until is None else pipeline.number(until, "--until")
    first = len(pipeline.stages) if from_ is None else pipeline.number(from_, "--from")
    if from_ is not None and first > last:
        raise UserError("E111", f"--from {from_} comes after --until {until}", "Exchange them, or drop one")
    again = {pipeline.number(entry, "--force") for entry in force} | set(range(first, len(pipeline.stages)))
    return _Run(check_inputs(pipeline), out.absolute(), pipeline.threads or default_threads(), frozenset(again), last)


def _look_ahead(run: _Run, *, damaged_is_missing: bool) -> list[Artifact]:
    """The artifacts at the start of the pipeline that will be reused; what comes after the first gap is not known yet.

    A damaged one may be such a gap: the run itself will tell, and write down that it failed.
    """
    found: list[Artifact] = []
    for number, entry in enumerate(run.entries):
        if number in run.again:
            break
        try:
            artifact = run.store.find(entry.name, _fingerprint(run, number, found), entry.id)
        except UserError:
            if damaged_is_missing:
                break
            raise
        if artifact is None:
            break
        found.append(artifact)
    return found


def _console() -> Console:
    from rich.console import Console

    stream = real_stdout()
    return Console(file=stream, width=None if stream.isatty() else 120)


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Stopped, in the main thread (the only one that gets signals)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _holding(run: _Run) -> Iterator[None]:
    """Make the folders and hold the run's process lock. Raises UserError E801, E802."""
    try:
        for folder in (run.folder / "logs", run.store.root):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made ({error.strerror})"
        raise disk_fault(error) or UserError("E801", what, "Choose another folder with --out", str(folder)) from None
    try:
        with lock(run.folder / "run.lock"):
            yield
    except Locked as holder:
        what = f"process {holder.pid} is running this pipeline here"
        raise UserError("E802", what, "Wait for it, or choose another --out", str(run.folder)) from None


def _execute(run: _Run, console: Console) -> RunResult:
    """Every stage in order, with run.json written however it ends."""
    display = Display(console, len(run.entries), max(len(entry.id) for entry in run.entries))
    try:
        _write_account(run, RUNNING)
        run.store.sweep()
        for number, entry in enumerate(run.entries):
            run.current = entry.id
            with display.stage(number + 1, entry.id):
                _attempt(run, number, display)
            _write_account(run, RUNNING)
        run.current = ""
        _publish_results(run)
        _write_account(run, CHECKS_FAILED if run.failures else DONE)
    except Exception as error:
        fault = coded(error, "the run", [run.folder / "logs"], run.out)
        with contextlib.suppress(OSError):  # the error is what the user has to see
            _write_account(run, FAILED, fault)
        if fault is error:
            raise
        raise fault from error
    except BaseException as stop:
        with contextlib.suppress(OSError):
            _write_account(run, STOPPED)
        if isinstance(stop, Stopped):
            done = f"{len(run.artifacts)} of {len(run.entries)} stages are finished and kept"
            display.say(f"Stopped by {stop}: {done}. The same command continues.")
            stop.told = True
        raise
    reused = tuple(record["id"] for record in run.records if record["reused"])
    report = next((path for ending in ("html", "md", "json") if (path := run.folder / f"report.{ending}").is_file()), None)
    artifacts = {one.entry: one for one in run.artifacts}
    return RunResult(run.folder, artifacts, reused, report, failures=tuple(run.failures))


def _attempt(run: _Run, number: int, display: Display) -> None:
    """One stage. A check that fails ends the run, unless the stage is optional."""
    entry = run.entries[number]
    try:
        _advance(run, number, display)
    except CheckError as error:
        if not entry.row.optional:
            raise
        _note_failure(run, entry, {"code": error.code, "what": error.what, "mend": error.mend}, display)


def _note_failure(run: _Run, entry: Entry, failure: dict[str, Any], display: Display) -> None:
    """Write down, and say, a check that failed and does not end the run."""
    known = {key: str(failure[key]) for key in ("code", "what", "mend")}
    run.failures.append({"stage": entry.id, **known})
    display.result("FAILED {code} {what}. {mend}".format(**known).replace("\n", " "))


def _advance(run: _Run, number: int, display: Display) -> None:
    """Reuse or make the artifact of one stage, and write down which."""
    entry, mark = run.entries[number], _fingerprint(run, number, run.artifacts)
    stage, clock = entry.row, time.monotonic()
    artifact = _reusable(run, number, mark)
    reused = artifact is not None
    if not reused:
        with run.store.making(entry.name, mark, lambda pid: display.result(f"waiting for process {pid}")) as work:
            if _reusable(run, number, mark) is None:  # else another run made it while we waited
                unfinished = run.store.unfinished(entry.name, mark)
                run.originals.before()
                metadata = _perform(run, number, stage, work, unfinished, display)
                run.originals.require()
                run.store.publish(work, entry.name, mark, stage.produces, metadata)
        artifact = run.store.find(entry.name, mark, entry.id)
    seconds = time.monotonic() - clock
    run.artifacts.append(artifact)
    run.fingerprints[entry.id] = mark
    if isinstance(recorded := artifact.metadata.get("parity"), list):
        run.proofs[entry.id] = recorded
    record = {"id": entry.id, "stage": entry.name, "artifact": artifact.id, "reused": reused, "seconds": seconds}
    run.records.append(record)
    display.result("reused" if reused else f"done in {human_seconds(seconds)}")
    for failure in artifact.metadata.get("failures", ()):
        _note_failure(run, entry, failure, display)


def _reusable(run: _Run, number: int, mark: str) -> Artifact | None:
    """The stage's artifact from the store, compared with its sha256s; None when there is none or it is to be made again."""
    entry = run.entries[number]
    artifact = None if number in run.again else run.store.find(entry.name, mark, entry.id)
    if artifact is not None:
        run.store.verify(artifact)
    return artifact


def _perform(run: _Run, number: int, stage: Stage, work: Path, unfinished: Path, display: Display) -> dict[str, Any]:
    """Call the stage's `run` with its output in its log. Raises its CompressErrors with a place, E804, or E899."""
    entry, logs = run.entries[number], run.folder / "logs"
    log_path = logs / f"{entry.id}.log"
    log, cache, again = logging.getLogger(f"compress.{entry.id}"), run.store.cache, number in run.again
    proofs = run.proofs.setdefault(entry.id, [])
    workspace = _Workspace(work, logs, unfinished, cache, again, log, display, proofs)
    with captured(log_path):
        try:
            _settle(stage, run.pipeline.seed, run.threads)
            metadata = stage.perform(entry.config, _inputs(run, number, run.artifacts), workspace)
            return json.loads(canonical(metadata))
        except Exception as error:
            with contextlib.suppress(OSError):
                log.error("%s", error) if isinstance(error, CompressError) else traceback.print_exc()
            fault = _stage_fault(run, number, error, log_path)
            if fault is error:
                raise
            raise fault from error


def _stage_fault(run: _Run, number: int, error: Exception, log_path: Path) -> CompressError:
    """What ends a stage as an error with a code and, for a mistake of the user, a place."""
    if fault := disk_fault(error, run.out):
        return fault
    if isinstance(error, UserError):
        return with_place(error, run.pipeline.where(number))
    if full := nothing_left(run.out):
        return full
    if isinstance(error, CompressError):
        return error
    what = f"stage '{run.entries[number].id}' failed unexpectedly ({shortened(f'{type(error).__name__}: {error}')})"
    return CompressError("E899", what, f"This is a bug; its traceback is in {log_path}")


def _settle(stage: Stage, seed: int, threads: int) -> None:
    """The same random state and thread count for a stage whether or not others ran in this process before it."""
    random.seed(seed)
    if "torch" in stage.packages:
        import numpy as np
        import torch

        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.set_num_threads(threads)


def _inputs(run: _Run, number: int, earlier: Sequence[Artifact]) -> Inputs:
    """What the stage declares, and nothing else."""
    pipeline, entry = run.pipeline, run.entries[number]
    stage = entry.row
    everything = "*" in stage.accepts
    kinds = {*stage.needs, *stage.accepts}
    before = [one.id for one in pipeline.stages[:number]]
    failed = [one for one in run.failures if one["stage"] in before]
    return Inputs(
        base=run.ready.base,
        task=pipeline.task,
        seed=pipeline.seed,
        artifacts=tuple(artifact for artifact in earlier if everything or artifact.kind in kinds),
        dense=dense_of(earlier) if stage.uses_dense else None,
        run={"name": pipeline.name, "stages": before, **({"failures": failed} if failed else {})} if everything else {},
        threads=run.threads,
        tasks=pipeline.tasks,
        require_unchanged=run.originals.require,
    )


def _fingerprint(run: _Run, number: int, earlier: Sequence[Artifact]) -> str:
    """sha256 over everything that decides the stage's result."""
    entry, inputs = run.entries[number], _inputs(run, number, earlier)
    stage = entry.row
    content = {str(path): {"sha256": sha256, "ending": ending(path)} for path, sha256 in run.ready.data.items()}
    reads_data = stage.reads_data(entry.config) if callable(stage.reads_data) else stage.reads_data
    tasks = {
        path: {
            key: content.get(str(value), value) if reads_data or str(value) not in content else None
            for key, value in task.model_dump(mode="json", exclude_none=True).items()
            if reads_data or key != "subset"
        }
        for path, task in run.pipeline.all_tasks.items()
    }
    # a stage that torch computes gives other bits on a graphics card
    card = accelerator() if "torch" in stage.packages else None
    return fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": without_id(entry.config),
            "artifacts": [digest(artifact) for artifact in inputs.artifacts],
            "dense": digest(inputs.dense) if inputs.dense else None,
            "run": inputs.run,
            "base": inputs.base.sha256,
            **_nested(tasks),
            "seed": inputs.seed,
            "packages": package_versions(stage, stage.extras(entry.config)),
            "python": list(sys.version_info[:2]),
            "threads": run.threads,
            **({"accelerator": card} if card else {}),
            **stage.surroundings(entry.config),
        }
    )


def _nested(tasks: dict[KeyPath, Any]) -> dict[str, Any]:
    """{("task",): x} -> {"task": x}; {("tasks", "a"): x} -> {"tasks": {"a": x}}."""
    many = {path[1]: facts for path, facts in tasks.items() if len(path) > 1}
    return {"tasks": many} if many else {"task": tasks[("task",)]}


def _write_account(run: _Run, status: str, error: CompressError | None = None) -> None:
    """run.json: how far this attempt is, and how it ended. Raises OSError."""
    base = run.ready.base
    facts = {
        "status": status,
        "started": run.started,
        "seconds": time.monotonic() - run.clock,
        "stage": run.current,
        "stages": run.records,
        "parity": [{**record, "stage": entry} for entry, records in run.proofs.items() for record in records],
        "failures": run.failures,
        "error": error_record(error, run.current, run.log) if error else None,
        # the lock file has the reference, which may be a relative path
        "model_folder": str(base.folder),
        "model_sha256": base.sha256,
        "machine": run.machine,
    }
    write_attempt(run.folder, facts)


def _publish_results(run: _Run) -> None:
    """Put this run's lock file, and what a user asks for first, in the place of an earlier run's: reports, files of tasks."""
    results: dict[Path, Path] = {}
    for artifact in run.artifacts:
        for path in sorted(artifact.folder.glob("report.*" if artifact.kind == "report" else f"{TASKS}/*")):
            results[run.folder / path.relative_to(artifact.folder)] = path
    for folder in {path.parent for path in results}:
        folder.mkdir(exist_ok=True)
    contents = {place: path.read_bytes() for place, path in results.items()}
    replace_files({**contents, run.folder / LOCK_FILE: _lock_file(run)})
    for earlier in [*run.folder.glob("report.*"), *run.folder.glob(f"{TASKS}/*")]:
        if earlier not in results:
            earlier.unlink()


def _lock_file(run: _Run) -> bytes:
    """pipeline.lock.yaml: the resolved config, and the fingerprint and sha256s of every artifact; failed checks, if any."""
    pipeline, entries = run.pipeline, {entry.id: entry for entry in run.entries}
    stages = [
        {
            "id": artifact.entry,
            "stage": artifact.stage,
            "config": without_id(entries[artifact.entry].config),
            "kind": artifact.kind,
            "artifact": artifact.id,
            "fingerprint": run.fingerprints[artifact.entry],
            "sha256": digest(artifact),
            "files": artifact.files,
        }
        for artifact in run.artifacts
    ]
    content = {
        "name": pipeline.name,
        "model": {"reference": run.ready.base.reference, "sha256": run.ready.base.sha256},
        **_nested({path: task.model_dump(mode="json") for path, task in pipeline.all_tasks.items()}),
        "data": {str(path): sha256 for path, sha256 in run.ready.data.items()},
        "seed": pipeline.seed,
        "threads": run.threads,
        "stages": stages,
        **({"failures": [dict(one) for one in run.failures]} if run.failures else {}),
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()
