"""The records of a benchmark: one per candidate, with its latencies by shape."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]

NO_BENCHMARK = "there is no benchmark before this report"
"""Why a run has no latency."""


def why_unmeasured(measurements: Record) -> str:
    """Why a benchmark has no compressed file: those of this device were refused by the export; '' where it has one."""
    if any(row["model"] == "compressed" for row in measurements["candidates"]):
        return ""
    files = [row for row in measurements.get("left_out", []) if row["name"].startswith("compressed ")]
    return ", ".join(f"{row['name']} is {row['why']}" for row in files) or "no compressed file was exported"


def without_samples(candidate: Record) -> Record:
    """A candidate without the times of single rounds, which the measurements keep."""
    timings = {
        name: [{key: value for key, value in row.items() if key != "samples_ms"} for row in candidate.get(name, [])]
        for name in ("latency", "real_lengths", "further_tokens")
    }
    return {**candidate, **timings}


def find(candidates: list[Record], model: str, precision: str, runtime: str) -> Record | None:
    """The candidate of a model, precision and runtime; None where it was not exported."""
    key = (model, runtime, precision)
    return next((row for row in candidates if (row["model"], row["runtime"], row["precision"]) == key), None)


def cells_of(candidate: Record) -> list[tuple[int, int]]:
    """The (batch, length) pairs that the summary shows: batch 1 and 8 if measured, else the smallest and the largest; the last
    is the headline's. Length 128 if measured, else the longest."""
    batches, lengths = ({timing[key] for timing in candidate["latency"]} for key in ("batch", "length"))
    length = 128 if 128 in lengths else max(lengths)
    small, large = (1 if 1 in batches else min(batches)), (8 if 8 in batches else max(batches))
    return [(batch, length) for batch in sorted({small, large})]


def timing(candidate: Record, cell: tuple[int, int], of: str = "latency") -> Record:
    """The record of one (batch, length), of its `latency` or `further_tokens`."""
    return next(row for row in candidate[of] if (row["batch"], row["length"]) == cell)


def p50(candidate: Record, cell: tuple[int, int], of: str = "latency") -> float:
    """Median in milliseconds."""
    return timing(candidate, cell, of)["p50"]
