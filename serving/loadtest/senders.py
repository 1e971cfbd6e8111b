"""One process of a load test: sends its part of a load and notes when each request was due, was sent and was answered."""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.loadtest.arrivals import Load
from serving.loadtest.request_pools import Answer, Endpoint, Pool, connect
from serving.loadtest.traffic import Row

TICK = 0.02
"""Seconds between two looks at how late the process's own event loop runs."""
MOST_IN_FLIGHT = 800
"""Requests in flight of one process; further ones wait here, and that wait counts in their latency."""
MOST_ANSWER_BYTES = 64 * 1024**2
TIMED_OUT = "no answer in time"


@dataclass(frozen=True)
class Job:
    """What one process does, with the first `rows` rows. `start` is a time of the monotonic clock; an open loop sends at
    start + `times`. With `once` every row is sent once, in order, by one client."""

    endpoint: Endpoint
    load: Load
    rows: int
    start: float
    times: np.ndarray = field(default_factory=lambda: np.empty(0))
    once: bool = False
    seed: int = 0


@dataclass
class Record:
    """What a process noted, one entry a request; times are of the monotonic clock. `errors` are kinds, '' for an answer, and
    `reason` is the first of them in full.

    `answers` counts the different bodies by (row, length of the JSON part, body). `busy` is the share of one core that the
    process used while it measured, `late` by how many seconds its event loop ran late, now and then.
    """

    due: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reason: str = ""
    answers: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    kept_bytes: int = 0
    unchecked: int = 0
    busy: float = 0.0
    late: list[float] = field(default_factory=list)

    def add(self, row: int, due: float, sent: float, answer: Answer) -> None:
        self.due.append(due)
        self.sent.append(sent)
        self.ended.append(time.monotonic())
        self.errors.append(answer.error)
        self.reason = self.reason or answer.reason or answer.error
        if not answer.error:
            self._keep((row, answer.header, answer.body))

    def _keep(self, key: tuple[int, int, bytes]) -> None:
        if key not in self.answers:
            if self.kept_bytes > MOST_ANSWER_BYTES:
                self.unchecked += 1
                return
            self.kept_bytes += len(key[2])
        self.answers[key] = self.answers.get(key, 0) + 1


def send(rows: Sequence[Row], job: Job) -> Record:
    """Send a job's requests and wait for their answers."""
    # select's timeouts are exact to the microsecond; epoll's are rounded up to a millisecond, which would delay open loops
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    gc.collect()
    gc.freeze()  # a collection would stop all clients
    gc.disable()
    try:
        return loop.run_until_complete(_send(rows, job))
    finally:
        loop.close()
        gc.enable()
        gc.unfreeze()


async def _send(rows: Sequence[Row], job: Job) -> Record:
    record, connections = Record(), connect(job.endpoint, rows[: job.rows])
    watch = asyncio.create_task(_watch(record, job))
    sender = _Sender(connections, record, job)
    try:
        await asyncio.sleep(max(job.start - time.monotonic(), 0))
        if job.once:
            await sender.once()
        elif job.load.rate:
            await sender.open_loop()
        else:
            await sender.closed_loop()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        connections.close()
    return record


def shuffled(rows: int, seed: int) -> Iterator[int]:
    """Indices of rows for ever, in a new random order each time."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(rows).tolist()


class _Sender:
    def __init__(self, connections: Pool, record: Record, job: Job):
        self.connections, self.record, self.job, self.load = connections, record, job, job.load
        self.measured = job.start + job.load.warmup
        self.end = self.measured + job.load.seconds
        self.order = shuffled(job.rows, job.seed)
        self.left = job.load.requests

    async def closed_loop(self) -> None:
        """Each client sends its next request when the last is answered."""
        await asyncio.gather(*(self._client() for _ in range(self.load.concurrency)))

    async def _client(self) -> None:
        while (now := time.monotonic()) < self.end and self.left > 0:
            self.left -= now >= self.measured
            await self._request(next(self.order), now)
            if self.record.errors[-1]:  # a connection that is refused at once never waits, and would starve the other clients
                await asyncio.sleep(0)

    async def open_loop(self) -> None:
        """Send at the given times, whatever is not answered yet; latency counts from the time at which a request was due."""
        free, tasks = asyncio.Semaphore(MOST_IN_FLIGHT), set()
        for due in (self.job.start + self.job.times).tolist():
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await free.acquire()
            task = asyncio.create_task(self._request(next(self.order), due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: free.release())
        await asyncio.gather(*tasks)

    async def once(self) -> None:
        for row in range(self.job.rows):
            if (now := time.monotonic()) > self.end:
                return
            await self._request(row, now)

    async def _request(self, row: int, due: float) -> None:
        sent = time.monotonic()
        try:
            async with asyncio.timeout(max(due + self.load.timeout - sent, 0)):
                answer = await self.connections.ask(row)
        except TimeoutError:
            answer = Answer(error=TIMED_OUT)
        self.record.add(row, due, sent, answer)


async def _watch(record: Record, job: Job) -> None:
    """Note how late the loop runs, and the share of a core that the process used, once measuring has begun."""
    await asyncio.sleep(max(job.start + job.load.warmup - time.monotonic(), 0))
    wall, used = time.monotonic(), time.process_time()
    end = job.start + job.load.warmup + job.load.seconds
    while (before := time.monotonic()) < end:
        await asyncio.sleep(TICK)
        now = time.monotonic()
        record.late.append(now - before - TICK)
        record.busy = (time.process_time() - used) / (now - wall)
