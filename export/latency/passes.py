"""Latency on rows of their own lengths: passes over real batches, the first apart from the later ones.

Fixed shapes do not show what a runtime does with every new shape (OpenVINO compiles for it), and what padding costs. So the
same rows are timed in batches padded to the longest of each, as they come and sorted by length, as a batcher may do. Every
order has its own processes: the first pass of a process meets each of its shapes for the first time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from compressor.tasks.features import Encoding, pad
from export.latency.core_time import waited_by_most
from export.latency.measure import LEAST_ROUNDS, LatencyVariant, Worker, workers

Order = Literal["arrival", "sorted"]
ORDERS: tuple[Order, ...] = get_args(Order)
ROWS = 64
"""Least rows of a pass."""
SECONDS = 60.0
"""After so many for one pass of all variants, no more than the least rounds are made."""
START = (1, 2)
"""(rows, tokens) of the one untimed call of every process: what happens once in its life is no cost of a shape."""


@dataclass(frozen=True)
class Pass:
    """Rows in batches of `batch` (one of all, where there are fewer): padded int64 arrays (batch, longest of the batch)."""

    order: Order
    batch: int
    batches: tuple[Encoding, ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """(rows, tokens) of every batch."""
        return [batch["input_ids"].shape for batch in self.batches]

    @property
    def new(self) -> list[bool]:
        """Whether a batch is the first of its shape."""
        shapes = self.shapes
        return [shape not in shapes[:place] for place, shape in enumerate(shapes)]

    @property
    def tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(int(batch["attention_mask"].sum()) for batch in self.batches)

    def facts(self) -> dict[str, Any]:
        """What a measurement says of its pass; `padding` is the share of the computed positions that are none of a row."""
        positions = sum(rows * length for rows, length in self.shapes)
        return {
            "order": self.order,
            "batch": self.batch,
            "rows": sum(rows for rows, _ in self.shapes),
            "batches": len(self.batches),
            "shapes": sum(self.new),
            "tokens": self.tokens,
            "padding": 1 - self.tokens / positions,
        }


@dataclass(frozen=True)
class PassMeasurement:
    """One variant on one pass: milliseconds of the first pass, and median and interquartile range of the later ones.

    `batch_shapes` are the (rows, tokens) of every batch. `new_shape_ms` is the mean call on the first batch of each shape in
    the first pass, `seen_shape_ms` the mean of the same batches in later passes (the median of each). `fastest_ms` is a pass
    whose batches are each the fastest of the later ones, as other work, or a scheduler that keeps the threads on one core,
    leaves hardly a whole pass alone. `waited` is the share of time that most processes waited for a core.
    """

    variant: str
    order: Order
    batch: int
    rows: int
    batches: int
    shapes: int
    tokens: int
    padding: float
    first_ms: float
    new_shape_ms: float
    seen_shape_ms: float
    fastest_ms: float
    p50: float
    iqr: float
    rows_per_second: float
    tokens_per_second: float
    rounds: int
    samples_ms: tuple[float, ...]
    batch_shapes: tuple[tuple[int, int], ...]
    waited: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The entry of this measurement in measurements.json."""
        return {name: value for name, value in asdict(self).items() if name != "variant"}


def summarize_pass(
    variant: str, timed: Pass, first: Sequence[float], later: Sequence[Sequence[float]], waited: float = 0.0
) -> PassMeasurement:
    """The measurement of one variant from the milliseconds of every batch, of the first pass and of each later one."""
    sums, new, facts = [sum(times) for times in later], np.array(timed.new), timed.facts()
    q25, p50, q75 = map(float, np.percentile(sums, [25, 50, 75]))
    return PassMeasurement(
        variant,
        **facts,
        first_ms=float(sum(first)),
        new_shape_ms=float(np.array(first)[new].mean()),
        seen_shape_ms=float(np.median(later, axis=0)[new].mean()),
        fastest_ms=float(np.min(later, axis=0).sum()),
        p50=p50,
        iqr=q75 - q25,
        rows_per_second=1000 * facts["rows"] / p50,
        tokens_per_second=1000 * facts["tokens"] / p50,
        rounds=len(sums),
        samples_ms=tuple(round(sample, 4) for sample in sums),
        batch_shapes=tuple(timed.shapes),
        waited=waited,
    )


def rows_of(batch: int) -> int:
    """Rows of a pass in batches of a size, where there are so many: whole batches."""
    return -(-ROWS // batch) * batch


def passes_of(rows: Sequence[dict[str, list[int]]], pad_id: int, batches: Sequence[int]) -> list[Pass]:
    """The same unpadded rows in every batch size and order; sorting single rows would change no shape, so it is left out.

    So are rows that fill no batch, whose shape a pass of a smaller batch size may have met in the same process, and which would
    count as a whole one in the mean batch; of fewer rows than a batch has, all are one.
    """

    def cut(chosen: Sequence[dict[str, list[int]]], size: int) -> Iterator[Encoding]:
        return (pad(list(chosen[start : start + size]), pad_id) for start in range(0, len(chosen), size))

    made = []
    for order in ORDERS:
        for size in dict.fromkeys(batches):
            chosen = rows[: min(rows_of(size), len(rows) // size * size)] or rows
            if order == "sorted":
                if size == 1:
                    continue
                chosen = sorted(chosen, key=lambda row: len(row["input_ids"]))
            made.append(Pass(order, size, tuple(cut(chosen, size))))
    return made


def measure_passes(
    variants: Sequence[LatencyVariant],
    passes: Sequence[Pass],
    rounds: int,
    *,
    threads: int | None = None,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> list[PassMeasurement]:
    """Time every variant on every pass: once, and `rounds` times more, interleaved; after `SECONDS` for a pass no more than
    `LEAST_ROUNDS` of them. Raises UserError E603."""
    shuffle, results = random.Random(seed), []
    for order in ORDERS:
        if chosen := [timed for timed in passes if timed.order == order]:
            with workers(variants, threads) as live:
                for worker in live:
                    worker.time(*START)
                for timed in chosen:
                    results += time_pass(live, timed, rounds, shuffle, on_round)
    return results


def time_pass(
    live: Sequence[Worker],
    timed: Pass,
    rounds: int,
    shuffle: random.Random,
    on_round: Callable[[], None],
) -> list[PassMeasurement]:
    """Time one pass in running processes that have not met its shapes. Raises UserError E603."""
    times: dict[str, list[list[float]]] = {worker.variant.name: [] for worker in live}
    before = [worker.core_time for worker in live]
    end = time.monotonic() + SECONDS
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() > end:
            break
        for worker in shuffle.sample(live, len(live)):
            times[worker.variant.name].append(worker.time_batches(timed.batches))
        on_round()
    waited = waited_by_most(before, [worker.core_time for worker in live])
    return [summarize_pass(name, timed, first, later, waited) for name, (first, *later) in times.items()]
