"""How requests arrive: so many clients that each wait for their answer (closed loop), or at random times (open loop)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """One level of a load test: `concurrency` clients (closed loop), or `rate` requests a second (Poisson, open loop).

    It lasts `warmup` + `seconds`, of which the warm-up is not measured, or until `requests` were measured. A request that is
    not answered within `timeout` seconds is given up.
    """

    concurrency: int = 0
    rate: float = 0.0
    warmup: float = 2.0
    seconds: float = 10.0
    requests: int = 100_000
    timeout: float = 10.0
    seed: int = 0

    @property
    def title(self) -> str:
        """'4 clients' or '120 requests/s'."""
        if self.rate:
            return f"{self.rate:.4g} requests/s"
        return "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"

    def times(self) -> np.ndarray:
        """Seconds after the start at which the requests of an open loop are due, in order; () of a closed loop."""
        if not self.rate:
            return np.empty(0)
        times = poisson_times(self.rate, self.warmup + self.seconds, self.seed)
        return times[: np.searchsorted(times, self.warmup) + self.requests]


def poisson_times(rate: float, seconds: float, seed: int = 0) -> np.ndarray:
    """Arrivals of a Poisson process with `rate` a second in [0, `seconds`): gaps are independent and exponential."""
    generator = np.random.default_rng(seed)
    most = int(rate * seconds + 8 * np.sqrt(rate * seconds) + 16)
    times = np.cumsum(generator.exponential(1 / rate, most))
    return times[times < seconds]


def shares(total: int, parts: int) -> list[int]:
    """`total` split into `parts` whole numbers that differ by at most one."""
    return [total // parts + (part < total % parts) for part in range(parts)]
