"""What is measured of one setting: the most answers a second whose p99 latency keeps a limit, over rounds that are repeated."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.loadtest.quantiles import tail
from serving.loadtest.tune.setting_grid import Setting

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of clients that are tried."""
SATURATED, MOST_FLAT = 1.02, 2
"""More clients are tried until the throughput did not rise by this factor so many times: once may be noise."""


@dataclass(frozen=True)
class Probe:
    """One short closed loop: answers a second, the latencies in seconds, and whether every answer was right."""

    throughput: float
    latencies: np.ndarray
    right: bool = True


Measure = Callable[[Setting, int], Probe]
"""(setting, number of clients) -> what was measured."""


@dataclass
class Trial:
    """A setting and its probes by number of clients. `score` is what the search compares."""

    setting: Setting
    limit: float
    start: int = 4
    probes: dict[int, list[Probe]] = field(default_factory=dict)

    def repeat(self, measure: Measure) -> None:
        """One more round: at first up (or down) the ladder from `start`, later at the best number of clients and its
        neighbours, so that noise in one probe cannot decide."""
        if not self.probes:
            self._climb(measure)
            return
        at = LADDER.index(self.clients or min(self.probes))
        for clients in LADDER[max(at - 1, 0) : at + 2]:
            self._probe(measure, clients)

    def _climb(self, measure: Measure) -> None:
        at = max(place for place, clients in enumerate(LADDER) if clients <= self.start)
        best = self._probe(measure, LADDER[at])
        if not self.kept(LADDER[at]):
            while at > 0 and not self.kept(LADDER[at]):
                at -= 1
                self._probe(measure, LADDER[at])
            return
        flat = 0
        while at + 1 < len(LADDER) and flat < MOST_FLAT:
            at += 1
            throughput = self._probe(measure, LADDER[at])
            if not self.kept(LADDER[at]):
                return
            flat = 0 if throughput >= SATURATED * best else flat + 1
            best = max(best, throughput)

    def _probe(self, measure: Measure, clients: int) -> float:
        probe = measure(self.setting, clients)
        self.probes.setdefault(clients, []).append(probe)
        return probe.throughput

    def p99(self, clients: int) -> float:
        """Median over the rounds with so many clients, in seconds (of two the lower: one pause of the machine must not
        decide); of a round with few requests the maximum."""
        return statistics.median_low([tail(np.sort(probe.latencies)) or float("inf") for probe in self.probes[clients]])

    def kept(self, clients: int) -> bool:
        """Whether the latency limit was kept with so many clients, and every answer was right."""
        return all(probe.right for probe in self.probes[clients]) and self.p99(clients) <= self.limit

    def throughput(self, clients: int) -> float:
        """Median over the rounds."""
        return statistics.median(probe.throughput for probe in self.probes[clients])

    @property
    def clients(self) -> int | None:
        """The number of clients with the most answers a second within the limit; None if none keeps it."""
        return max((clients for clients in self.probes if self.kept(clients)), key=self.throughput, default=None)

    @property
    def score(self) -> float:
        """Answers a second with that number of clients; 0 if the limit is not kept."""
        return 0.0 if self.clients is None else self.throughput(self.clients)

    @property
    def spread(self) -> float | None:
        """Relative distance of the largest from the smallest round at that number of clients; None of a single round."""
        rounds = [probe.throughput for probe in self.probes.get(self.clients or 0, ())]
        return (max(rounds) - min(rounds)) / statistics.median(rounds) if len(rounds) > 1 else None

    def figures(self) -> dict[str, Any]:
        """What the evidence says of this setting."""
        best = self.clients or min(self.probes, key=self.p99)
        return {
            "instances": self.setting.instances,
            "threads": self.setting.threads,
            "max_queue_delay_us": self.setting.delay_us,
            "max_batch_tokens": self.setting.batch_tokens,
            "answers_a_second": self.score,
            "clients": best,
            "p99_ms": self.p99(best) * 1000,
            "spread": self.spread,
            "rounds": {str(clients): [probe.throughput for probe in probes] for clients, probes in sorted(self.probes.items())},
        }
