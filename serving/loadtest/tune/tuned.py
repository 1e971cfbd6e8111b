"""Tuning from start to end: the search, the same load at random times for what was chosen, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressor.control_groups import cores as served_cores
from compressor.errors import CheckError
from compressor.processor import physical_cores
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import measure
from serving.loadtest.tune.bench import Bench
from serving.loadtest.tune.coarse_to_fine import Search
from serving.loadtest.tune.setting_grid import fitting, grid_of, setting_of
from serving.loadtest.tune.trials import Trial

ARRIVALS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Rates at which the chosen setting is tried with random arrivals, as shares of its closed loop's throughput."""
ARRIVAL_SECONDS, MOST_SECONDS = 4.0, 60.0
"""How long each of them is tried at least, and at most."""
SHOW_A_PERCENT = 300
"""Requests that show that 99 % of all are in time: if all of so many are, a share of less has 5 % (.99 ^ 300)."""


def tune(
    model_folder: Path,
    fleet: Fleet,
    folder: Path,
    p99_ms: float,
    *,
    protocol: str = "http",
    seconds: float = 1.5,
    cores: int | None = None,
    exhaustive_rounds: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, dict[str, Any]]:
    """The chosen config.pbtxt of a model, and the evidence for it. `folder` is a scratch folder; `cores` defaults to those of
    this process. With `exhaustive_rounds` the whole grid is measured instead of the search.

    Raises CheckError E753 when no setting keeps the limit, UserError E752 (memory), E739 (/dev/shm) and
    those of the server and the clients.
    """
    # what is served now shares every core that there is, and a core with two threads counts as two
    shared, cores = cores or served_cores(), cores or physical_cores()
    bench = Bench(model_folder, fleet, folder, protocol=protocol, seconds=seconds, say=say)
    present = setting_of(bench.config, bench.runtime, shared)
    wanted, most = grid_of(bench.config, present, cores, p99_ms), bench.most_instances()
    grid = fitting(wanted, present, most)
    search = Search(grid, p99_ms / 1000, bench.evaluate, start=2 * cores, present=present)
    lacking = f", without those of more than {most} instances: no memory, or no space in /dev/shm (Docker: --shm-size)"
    say(f"{len(grid.settings())} settings on {cores} cores{lacking if grid != wanted else ''}")
    chosen = search.exhaust(exhaustive_rounds) if exhaustive_rounds else search.run()
    if not chosen.score:
        nearest = f"{chosen.setting.title} with {chosen.figures()['p99_ms']:.3g} ms"
        what = f"no setting keeps a p99 latency of {p99_ms:g} ms; the nearest is {nearest}"
        raise CheckError("E753", what, "Raise --p99-ms, or shorten the texts", bench.config.name)
    evidence = {
        "model": bench.config.name,
        "p99_ms": p99_ms,
        "cores": cores,
        "protocol": protocol,
        "rows": fleet.traffic.source,
        "grid": len(grid.settings()),
        "chosen": chosen.figures(),
        "settings": [trial.figures() for trial in search.ranked()],
        "arrivals": [] if exhaustive_rounds else arrivals(bench, chosen, p99_ms, say),
    }
    return bench.config_with(chosen.setting), evidence


def arrivals(bench: Bench, chosen: Trial, p99_ms: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The chosen setting under random arrivals at several rates: latency at the tail, and the share that keeps the limit."""
    found = []
    with bench.serve([chosen.setting]) as targets:
        target = targets[chosen.setting]
        for number, share in enumerate(ARRIVALS):
            rate = share * chosen.score
            load = Load(rate=rate, warmup=1.0, seconds=seconds_at(rate), seed=number)
            level = measure(bench.fleet, target, load, p99_ms / 1000, bench.expected)
            in_time = level["goodput"] * level["seconds"] / level["requests"] if level["requests"] else 0.0
            tail = level["latency_ms"]["p99"]
            found.append({"rate": rate, "requests": level["requests"], "p99_ms": tail, "in_time": in_time})
            say(f"{rate:.4g} requests/s at random times: {in_time:.1%} within {p99_ms:g} ms")
    return found


def seconds_at(rate: float) -> float:
    """How long random arrivals of so many a second are measured: until there are enough of them, as far as MOST_SECONDS go."""
    # 15 % more: as many as are expected come in half of all cases only
    return max(ARRIVAL_SECONDS, min(1.15 * SHOW_A_PERCENT / rate, MOST_SECONDS))


def within_limit(rates: Sequence[dict[str, Any]]) -> float | None:
    """The highest rate of random arrivals at which 99 % of the requests kept the limit, all lower ones doing so too."""
    best = None
    for row in rates:
        if row["in_time"] < 0.99:
            break
        best = row["rate"]
    return best
