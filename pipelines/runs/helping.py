"""Processes of torchrun: the first runs the pipeline, the others take part in the stages that train."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compressor.training.processes import agreed, joined, launched, lost
from pipelines.engine.invocation import Run, StageWorkspace, write_fault
from pipelines.engine.runner import prepare, settle
from pipelines.engine.stage_inputs import inputs_of
from pipelines.file.config import Pipeline
from pipelines.terminal.plain_console import PlainConsole
from pipelines.terminal.progress import Display


@contextlib.contextmanager
def helped() -> Iterator[None]:
    """Context of the first process, in which the others help it to train. When it raises, torchrun ends them."""
    with joined():
        yield
        if launched() > 1:
            agreed(lambda: None)


def help_to_train(load: Callable[[], Pipeline], out: Path) -> None:
    """Take part in the stages that the first process announces, until it has finished.

    It prints nothing and publishes nothing. A failure is written for the first process, which reports it.
    """
    run: Run | None = None
    try:
        with joined():
            while (job := agreed(lambda: None)) is not None:
                run = run or prepare(load(), out)
                _take_part(run, job)
    except Exception as error:
        if run is not None and not lost(error):
            with contextlib.suppress(OSError):
                write_fault(run, error)
        raise


def _take_part(run: Run, job: dict[str, Any]) -> None:
    """Train in one stage with the artifacts and the work folder of the first process."""
    number = job["number"]
    entry = run.entries[number]
    run.artifacts[:] = [run.store.find(*made) for made in job["artifacts"]]
    run.failures[:] = job["failures"]
    run.originals.before()
    unfinished = run.store.unfinished(entry.name, job["fingerprint"])
    log, nowhere = logging.getLogger(f"compress.{entry.id}"), Path(os.devnull)  # a file in it would be an error
    with nowhere.open("w") as stream:
        display = Display(PlainConsole(file=stream), len(run.entries), 0)
        workspace = StageWorkspace(nowhere, nowhere, unfinished, run.store.cache, False, log, display, [])
        settle(entry.row, run.pipeline.seed, run.threads)
        entry.row.perform(entry.config, inputs_of(run, number, run.artifacts), workspace)
