"""One invocation of a run: its folders and options, what it has done so far, how it is stopped, and its process lock."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.account import Plan
from compressor.errors import CompressError, UserError
from compressor.run_store import STORE
from compressor.training.processes import launched, rank
from pipelines.engine.disk import disk_fault, shortened
from pipelines.engine.environment import machine
from pipelines.engine.preflight import OTHER_OUT, Ready
from pipelines.engine.stage import Artifact, Entry, Progress
from pipelines.engine.store import Locked, Store, canonical, lock, shared_lock, used_lock, write_atomic
from pipelines.engine.unchanged import Originals
from pipelines.file.config import Pipeline
from pipelines.terminal.progress import Display


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, the artifact of every stage by id, the ids that were reused, and the report if there is one.

    `failures` are failed checks that did not stop the run: {"stage", "code", "what", "fix"}; an optional stage whose check
    failed has no artifact. After a dry run `artifacts` holds what would be reused and `plan` the closed-form account (None
    when no stage changes it).
    """

    folder: Path
    artifacts: dict[str, Artifact]
    reused: tuple[str, ...]
    report: Path | None = None
    plan: Plan | None = None
    failures: tuple[dict[str, Any], ...] = ()


class Stopped(KeyboardInterrupt):
    """Raised on SIGINT or SIGTERM; `exit_code` is 130 or 143. Libraries clean up for it as for any KeyboardInterrupt.

    `reported` is set when the user has been informed.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.reported = False


@dataclass(frozen=True)
class StageWorkspace:
    """The runner's implementation of a stage's `Workspace`."""

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
class Run:
    """One invocation: its folders, its options and its state so far."""

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
    """Fingerprint of every stage with an artifact, by its id."""
    records: list[dict[str, Any]] = field(default_factory=list)
    proofs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Records of every stage's comparisons, by its id."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    uses: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Keeps the artifacts of this run from being replaced until it ends."""
    models_in_use: dict[Path, contextlib.ExitStack] = field(default_factory=dict)
    """Keep the artifacts of other runs that this one reads as its base or as another model, each by its folder."""
    current: str = ""
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.store, self.folder = Store(self.out / STORE), self.out / self.pipeline.name
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

    def release(self, folder: Path) -> None:
        """Let a model that this run reads be replaced: by this run itself, where one of its stages makes that artifact anew."""
        for known in [each for each in self.models_in_use if each.resolve() == folder.resolve()]:
            self.models_in_use.pop(known).close()

    @property
    def log(self) -> Path | None:
        """Log file of the current stage, or None."""
        path = self.folder / "logs" / f"{self.current}.log"
        return path if self.current and path.is_file() else None


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Convert SIGINT and SIGTERM to Stopped, in the main thread (the only one that receives signals). An ignored SIGINT stays
    ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def stop(number: int, _frame: object) -> None:
        came.append(number)
        for also in before if launched() > 1 else ():
            signal.signal(also, signal.SIG_IGN)  # torchrun forwards what the terminal sends to this process, too
        raise Stopped(number)

    # where it is ignored, another process stops this one
    heard = [signal.SIGTERM] if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if came and not isinstance(interrupt, Stopped):  # Ray's waiting functions raise a plain one in its place
            raise Stopped(came[0]) from interrupt
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def holding(run: Run) -> Iterator[None]:
    """Create the folders and hold the run's process lock. Raises UserError E801, E802."""
    try:
        for folder in (run.folder / "logs", run.store.root):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be created ({error.strerror})"
        raise disk_fault(error) or UserError("E801", what, OTHER_OUT, str(folder)) from None
    try:
        with lock(run.folder / "run.lock"), run.uses:
            _use_models(run)
            yield
    except Locked as holder:
        what = f"process {holder.pid} is running this pipeline here"
        raise UserError("E802", what, "Wait for it, or choose another --out", str(run.folder)) from None


def _use_models(run: Run) -> None:
    """Keep the base and the other models that lie in a store, made by other runs, from being replaced or removed."""
    for folder in {model.folder for model in (run.ready.base, *run.ready.models.values())}:
        if folder.parent.name == STORE:
            with contextlib.suppress(OSError, UserError):  # it is a store that this user cannot write, or without locks
                run.models_in_use[folder] = use = run.uses.enter_context(contextlib.ExitStack())
                use.enter_context(shared_lock(used_lock(folder.parent, folder.name)))


FAULT_WAIT = 3.0
"""Seconds to wait for the traceback of a process that failed while it helped to train."""


def write_fault(run: Run, error: BaseException) -> None:
    """Write the traceback of this process, which helped to train, for the first one to report."""
    path = run.folder / "logs" / f"process-{rank()}.log"
    text = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
    write_atomic(path, text)


def fault_of_helpers(run: Run, patience: float = FAULT_WAIT) -> CompressError | None:
    """The error of a process that failed while it helped to train; None where none is written within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (paths := _faults(run)):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    number, reason = paths[0].stem.rpartition("-")[2], paths[0].read_text().strip().rpartition("\n")[2]
    what = f"process {number} failed while training ({shortened(reason)})"
    return CompressError("E899", what, f"Its traceback is in {paths[0]}")


def clear_faults(run: Run) -> None:
    """Remove what `write_fault` wrote in an earlier attempt."""
    for path in _faults(run):
        path.unlink(missing_ok=True)


def _faults(run: Run) -> list[Path]:
    return sorted((run.folder / "logs").glob("process-*.log"))
