"""One level of a load test, measured: what the clients saw, what the server says, and whether the clients were the limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.json_numbers import without_infinity
from serving.client import Client, Refusal
from serving.loadtest.answer_check import check_answers, first_answers, require_recorded
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.observed import Processes, Watch, added_up, server_figures
from serving.loadtest.quantiles import curve, latency_figures, tail
from serving.loadtest.request_pools import Endpoint
from serving.loadtest.senders import TIMED_OUT, Record
from serving.loadtest.traffic import Outputs
from serving.server_registry import server_pid

BUSY = 0.75
"""Share of a core from which on a client process may be the limit."""
LATE_SECONDS, LATE_SHARE = 0.001, 0.1
"""A client's loop that runs late by more, and by more than that share of the median latency, distorts what it measures."""
PASS_SECONDS = 30.0
STARTING = ("E712", "E713", "E747")
"""What a server is that is being started again: away, without the model, or refusing what it is asked."""


@dataclass(frozen=True)
class Target:
    """A served model under test: where its requests go, and the client that asks its server for statistics."""

    endpoint: Endpoint
    client: Client

    def statistics(self) -> dict[str, int]:
        """Triton's counters. Raises UserError E747 where the server does not give them, E712."""
        try:
            return added_up(self.client.statistics(self.endpoint.model))
        except Refusal as refusal:
            what = f"the server gives no statistics of '{self.endpoint.model}' ({refusal.reason})"
            raise UserError("E747", what, "Test a server whose statistics are open", str(self.client.address)) from refusal

    def statistics_if_any(self) -> dict[str, int]:
        """Triton's counters; {} while the server, or its model, is being started again. Raises UserError E729, E730."""
        try:
            return self.statistics()
        except UserError as error:
            if error.code not in STARTING:
                raise
            return {}

    def processes(self) -> Processes | None:
        """The server's processes, if `compress serve` or this process runs it on this machine."""
        pid = server_pid(self.client.address.host, self.client.address.port)
        return None if pid is None else Processes(pid)


@dataclass
class Measured:
    """The measured window of a level: one entry a request, times of the monotonic clock."""

    due: np.ndarray
    ended: np.ndarray
    errors: np.ndarray
    begin: float
    end: float
    answered: int
    """Answers that came within the window; of an open loop also those to requests that were due before it."""
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def latencies(self) -> np.ndarray:
        """Seconds from due to answered; a request without an answer in time counts with the time that was waited for it."""
        counted = (self.errors == "") | (self.errors == TIMED_OUT)
        return (self.ended - self.due)[counted]

    def in_time(self, deadline: float) -> int:
        """Answers within `deadline` seconds of when their request was due."""
        return int(((self.errors == "") & (self.ended - self.due <= deadline)).sum())


def window(records: Sequence[Record], load: Load, start: float) -> Measured:
    """The measured requests: of a closed loop those that ended in the window or were sent before its end and never answered, of
    an open loop those that were due in it.

    A window that its number of requests ended early is as long as it took: until the last of them was sent and answered.
    """
    due, ended = (np.concatenate([getattr(record, name) for record in records]) for name in ("due", "ended"))
    errors = np.array([error for record in records for error in record.errors], dtype=object)
    begin = start + load.warmup
    end = begin + load.seconds
    placed = due if load.rate else ended
    if (placed >= begin).sum() >= load.requests:
        end = min(end, _just_after(placed.max()))
    chosen = (placed >= begin) & (placed < end)
    if end < begin + load.seconds:
        end = max(end, _just_after(ended[chosen].max()))
    if not load.rate:  # a client that waits in vain sends no other request: its wait may end far behind the window
        chosen |= (errors == TIMED_OUT) & (due < end) & (ended >= end)
    kinds = Counter(error for error in errors[chosen] if error)
    answered = int(((errors == "") & (ended >= begin) & (ended < end)).sum())
    return Measured(due[chosen], ended[chosen], errors[chosen], begin, end, answered, kinds)


def _just_after(time: float) -> float:
    """The next number: a small sum would be lost in the clock of a machine that has been up for half a year."""
    return float(np.nextafter(time, np.inf))


def measure(fleet: Fleet, target: Target, load: Load, deadline: float | None, expected: Sequence[Outputs]) -> dict[str, Any]:
    """Run one level and return its figures. `deadline` is in seconds. Raises UserError E729, E730, E746."""
    processes = target.processes()

    def observe(start: float) -> tuple[dict[str, int], dict[str, int], Watch]:
        _sleep_until(start + load.warmup)
        before = target.statistics_if_any()
        with Watch(processes) as watch:
            fleet.wait(load.seconds)
        return before, target.statistics_if_any(), watch

    records, start, (before, after, watch) = fleet.run(target.endpoint, load, observe)
    measured = window(records, load, start)
    latencies = latency_figures(measured.latencies)
    server = server_figures(before, after)
    goodput = (
        {} if deadline is None else {"deadline_ms": deadline * 1000, "goodput": measured.in_time(deadline) / measured.seconds}
    )
    return {
        "load": load.title,
        "mode": "open" if load.rate else "closed",
        **({"rate": load.rate} if load.rate else {"concurrency": load.concurrency}),
        "seconds": measured.seconds,
        "requests": len(measured.due),
        "throughput": measured.answered / measured.seconds,
        **goodput,
        "errors": dict(measured.kinds.most_common()),
        "latency_ms": latencies,
        "curve": curve(measured.latencies),
        "server": {**server, **({} if server["requests"] is None else watch.figures(server["requests"]))},
        "client": client_figures(records, latencies["p50"]),
        "answers": without_infinity(asdict(check_answers(expected, records, fleet.traffic.bound))),
    }


def first_pass(fleet: Fleet, target: Target, timeout: float = Load.timeout) -> list[Outputs]:
    """The answer to each row that comes alone, within `timeout` seconds, for PASS_SECONDS; from then on the fleet sends only
    the rows that had their turn. Recorded answers, which they must equal, take their place. Raises UserError E748, CheckError
    E750."""
    load = Load(concurrency=1, warmup=0, seconds=PASS_SECONDS, timeout=timeout)
    expected = first_answers(fleet.once(target.endpoint, load), fleet.traffic)
    fleet.count = len(expected)
    recorded = fleet.traffic.recorded[: len(expected)]
    require_recorded(recorded, expected, fleet.traffic.alone)
    return [*recorded, *expected[len(recorded) :]]


def client_figures(records: Sequence[Record], p50: float | None) -> dict[str, Any]:
    """How busy the client processes were, how late they ran (99 % of the time less), and by which of these two the clients
    themselves limit or distort what was measured, '' for neither."""
    busy = [record.busy for record in records]
    late = [tail(np.sort(record.late)) for record in records]
    distorted = max(late) > max(LATE_SECONDS, LATE_SHARE * (p50 or 0.0) / 1000)
    limit = "busy" if max(busy) > BUSY else "late" if distorted else ""
    return {"processes": len(records), "cores": sum(busy), "late_ms": max(late) * 1000, "limit": limit}


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0))
