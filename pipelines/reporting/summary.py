"""The rows of a report's tables that compare the dense with the compressed model."""

from __future__ import annotations

import numpy as np

from compressor.cost import human_bytes
from compressor.tasks.task_kind import Metric
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.reporting.candidates import Record, find, p50, timing
from pipelines.reporting.format import (
    Speed,
    digits_of_points,
    factor,
    faster_between,
    giga,
    interval,
    milliseconds,
    points,
    points_between,
    scaled,
    signed,
    significant,
    smaller,
    verdict,
)


def control_words(control: Record) -> str:
    """What the control of a recovery is, in a report."""
    return "dense, trained further on the labels" if control.get("learned") == "labels" else "dense, trained as long"


def summary(
    roles: dict[str, Record],
    cells: list[tuple[int, int]],
    trainable: list[Record],
    tunable: int,
    metric: Metric,
    control: Record | None = None,
) -> list[Record]:
    """Rows of strings: metric, dense PyTorch, dense fp32 in the deployed runtime, compressed, and the change against either."""
    length = str(cells[-1][1])
    rows = [
        quality_row(roles, metric),
        *([control_row(control, roles["compressed"], metric)] if control else []),
        *(trainable_row(row, tunable) for row in trainable),
        comparison_row(roles, "parameters", lambda row: row["parameters"], "{:,}".format, relative),
        *inserted_row(roles),
        nonzeros_row(roles),
        comparison_row(roles, "stored bytes", lambda row: row["bytes"], human_bytes, smaller),
        comparison_row(roles, f"FLOPs of a row of {length} tokens", lambda row: row["flops"][length], giga, relative),
        papers_row(roles["compressed"]["paper_flops_ratio"]),
        *(latency_row(roles, cell) for cell in cells),
        throughput_row(roles, cells[-1]),
    ]
    # of generating models alone
    written = [cell for cell in cells if roles["dense"].get("further_tokens")]
    return rows + [latency_row(roles, cell, "further_tokens") for cell in written]


def inserted_row(roles: dict[str, Record]) -> list[Record]:
    """Row with the parameters of adapters and prefixes, if there are any."""
    kinds = roles["compressed"]["inserted"]["kinds"]
    if not kinds:
        return []
    shown = {role: f"{record['inserted']['parameters']:,}" for role, record in roles.items()}
    return [{"metric": f"of these {kinds}", **shown, "change": "not mergeable"}]


def rows_per_second(value: float) -> str:
    return f"{significant(value)} rows/s"


def relative(before: float, after: float) -> str:
    return factor(after / before)


def comparison_row(roles: dict[str, Record], metric: str, value, show, change) -> Record:
    """One row: `value` of each role, formatted by `show`; `change(before, after)` against dense PyTorch and runtime alone."""
    return row_of(roles, metric, lambda record: show(value(record)), lambda *pair: change(*map(value, pair)))


def nonzeros_row(roles: dict[str, Record]) -> Record:
    """The weights other than zero: of a model with masks of W alone, which is not merged, those of M ⊙ W and of its deltas."""
    alone = masks_of_base(roles["compressed"])
    title = "non-zeros of masked weights and deltas, not merged" if alone else "non-zeros of the merged weights"
    return comparison_row(roles, title, lambda row: row["nonzeros"], "{:,}".format, relative)


def masks_of_base(compressed: Record) -> bool:
    """Whether masks hide W alone: a merge would fill their zeros, and the deltas are counted beside them."""
    return any(row["pattern"].endswith("of W alone") for row in compressed["density"])


def row_of(roles: dict[str, Record], metric: str, show, change) -> Record:
    """One row: each role's record, formatted by `show`; `change(before, after)` of two records."""
    row = {"metric": metric, **{role: show(record) for role, record in roles.items()}}
    for key, role in (("change", "dense"), ("change_runtime", "runtime")):
        if role in roles:
            row[key] = change(roles[role], roles["compressed"])
    return row


def papers_row(ratio: float) -> Record:
    """Row of the papers' FLOPs ratio: it is relative to dense without deltas, so dense is 1; four digits, as printed."""
    return {"metric": "FLOPs, the papers' way", "dense": "1 ×", "compressed": factor(ratio, 4), "change": factor(ratio, 4)}


TIMED = {"latency": "p50 latency, batch {} × {}", "further_tokens": "p50 of a further token, batch {} behind {}"}
"""What was timed at a (batch, length), in words."""


def latency_row(roles: dict[str, Record], cell: tuple[int, int], of: str = "latency") -> Record:
    """Row of p50 at one (batch, length), each factor with its 95 % interval over the rounds."""

    def change(before: Record, after: Record) -> str:
        return faster_between(speedup(before, after, cell, of))

    return row_of(roles, TIMED[of].format(*cell), lambda record: milliseconds(p50(record, cell, of)), change)


def throughput_row(roles: dict[str, Record], cell: tuple[int, int]) -> Record:
    """Row of the throughput, rows per second as batch over p50; its change is stated like that of the latency."""

    def change(before: Record, after: Record) -> str:
        return speedup(before, after, cell).words("more", "less", "no gain")

    title = f"throughput, batch {cell[0]} × {cell[1]}"
    return row_of(roles, title, lambda record: rows_per_second(timing(record, cell)["throughput"]), change)


