"""Whether timed processes had the cores that they asked for: the time for which their threads waited for one.

Other work on a machine lengthens times by factors, and two models not by the same. Linux counts what shows it
(Documentation/scheduler/sched-stats.rst, /proc/PID/task/TID/schedstat): how long each thread has run, and how long it was ready
to run and had no core.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUSY = 0.1
"""Share of the time waited from which a measurement is called disturbed. Seen: 0.06 at most where nothing else ran, 0.5 to 0.85
where one other process kept one of two cores busy, and passes on two threads took 1.7 to 1.9 times as long."""
LEAST = 50e6
"""Nanoseconds of waiting that count as none: threads wait a moment whenever they are woken, and tiny models run as briefly."""


@dataclass(frozen=True)
class CoreTime:
    """Nanoseconds, summed over a process's threads."""

    ran: int = 0
    waited: int = 0

    @classmethod
    def of(cls, pid: int) -> CoreTime:
        """Of a process so far; nothing where the system does not count it."""
        threads = []
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # the thread has ended meanwhile
                ran, waited, _ = map(int, path.read_text().split())
                threads.append((ran, waited))
        return cls(*map(sum, zip(*threads, strict=True))) if threads else cls()

    def waited_until(self, later: CoreTime) -> float:
        """Share of the time between two looks at a process, running or ready to run, in which it waited for a core."""
        ran, waited = later.ran - self.ran, later.waited - self.waited
        return waited / (ran + waited) if waited >= LEAST and ran >= 0 else 0.0


def waited_by_most(before: Sequence[CoreTime], after: Sequence[CoreTime]) -> float:
    """Share of the time that most of the processes waited for a core, of those that were timed in turns: the lower median.

    Other work meets all of them. One that waits alone has its own threads on one core: some schedulers leave them there where a
    pass takes a few milliseconds. Seen with ONNX Runtime's int8, on two cores with nothing else at work: 0.44, the others 0.
    """
    return statistics.median_low(start.waited_until(end) for start, end in zip(before, after, strict=True))


def disturbance(waited: float) -> str:
    """'', or for a share of `BUSY` or more what it says of a measurement."""
    if waited < BUSY:
        return ""
    return f"the measured processes waited for a core {waited:.0%} of their time: other work, or more threads than cores"
