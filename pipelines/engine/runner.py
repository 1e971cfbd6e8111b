"""Running a pipeline: artifacts in the store are reused, missing ones are made, and only complete ones are published."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from compressor.errors import CheckError, CompressError, UserError
from compressor.memory_faults import memory_fault
from compressor.processor import default_threads, release_memory, resident_memory
from compressor.training.processes import agreed, launched, lost
from pipelines.check.estimate import shortages_of_run
from pipelines.engine.attempt import CHECKS_FAILED, DONE, FAILED, RUNNING, STOPPED
from pipelines.engine.disk import disk_fault, nothing_left, shortened
from pipelines.engine.invocation import (
    Run,
    RunResult,
    StageWorkspace,
    Stopped,
    clear_faults,
    fault_of_helpers,
    holding,
    stopping,
)
from pipelines.engine.preflight import check_environment, check_folder, check_inputs, make_plans
from pipelines.engine.results import REPORTS, publish_results, write_account
from pipelines.engine.stage import Artifact, Stage
from pipelines.engine.stage_inputs import fingerprint_of, inputs_of
from pipelines.engine.store import canonical
from pipelines.file.config import Pipeline, with_place
from pipelines.reporting.format import human_seconds
from pipelines.terminal.capture import captured, real_stdout
from pipelines.terminal.last_resort import coded
from pipelines.terminal.plain_console import PlainConsole, can_move
from pipelines.terminal.progress import Display

IN_USE = "waiting for another run, which uses the artifact that this one replaces"


def run_pipeline(
    pipeline: Pipeline,
    out: Path,
    from_: str | None = None,
    until: str | None = None,
    force: Sequence[str] = (),
    dry_run: bool = False,
    console: Console | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Run the stages of a pipeline in order; the result lies in `out`/NAME and the artifacts in `out`/.store.

    `from_` and every later stage run again, `until` is the last stage, and each of `force` runs again. Nothing is written
    before the model, the data, the options and the folder are validated. The lock file and the report of the last finished run
    are kept until this one has finished; run.json records its progress and its end. `warn` is called before, with a line for
    memory and for disk where the models alone need more than is free.

    Raises UserError E111 (unknown stage id), E2xx, E3xx, E5xx (inputs), E801 (folder), E802 (run in use), E803 (damaged
    artifact), E804 (disk full), E807 (an input changed meanwhile), E901 (package missing); whatever the stages raise;
    CompressError E899 when a stage fails unexpectedly; Stopped on SIGINT and SIGTERM. Failed checks that did not stop the run
    are `failures` of the result.
    """
    run = prepare(pipeline, out, from_, until, force)
    ahead = _look_ahead(run, damaged_is_missing=not dry_run)
    if not dry_run:
        check_environment(run.entries[len(ahead) :])
        check_folder(run.out, pipeline.name, [f"{entry.id}.log" for entry in run.entries])
    # last: the plan needs an import of torch, which takes seconds, and which a fully reused run avoids
    plans = make_plans(run.ready) if dry_run or len(ahead) < len(run.entries) else []
    short = shortages_of_run(run.entries, plans, len(ahead), run.out) if plans and len(ahead) < len(run.entries) else []
    if dry_run:
        for line in short:
            warn(line)
        reused, plan = {artifact.entry: artifact for artifact in ahead}, plans[run.stop_after] if plans else None
        return RunResult(run.folder, reused, tuple(reused), plan=plan)
    try:
        with stopping(), holding(run):
            for line in short:
                warn(line)
            return _execute(run, ahead, console or _console())
    except Exception as error:
        fault = coded(error, "the run", [run.folder / "logs"], run.out)
        if fault is error:
            raise
        raise fault from error


def prepare(
    pipeline: Pipeline, out: Path, from_: str | None = None, until: str | None = None, force: Sequence[str] = ()
) -> Run:
    """Check the inputs and the options of an invocation; nothing is written."""
    last = len(pipeline.stages) - 1 if until is None else pipeline.number(until, "--until")
    first = len(pipeline.stages) if from_ is None else pipeline.number(from_, "--from")
    if from_ is not None and first > last:
        raise UserError("E111", f"--from {from_} comes after --until {until}", "Swap them, or drop one")
    forced = {pipeline.number(entry, "--force"): entry for entry in force}
    if forced and max(forced) > last:
        what = f"--force {forced[max(forced)]} comes after --until {until}"
        raise UserError("E111", what, "Name a later --until, or drop one")
    again = {*forced, *range(first, len(pipeline.stages))}
    return Run(check_inputs(pipeline), out.absolute(), pipeline.threads or default_threads(), frozenset(again), last)