def speedup(before: Record, after: Record, cell: tuple[int, int], of: str = "latency") -> Speed:
    """Speed-up of one candidate over another at (batch, length)."""
    return speed_of(timing(before, cell, of), timing(after, cell, of))


def speed_of(before: Record, after: Record) -> Speed:
    """Speed-up between two timings of the same rounds: p50 over p50, with a 95 % bootstrap interval.

    Rounds are interleaved, so both are resampled together.
    """
    times = np.array([record["samples_ms"] for record in (before, after)])
    draws = np.random.default_rng(0).integers(0, times.shape[1], size=(2000, times.shape[1]))
    slow, fast = np.median(times[:, draws], axis=2)
    low, high = np.percentile(slow / fast, [2.5, 97.5])
    return Speed(before["p50"] / after["p50"], float(low), float(high))


def quality_row(roles: dict[str, Record], metric: Metric) -> Record:
    """Row of the main metric with intervals; against dense PyTorch also the paired interval and its verdict."""

    low, high = roles["compressed"]["difference_interval"]

    def change(before: float, after: float) -> str:
        return points(after - before, digits=digits_of_points(low, high))

    title = f"{metric.name} ({'' if metric.unit else '× 100, '}95 % interval)"
    row = comparison_row(roles, title, lambda record: record["quality"][metric.key], str, change)
    row["change"] += f" ({points_between(low, high)}): {verdict(low, high)}"
    return {**row, **{role: quality_cell(record, metric) for role, record in roles.items()}}


def quality_cell(record: Record, metric: Metric) -> str:
    """The main metric of a record with its interval: '86.0 % (83.5 to 88.4)'."""
    quality, value = record["quality"], record["quality"][metric.key]
    between = interval(*quality["interval"], metric.scale)
    return f"{scaled(value, metric.scale, metric.unit)} ({between}){metric.aside(value)}"


def change_of(difference: float, metric: Metric, low: float = 0.0, high: float = 0.0) -> str:
    """A difference of a metric, with the digits that its interval needs: in points, but of texts as their metric is printed,
    '+0.30' of NIST."""
    if not metric.of_texts:
        return points(difference, digits=digits_of_points(low, high))
    return signed(metric.scale * difference, 1 if metric.scale > 1 else 2)


def control_row(control: Record, compressed: Record, metric: Metric) -> Record:
    """Row of the main metric against the control, a PyTorch model as the dense one."""
    between = control.get("difference_interval", ())
    change = change_of(control["difference"], metric, *between)
    if between:
        change += f" ({points_between(*between)}): {verdict(*between, 'the control')}"
    cells = {"dense": quality_cell(control, metric), "compressed": quality_cell(compressed, metric)}
    return {"metric": f"{metric.name}, control ({control_words(control)})", **cells, "change": change}


def trainable_row(row: Record, dense: int) -> Record:
    """Row of one training stage's trainable parameters, beside those of full tuning; the task head is counted separately."""
    return {
        "metric": f"trainable in {row['stage']} (task head {row['head']:,} apart)",
        "dense": f"{dense:,}",
        "compressed": f"{row['body']:,}",
        "change": f"{significant(100 * row['share_of_dense'])} % of dense",
    }


def gain_steps(
    roles: dict[str, Record], cells: list[tuple[int, int]], candidates: list[Record], metric: Metric
) -> list[Record]:
    """Steps from dense PyTorch to the deployed model, one change at a time; factors are against the step before.

    A change that was not measured separately is combined with the next one.
    """
    runtime, narrow = (roles["compressed"][key] for key in ("runtime", "precision"))
    narrow = "int8" if narrow == "fp32" else narrow
    words = [
        (RUNTIMES[runtime].title, roles.get("runtime")),
        ("pruning" if is_pruned(roles) else "nothing pruned", find(candidates, "compressed", "fp32", runtime)),
        (narrow, find(candidates, "compressed", narrow, runtime)),
    ]
    steps, changes = [("dense PyTorch fp32", roles["dense"])], []
    for change, record in words:
        changes.append(change)
        if record:
            steps.append((f"+ {' + '.join(changes)}", record))
            changes = []
    rows = []
    for (step, record), (_, before) in zip(steps, [steps[0], *steps], strict=False):
        latency = [step_latency(before, record, cell) for cell in cells]
        quality = {metric.key: record["quality"][metric.key]}
        rows.append({"step": step, "variant": record["name"], "bytes": record["bytes"], **quality, "latency": latency})
    return rows


def step_latency(before: Record, after: Record, cell: tuple[int, int]) -> Record:
    """p50 of a step at (batch, length), and its speed-up over the step before with the interval."""
    speed = speedup(before, after, cell)
    return {"batch": cell[0], "p50": p50(after, cell), "speedup": speed.ratio, "interval": [speed.low, speed.high]}


def is_pruned(roles: dict[str, Record]) -> bool:
    """Whether units or weights of the dense model were removed."""
    return roles["compressed"]["layers"] != roles["dense"]["layers"] or bool(density(roles))


def density(roles: dict[str, Record]) -> list[Record]:
    """Non-zeros in the matrices of the merged blocks, by pattern; empty where no weight was masked."""
    rows = roles["compressed"]["density"]
    return rows if any(row["pattern"] for row in rows) else []
