"""The client processes of a load test."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from compressor.errors import UserError
from serving.loadtest.arrivals import Load, shares
from serving.loadtest.request_pools import Endpoint
from serving.loadtest.senders import Job, Record, send
from serving.loadtest.traffic import Row, Traffic

START_SECONDS = 0.2
"""Seconds until all processes have their job."""
START_LIMIT = 60.0
SLACK = 30.0
END_SECONDS = 5.0

T = TypeVar("T")

_rows: list[Row] = []
"""The rows of a client process."""


class Fleet:
    """`clients` processes that send the first `count` rows of `traffic`; a context. Each needs half a second to start."""

    def __init__(self, traffic: Traffic, clients: int = 1):
        self.traffic, self.clients, self.count = traffic, clients, len(traffic)
        # a fork of a process with threads may deadlock
        self._pool = multiprocessing.get_context("spawn").Pool(clients, _set_up, (traffic.rows,))

    def __enter__(self) -> Fleet:
        try:
            self._get(self._pool.map_async(_ready, range(self.clients), chunksize=1), START_LIMIT)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """End the processes; what has not ended after END_SECONDS is killed."""
        # a pool waits without a limit for the lock of its queue, which a process that was killed or hangs may hold
        ending = threading.Thread(target=self._pool.terminate, daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        for process in self._pool._pool if ending.is_alive() else ():
            process.kill()

    def run(self, endpoint: Endpoint, load: Load, observe: Callable[[float], T]) -> tuple[list[Record], float, T]:
        """Send a load; the records of all processes, the start's time of the monotonic clock, and what `observe`, which is
        called with that, returned. Raises UserError E746 when a process ends or hangs."""
        times, start = load.times(), time.monotonic() + START_SECONDS
        counts = [shares(total, self.clients) for total in (load.concurrency, load.requests)]
        jobs = [
            Job(
                endpoint,
                replace(load, concurrency=concurrency, requests=requests),
                self.count,
                start,
                times[number :: self.clients],
                seed=load.seed * 1000 + number,
            )
            for number, (concurrency, requests) in enumerate(zip(*counts, strict=True))
        ]
        self._running = self._pool.map_async(_send, jobs, chunksize=1)
        seen = observe(start)
        return self._get(self._running, load.warmup + load.seconds + load.timeout + SLACK), start, seen

    def wait(self, seconds: float) -> None:
        """Wait for the load that is being sent, for at most so long."""
        self._running.wait(seconds)

    def once(self, endpoint: Endpoint, load: Load) -> Record:
        """Send each row once, in order, one at a time, for at most the time of `load`."""
        job = Job(endpoint, load, self.count, time.monotonic(), once=True)
        # with a chunk size of its own: the pool would divide by the number of its processes, which may all have ended
        return self._get(self._pool.map_async(_send, [job], chunksize=1), load.warmup + load.seconds + load.timeout + SLACK)[0]

    def _get(self, result: Any, seconds: float) -> Any:
        try:
            return result.get(seconds)
        except multiprocessing.TimeoutError as error:
            what = f"a client process of the load test ended or hangs (no result in {seconds:.0f} s)"
            raise UserError("E746", what, "Free memory, or send fewer requests") from error


def _set_up(rows: list[Row]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle, which ends its processes
    _rows[:] = rows


def _ready(_number: int) -> None:
    time.sleep(0.05)  # so that each process takes one


def _send(job: Job) -> Record:
    return send(_rows, job)
