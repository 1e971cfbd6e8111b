"""Trials in several processes of this machine: each worker is a new process that runs one trial after the other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from pipelines.sweeps.trial_events import Jobs, TrialEvent, Waiting
from pipelines.sweeps.trial_run import Perform, TrialConsole, TrialJob

GRACE = 20
"""Seconds that a stopped worker has to write its checkpoint before it is killed."""


@dataclass
class _Worker:
    """A process, our end of the pipe to it, and the trial that it runs."""

    number: int
    process: BaseProcess
    connection: Connection
    job: TrialJob | None = None

    @property
    def where(self) -> str:
        return f"worker {self.number}"


def in_processes(jobs: Jobs, perform: Perform, *, workers: int) -> Iterator[TrialEvent]:
    """The engine of several processes. A worker that dies is replaced, and its trial started once more.

    Workers are new processes, not forks: a fork of a process with threads of torch may hang.
    """
    waiting, pool = Waiting(jobs), []
    try:
        while True:
            yield from _hand_out(waiting, pool, perform, workers)
            busy = [worker for worker in pool if worker.job]
            if not busy:
                return
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection in ready:
                    yield from _hear(worker, waiting)
    finally:
        _stop(pool)


def _hand_out(waiting: Waiting, pool: list[_Worker], perform: Perform, workers: int) -> Iterator[TrialEvent]:
    """Give trials to idle workers, and to new ones, until there are `workers`."""
    while sum(worker.job is not None for worker in pool) < workers and (job := waiting.take()) is not None:
        worker = _idle(pool, perform)
        worker.job = job
        yield TrialEvent("started", job.name, worker.where)
        _give(worker)


def _idle(pool: list[_Worker], perform: Perform) -> _Worker:
    """A worker without a trial; a new one in the place of a dead one, or if all are busy."""
    for place, worker in enumerate(pool):
        if worker.job is None:
            if not worker.process.is_alive():
                pool[place] = _start(worker.number, perform)
            return pool[place]
    pool.append(_start(len(pool) + 1, perform))
    return pool[-1]


def _start(number: int, perform: Perform) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, perform), name=f"sweep-worker-{number}", daemon=False)
    resource_tracker.ensure_running()  # its own start would unblock signals again
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: it waits until `_work` ignores it
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()  # only the worker's end is left: its death ends our reading
    return _Worker(number, process, ours)


def _give(worker: _Worker) -> None:
    try:
        worker.connection.send(worker.job)
    except OSError:  # it died while idle: reading finds the same
        return


def _hear(worker: _Worker, waiting: Waiting) -> Iterator[TrialEvent]:
    """What a worker sent, or that it died."""
    job = worker.job
    try:
        message = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        worker.job = None
        yield waiting.lost(job, worker.where, _end(worker.process.exitcode or 0))
        return
    if isinstance(message, tuple):
        kind, text = message
        yield TrialEvent(kind, job.name, worker.where, text)
    else:
        worker.job = None
        yield TrialEvent("ended", job.name, worker.where, outcome=message)


def _end(exit_code: int) -> str:
    return f"was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _stop(pool: list[_Worker]) -> None:
    """End every worker: a busy one is asked to stop, as by Ctrl-C; an idle one ends when its pipe is closed. Killed, it would
    leave its semaphores, and Python warns of these."""
    for worker in pool:
        if worker.job:
            worker.process.terminate()
        else:
            worker.connection.close()
    for worker in pool:
        worker.process.join(GRACE)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()


def _work(connection: Connection, perform: Perform) -> None:
    """The worker: run what comes through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the sweep stops its workers itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    console = TrialConsole(lambda kind, text: connection.send((kind, text)))
    while True:
        try:
            job = connection.recv()
            connection.send(perform(job, console))
        except (EOFError, OSError):
            return
        except KeyboardInterrupt as stop:  # the run has written its state
            raise SystemExit(getattr(stop, "exit_code", 130)) from None


def _end_with_parent() -> None:
    """Kill this process when the sweep's is gone, however it ended: the same command must find the run folder free."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)