def _look_ahead(run: Run, *, damaged_is_missing: bool) -> list[Artifact]:
    """The artifacts at the start of the pipeline that will be reused, up to the first stage that must run.

    A damaged artifact may count as missing: the run itself then reports it, and records that it failed. Failed checks of those
    artifacts are in the fingerprint of a report behind them, and no longer in `run` afterwards.
    """
    reusable: list[Artifact] = []
    for number, entry in enumerate(run.entries):
        if number in run.again:
            break
        try:
            artifact = run.store.find(entry.name, fingerprint_of(run, number, reusable), entry.id)
        except UserError:
            if damaged_is_missing:
                break
            raise
        if artifact is None:
            break
        reusable.append(artifact)
        run.failures += failures_of(artifact)
    run.failures.clear()
    return reusable


def failures_of(artifact: Artifact) -> list[dict[str, Any]]:
    """The failed checks that an artifact records, as a run does."""
    return [_failure(artifact.entry, failure) for failure in artifact.metadata.get("failures", ())]


def _failure(entry_id: str, failure: dict[str, Any]) -> dict[str, Any]:
    return {"stage": entry_id, **{key: str(failure[key]) for key in ("code", "what", "fix")}}


class _RunConsole(PlainConsole):
    def on_broken_pipe(self) -> None:
        """Nobody reads any more, as behind `| head`: the run goes on, and its run.json tells how it ended."""
        self.quiet = True


def _console() -> Console:
    stream = real_stdout()
    return _RunConsole(file=stream, width=None if stream.isatty() else 120, force_terminal=can_move(stream))


def _execute(run: Run, ahead: Sequence[Artifact], console: Console) -> RunResult:
    """Run every stage in order, the first with the artifacts `ahead`; run.json is written however the run ends."""
    display = Display(console, len(run.entries), max(len(entry.id) for entry in run.entries))
    try:
        clear_faults(run)
        write_account(run, RUNNING)
        for line in run.ready.skipped:
            display.say(line)
        _spare_unfinished(run, ahead)
        run.store.sweep()
        for number, entry in enumerate(run.entries):
            run.current = entry.id
            # before it, too: a process that is killed in it writes nothing
            write_account(run, RUNNING)
            with display.stage(number + 1, entry.id):
                _attempt(run, number, display)
            write_account(run, RUNNING)
        run.current = ""
        publish_results(run)
        write_account(run, CHECKS_FAILED if run.failures else DONE)
    except Exception as error:
        fault = coded(error, "the run", [run.folder / "logs"], run.out)
        with contextlib.suppress(OSError):  # do not hide the original error
            write_account(run, FAILED, fault)
        if fault is error:
            raise
        raise fault from error
    except BaseException as stop:
        # where another process has failed, torchrun ends this one
        if launched() > 1 and (fault := fault_of_helpers(run, patience=0.0)):
            with contextlib.suppress(OSError):
                write_account(run, FAILED, fault)
            raise fault from stop
        with contextlib.suppress(OSError):
            write_account(run, STOPPED)
        if isinstance(stop, Stopped):
            done = f"{len(run.artifacts)} of {len(run.entries)} stages are finished and kept"
            display.say(f"Stopped by {stop}: {done}. The same command continues.")
            stop.reported = True
        raise
    reused = tuple(record["id"] for record in run.records if record["reused"])
    report = next((path for name in REPORTS if (path := run.folder / name).is_file()), None)
    artifacts = {artifact.entry: artifact for artifact in run.artifacts}
    return RunResult(run.folder, artifacts, reused, report, failures=tuple(run.failures))


def _spare_unfinished(run: Run, ahead: Sequence[Artifact]) -> None:
    """Count what the first stage that must run left unfinished as of now: it goes on from that, however old it is."""
    number = len(ahead)
    if number < len(run.entries):
        unfinished = run.store.unfinished(run.entries[number].name, fingerprint_of(run, number, ahead))
        with contextlib.suppress(OSError):  # there is none, or it is another user's
            os.utime(unfinished)


def _attempt(run: Run, number: int, display: Display) -> None:
    """Run one stage. A check that fails ends the run, unless the stage is optional."""
    entry = run.entries[number]
    try:
        _advance(run, number, display)
    except CheckError as error:
        if not entry.row.optional:
            raise
        _note_failure(run, _failure(entry.id, vars(error)), display)


def _note_failure(run: Run, failure: dict[str, Any], display: Display) -> None:
    """Record and print a failed check that does not end the run."""
    run.failures.append(failure)
    display.result("FAILED {code} {what}. {fix}".format(**failure).replace("\n", " "))


