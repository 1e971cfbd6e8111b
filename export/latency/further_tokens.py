"""Latency of the tokens that generating models write one at a time, on their key-value cache: the time of a stream of text.

A forward pass over a prompt is bound by arithmetic, a further token mostly by reading all weights once, so that the gain of
pruning and of narrow weights is another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from export.latency.measure import LEAST_ROUNDS, LatencyVariant, Measurement, Worker, summarize, workers

TOKENS = 16
"""Tokens of a round, whose mean is a sample."""
SECONDS = 60.0
"""After so many for one shape of all variants, no more than the least rounds are made."""


def measure_further_tokens(
    variants: Sequence[LatencyVariant],
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    *,
    threads: int | None = None,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Time one further token of each of `batch` rows behind prompts of every (batch, length), interleaved; `length` of a
    measurement is the prompt's, its throughput is in tokens/s. For models with a cache, on the CPU. Raises UserError E603."""
    shuffle, results = random.Random(seed), []
    with workers(variants, threads) as live:
        for batch, length in shapes:
            results += _time_shape(live, batch, length, rounds, shuffle, on_round)
    return results


def _time_shape(
    live: Sequence[Worker], batch: int, length: int, rounds: int, shuffle: random.Random, on_round: Callable[[], None]
) -> list[Measurement]:
    times: dict[str, list[float]] = {worker.variant.name: [] for worker in live}
    for worker in live:  # reads the prompt, and warms up
        worker.time_further_token(batch, length, TOKENS)
    end = time.monotonic() + SECONDS
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > end:
            break
        for worker in shuffle.sample(live, len(live)):
            times[worker.variant.name].append(worker.time_further_token(batch, length, TOKENS))
        on_round()
    return [summarize(name, batch, length, samples) for name, samples in times.items()]
