"""What a server shows of itself during a load test: Triton's statistics, and memory and CPU time of its processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.loadtest.quantiles import slope

PAGE, CLOCK_TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
SAMPLE_SECONDS = 0.25
SETTLED = 0.25
"""Share of the samples of memory that are left out at the start, while buffers still grow."""

Counts = dict[str, int]


def added_up(versions: list[Mapping[str, Any]]) -> Counts:
    """The counters of all versions of a model as one flat dict; times in nanoseconds. gRPC leaves out zeros."""
    counts: Counts = {"rows": 0, "executions": 0}
    for version in versions:
        counts["rows"] += int(version.get("inference_count", 0))
        counts["executions"] += int(version.get("execution_count", 0))
        for name, part in version["inference_stats"].items():
            for key in ("count", "ns"):
                counts[f"{name}_{key}"] = counts.get(f"{name}_{key}", 0) + int(part.get(key, 0))
    return counts


def server_figures(before: Counts, after: Counts) -> dict[str, float | int | None]:
    """What the server did between two looks: requests, executions, rows of a mean batch, and mean milliseconds in the queue
    and in the model (inputs, inference and outputs).

    All are None where a counter is smaller than before: the server was restarted or its model replaced in between, so that what
    it counted before is lost; and where it gave no counters ({}) at one of them, because that was at work."""
    if not (before and after) or any(after.get(key, 0) < value for key, value in before.items()):
        return dict.fromkeys(("requests", "failed", "executions", "mean_batch", "queue_ms", "compute_ms"))
    change = {key: value - before.get(key, 0) for key, value in after.items()}
    done = change.get("success_count", 0)
    compute = sum(change.get(f"compute_{part}_ns", 0) for part in ("input", "infer", "output"))
    return {
        "requests": done,
        "failed": change.get("fail_count", 0),
        "executions": change["executions"],
        "mean_batch": change["rows"] / change["executions"] if change["executions"] else None,
        "queue_ms": change.get("queue_ns", 0) / done / 1e6 if done else None,
        "compute_ms": compute / done / 1e6 if done else None,
    }


class Processes:
    """The processes of a server as they are now: descendants of `pid` in sessions other than this process's own, because a
    server in this process has the clients as siblings."""

    def __init__(self, pid: int):
        parents = {int(path.name): ids for path in Path("/proc").glob("[0-9]*") if (ids := _parent_and_session(path))}
        own, below = os.getsid(0), {pid}
        while more := {child for child, (parent, _) in parents.items() if parent in below} - below:
            below |= more
        self.pids = sorted(child for child in below if child in parents and parents[child][1] != own)

    def memory(self) -> int:
        """Resident bytes of all; shared pages count in each."""
        return sum(int(fields[1]) * PAGE for fields in self._read("statm"))

    def cpu_seconds(self) -> float:
        """Processor time that all have used."""
        return sum(int(fields[13]) + int(fields[14]) for fields in self._read("stat")) / CLOCK_TICKS

    def _read(self, name: str) -> Iterator[list[str]]:
        for pid in self.pids:
            with contextlib.suppress(OSError):
                text = Path("/proc", str(pid), name).read_text()
                # a process's name, in brackets, may have spaces
                yield ["", "", *text.rpartition(")")[2].split()] if name == "stat" else text.split()


def _parent_and_session(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, IndexError):
        fields = (path / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), int(fields[3])
    return None


@dataclass
class Watch:
    """Samples the memory and the CPU time of a server's processes in a thread, from `start` on; a context."""

    processes: Processes | None
    times: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.processes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join()

    def _sample(self) -> None:
        ended = False
        while True:
            self.times.append(time.monotonic())
            self.memory.append(self.processes.memory())
            self.cpu.append(self.processes.cpu_seconds())
            if ended:  # the last sample is of the end: requests are counted up to there
                return
            ended = self._ended.wait(SAMPLE_SECONDS)

    def figures(self, requests: int) -> dict[str, float | None]:
        """Memory at the end and its slope, and the CPU time of a request; {} where the server is elsewhere."""
        if len(self.times) < 2:
            return {}
        first = int(len(self.times) * SETTLED)
        rise = slope(self.times[first:], self.memory[first:])
        used = self.cpu[-1] - self.cpu[0]
        return {
            "memory_mb": self.memory[-1] / 1e6,
            "memory_mb_a_minute": None if rise is None else rise * 60 / 1e6,
            "cores": used / (self.times[-1] - self.times[0]),
            "cpu_ms_a_request": used / requests * 1000 if requests else None,
        }