def _advance(run: Run, number: int, display: Display) -> None:
    """Reuse or make the artifact of one stage, and record which."""
    entry, mark = run.entries[number], fingerprint_of(run, number, run.artifacts)
    # of two stages that do the same the second uses what the first has just made
    stage, clock, forced = entry.row, time.monotonic(), number in run.again and mark not in run.fingerprints.values()
    with contextlib.ExitStack() as use:
        use.enter_context(run.store.in_use(entry.name, mark))
        artifact = _reusable(run, number, mark, forced)
        if reused := artifact is not None:
            run.uses.enter_context(use.pop_all())
    if not reused:
        # it is not in use here while this waits for its turn: who has it may be waiting until nobody uses what was there
        with run.store.making(entry.name, mark, lambda pid: display.result(f"waiting for process {pid}")) as work:
            reused = _reusable(run, number, mark, forced) is not None  # another run created it while we waited
            if not reused:
                unfinished = run.store.unfinished(entry.name, mark)
                run.originals.before()
                held = resident_memory()
                metadata = _perform(run, number, stage, work, unfinished, display)
                release_memory(held)
                run.originals.require()
                run.release(run.store.folder(entry.name, mark))
                run.store.publish(work, entry.name, mark, stage.produces, metadata, lambda _: display.result(IN_USE))
            run.uses.enter_context(run.store.in_use(entry.name, mark))
        artifact = run.store.find(entry.name, mark, entry.id)
    seconds = time.monotonic() - clock
    run.artifacts.append(artifact)
    run.fingerprints[entry.id] = mark
    if isinstance(recorded := artifact.metadata.get("parity"), list):
        run.proofs[entry.id] = recorded
    record = {"id": entry.id, "stage": entry.name, "artifact": artifact.id, "reused": reused, "seconds": seconds}
    run.records.append(record)
    display.result("reused" if reused else f"done in {human_seconds(seconds)}")
    for failure in failures_of(artifact):
        _note_failure(run, failure, display)


def _reusable(run: Run, number: int, mark: str, forced: bool) -> Artifact | None:
    """The stage's artifact from the store, verified by its sha256s; None when it is missing, or `forced` to be made again."""
    entry = run.entries[number]
    artifact = None if forced else run.store.find(entry.name, mark, entry.id)
    if artifact is not None:
        run.store.verify(artifact)
    return artifact


def _perform(run: Run, number: int, stage: Stage, work: Path, unfinished: Path, display: Display) -> dict[str, Any]:
    """Call the stage's `run` with its output in its log. Raises its CompressErrors with a location, E804, E908, or E899."""
    entry, logs = run.entries[number], run.folder / "logs"
    log_path = logs / f"{entry.id}.log"
    log, cache, again = logging.getLogger(f"compress.{entry.id}"), run.store.cache, number in run.again
    proofs = run.proofs.setdefault(entry.id, [])
    workspace = StageWorkspace(work, logs, unfinished, cache, again, log, display, proofs)
    with captured(log_path):
        try:
            settle(stage, run.pipeline.seed, run.threads)
            if stage.trains and launched() > 1:
                _call_helpers(run, number)
            metadata = stage.perform(entry.config, inputs_of(run, number, run.artifacts), workspace)
            return json.loads(canonical(metadata))
        except Exception as error:
            with contextlib.suppress(OSError):
                log.error("%s", error) if isinstance(error, CompressError) else traceback.print_exc()
            fault = _stage_fault(run, number, error, log_path)
            if fault is error:
                raise
            raise fault from error


def _call_helpers(run: Run, number: int) -> None:
    """Tell the other processes to take part in a stage: they read the same artifacts."""
    made = [[artifact.stage, run.fingerprints[artifact.entry], artifact.entry] for artifact in run.artifacts]
    mark = fingerprint_of(run, number, run.artifacts)
    agreed(lambda: {"number": number, "fingerprint": mark, "artifacts": made, "failures": run.failures})


def _stage_fault(run: Run, number: int, error: Exception, log_path: Path) -> CompressError:
    """Convert the exception that ended a stage to an error with a code and, for a mistake of the user, a location."""
    if lost(error) and (fault := fault_of_helpers(run)):
        return fault
    if fault := disk_fault(error, run.out):
        return fault
    if used_up := memory_fault(error):
        return with_place(used_up, run.pipeline.where(number))
    if isinstance(error, UserError):
        return with_place(error, run.pipeline.where(number))
    if full := nothing_left(run.out):
        return full
    if isinstance(error, CompressError):
        return error
    what = f"stage '{run.entries[number].id}' failed unexpectedly ({shortened(f'{type(error).__name__}: {error}')})"
    return CompressError("E899", what, f"This is a bug; its traceback is in {log_path}")


def settle(stage: Stage, seed: int, threads: int) -> None:
    """Set random state and thread count for a stage, so that earlier stages in this process have no effect on it."""
    random.seed(seed)
    if "torch" in stage.packages:
        import torch  # here: a run that reuses everything performs no stage

        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
