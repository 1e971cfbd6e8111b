"""Toy pipelines in processes of their own, to be stopped and killed.

They are forked from a server that has imported and no more: a fork of the test process itself, in which torch and ONNX Runtime
have threads and half-collected objects, may crash for reasons that are not ours.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.engine.invocation import Stopped
from tests.pipelines import toys

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "pytest", "tests.pipelines.toys", "tests.pipelines.sweep_parts"])


def start(said: Path, work: Callable, *given, **named) -> multiprocessing.Process:
    """`work(*given, **named)` with the toy stages, what it says in the file `said`. Its exit code is that of Stopped, or 0."""
    process = FORKS.Process(target=_run, args=(said, work, given, named))
    process.start()
    return process


def _run(said: Path, work: Callable, given: tuple, named: dict) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    toys.install(pytest.MonkeyPatch())
    try:
        work(*given, **named)
    except Stopped as stop:
        os._exit(stop.exit_code)


def wait(process: multiprocessing.Process) -> int:
    """The exit code, negative after a signal."""
    process.join()
    return process.exitcode


def until(path: Path, process: multiprocessing.Process, says: str = "") -> None:
    """Return when `process` has made the file `path`, and written `says` in it."""
    deadline = time.monotonic() + 60
    while not path.exists() or says not in path.read_text():
        assert process.is_alive() and time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
