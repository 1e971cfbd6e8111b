"""Where the time of a forward pass goes: the operators of an exported file by kind of work.

`python -m export.latency.profiling` reads a variant with threads, batch and length as JSON from stdin and prints its profile: a
separate process, because a profiler slows down what it watches.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from export.latency.measure import LatencyVariant
from export.latency.programs import private_stdout, result_of
from export.latency.worker import encoding_of
from export.runtimes.runtime import PassProfile
from export.runtimes.runtime_registry import RUNTIMES

WARM, PASSES = 3, 10
"""Untimed and timed forward passes."""
SECONDS, SLOWER = 180.0, 3.0
"""A profile is given up after so many seconds, and so many times as long as its passes take without a profiler."""
OUTSIDE = "outside operators"
"""What a pass takes beyond its operators: scheduling, memory, inputs and outputs."""


def measure_profile(
    variant: LatencyVariant, batch: int, length: int, threads: int | None, ms: float = 0.0
) -> dict[str, Any] | None:
    """The profile of a file of a runtime on the CPU (see `account`), of which a pass takes `ms` milliseconds; None where the
    runtime gives none in time."""
    description = {**asdict(variant), "path": str(variant.path), "threads": threads, "batch": batch, "length": length}
    timeout = SECONDS + SLOWER * (WARM + PASSES) * ms / 1000
    return result_of("export.latency.profiling", given=json.dumps(description), timeout=timeout)


def account(profile: PassProfile) -> dict[str, Any]:
    """A profile in JSON: its `kinds` of work by falling time (what is outside operators is one of them), each with its
    milliseconds, its share and the milliseconds of its operator types; `ms` is their sum.

    Each operator counts with its median, and so does the rest of the passes: other work on the machine delays now one, now
    another.
    """
    by_work: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for operator in profile.operators:
        by_work[operator.work][operator.type] += max(median(operator.ms), 0.0)
    inside = map(sum, zip(*(operator.ms for operator in profile.operators), strict=True))
    outside = median(whole - part for whole, part in zip(profile.ms, inside, strict=True))
    by_work[OUTSIDE] = {OUTSIDE: max(outside, 0.0)}
    total = sum(sum(types.values()) for types in by_work.values())
    kinds = [kind_of_work(work, types, total) for work, types in by_work.items()]
    return {"ms": total, "passes": len(profile.ms), "kinds": sorted(kinds, key=lambda kind: -kind["ms"])}


def kind_of_work(work: str, types: dict[str, float], total: float) -> dict[str, Any]:
    """One kind of work in JSON; its operator types by falling time."""
    ms, ordered = sum(types.values()), sorted(types, key=types.get, reverse=True)
    return {"kind": str(work), "ms": ms, "share": ms / total, "types": {name: types[name] for name in ordered}}


def main() -> None:
    replies = private_stdout()
    variant = json.load(sys.stdin)
    batch, length = variant["batch"], variant["length"]
    runtime, encoding = RUNTIMES[variant["runtime"]], encoding_of(variant, batch, length)
    profile = runtime.profile(Path(variant["path"]), encoding, variant["threads"], warm=WARM, passes=PASSES)
    replies.write(json.dumps(profile and {"batch": batch, "length": length, **account(profile)}))
    replies.close()


if __name__ == "__main__":
    main()
