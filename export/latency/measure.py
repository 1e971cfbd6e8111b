"""Latency of several models in one interleaved run, each in a separate process.

Runtimes in one process disturb each other (idle thread pools), and the speed of a machine varies over time: so every variant
gets its own process, every round times every variant once, in shuffled order, and only ratios within one run are meaningful.
On a GPU, time is measured from the call until the GPU is idle again.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from compressor.arguments import require_one_of, require_whole
from compressor.child_program import program
from compressor.errors import UserError
from compressor.tasks.features import Encoding
from export.latency.core_time import CoreTime, waited_by_most
from export.latency.programs import worker_environment
from export.runtimes.runtime import Device
from export.runtimes.runtime_registry import RUNTIMES

WARM_UP = 3
"""Untimed calls of every variant at every shape."""
LEAST_ROUNDS = 6
"""Of fewer no interval of the median could be told."""
TOKENS = 16
"""Tokens of a generating model whose mean is one sample."""
TOKEN_SECONDS = 60.0
"""For the further tokens of all variants behind prompts of one shape."""


WAYS_OF_PYTORCH = ("pytorch", "torch.compile", "cuda graphs")
"""Runtimes of a variant that is a checkpoint."""


class Unmeasurable(UserError):
    """E603: a variant whose worker process died, with its last output."""

    def __init__(self, variant: str, last: str):
        self.variant, self.last = variant, last
        super().__init__("E603", f"'{variant}' cannot be measured: {last}", "Check that the model loads in this runtime")

    def __reduce__(self) -> tuple:
        return type(self), (self.variant, self.last)


@dataclass(frozen=True)
class LatencyVariant:
    """What a worker loads: a file of the runtime, or a checkpoint folder for PyTorch. Names are unique within a run."""

    name: str
    runtime: str
    """A runtime of export/runtimes/runtime_registry.py, or one of WAYS_OF_PYTORCH."""
    path: Path
    device: Device = "cpu"
    half: bool = False
    """Whether PyTorch uses fp16; a file of a runtime has its own precision."""
    vocabulary: int = 1000
    """Token ids are drawn below this."""
    end: int | None = None
    """The end-of-sentence token, for a model that needs one in each row."""
    start: int | None = None
    """The first token of a decoder behind an encoder: a pass computes the logits behind it, for the first token of a text."""


@dataclass(frozen=True)
class Measurement:
    """One variant at one shape: percentiles and interquartile range in ms, `throughput` in rows/s at the median; `waited` is
    the share of time that most processes of the same rounds waited for a core (`core_time`)."""

    variant: str
    batch: int
    length: int
    p50: float
    p95: float
    p99: float
    iqr: float
    throughput: float
    samples_ms: tuple[float, ...]
    waited: float = 0.0

    @property
    def fastest_ms(self) -> float:
        """The fastest pass."""
        return min(self.samples_ms)

    def to_json(self) -> dict[str, Any]:
        """The entry of this measurement in measurements.json."""
        return {name: value for name, value in asdict(self).items() if name != "variant"}


def summarize(variant: str, batch: int, length: int, samples: Sequence[float], waited: float = 0.0) -> Measurement:
    """Percentiles of one variant's times (ms)."""
    q25, p50, q75, p95, p99 = np.percentile(samples, [25, 50, 75, 95, 99])
    rounded = tuple(round(sample, 4) for sample in samples)
    return Measurement(variant, batch, length, *map(float, (p50, p95, p99, q75 - q25, 1000 * batch / p50)), rounded, waited)


class Worker:
    """A process that holds one model and times one call at a time, over JSON lines on stdin and stdout."""

    def __init__(self, variant: LatencyVariant, threads: int | None, log: IO[str]):
        self.variant, self.log = variant, log
        self.process = subprocess.Popen(
            program("export.latency.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=worker_environment(),
        )
        description = {**asdict(variant), "path": str(variant.path), "threads": threads}
        self._send(description)

    def _send(self, message: dict) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _receive(self) -> dict:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.log.seek(0)
        last = next((text.strip() for text in reversed(self.log.read().splitlines()) if text.strip()), "no message")
        # killed by a signal (out of memory, say), it printed no message
        last += f" (killed by signal {-status})" if status < 0 else ""
        raise Unmeasurable(self.variant.name, last)

    def wait_until_loaded(self) -> None:
        """Wait until the model is loaded. Raises UserError E603 with the worker's last line if it died."""
        self._receive()

    def start(self, batch: int, length: int, tokens: int = 0) -> None:
        """Start one forward pass in the worker, or so many tokens behind prompts of that shape; `finish` waits for it."""
        self._send({"batch": batch, "length": length} | ({"tokens": tokens} if tokens else {}))

    def finish(self) -> float:
        """Milliseconds of the pass, or of one of the tokens, that `start` began."""
        return self._receive()["ms"]

    def time(self, batch: int, length: int, tokens: int = 0) -> float:
        """Milliseconds of one forward pass, or of one of so many tokens."""
        self.start(batch, length, tokens)
        return self.finish()

    def time_batches(self, batches: Sequence[Encoding]) -> list[float]:
        """Milliseconds of each of these batches, one after the other."""
        self._send({"batches": [{name: rows.tolist() for name, rows in batch.items()} for batch in batches]})
        return self._receive()["ms"]

    @property
    def core_time(self) -> CoreTime:
        """What the process has had of the cores so far."""
        return CoreTime.of(self.process.pid)

    def stop(self) -> None:
        """Terminate the process at once, whatever it is doing: it may be compiling for minutes."""
        self.process.terminate()

    def close(self) -> None:
        """End the process by closing its input."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def workers(variants: Sequence[LatencyVariant], threads: int | None) -> Iterator[list[Worker]]:
    """Start every worker and wait until all are loaded; all are stopped at the end, also after an error."""
    with contextlib.ExitStack() as stack:
        started = []
        for variant in variants:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            worker = Worker(variant, threads, log)
            stack.callback(worker.close)
            started.append(worker)
        try:
            for worker in started:
                worker.wait_until_loaded()
            yield started
        except BaseException:
            for worker in started:
                worker.stop()
            raise


def _check(variants: Sequence[LatencyVariant]) -> None:
    names = [variant.name for variant in variants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"variants are {', '.join(names) or 'none'}: give some, each with a name of its own")
    for variant in variants:
        require_one_of("runtime", variant.runtime, (*WAYS_OF_PYTORCH, *RUNTIMES))


def measure(
    variants: Sequence[LatencyVariant],
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    *,
    threads: int | None = None,
    seed: int = 0,
    tokens: int = 0,
    seconds: float = math.inf,
    on_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Time every variant at every (batch, length), `rounds` times, interleaved; `seconds` are for one shape. With `tokens`, see
    `time_shape`. Raises UserError E603; ValueError for no or unknown variants, two of one name, or less than one round."""
    _check(variants)
    require_whole("rounds", rounds)
    for batch, length in shapes:
        require_whole("batch", batch)
        require_whole("length", length)
    shuffle, results = random.Random(seed), []
    with workers(variants, threads) as live:
        for batch, length in shapes:
            results += time_shape(live, batch, length, rounds, shuffle, tokens=tokens, seconds=seconds, on_round=on_round)
    return results


def time_shape(
    live: Sequence[Worker],
    batch: int,
    length: int,
    rounds: int,
    shuffle: random.Random,
    *,
    tokens: int = 0,
    seconds: float = math.inf,
    on_round: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Time interleaved rounds of one shape; after `seconds` no more than `LEAST_ROUNDS`. Raises UserError E603.

    With `tokens`, of models that generate, on the CPU: one of so many tokens of each of `batch` rows behind prompts of `length`
    tokens, on the cache. They are bound by reading all weights, where a pass over a prompt is bound by arithmetic. The
    throughput is in tokens/s then.
    """
    times: dict[str, list[float]] = {worker.variant.name: [] for worker in live}
    # the first call of a shape may compile: all at once, because nothing is timed yet
    first = min(tokens, 1)
    for worker in live:
        worker.start(batch, length, first)
    for worker in live:
        worker.finish()
    for worker in live:
        for _ in range(WARM_UP - 1):
            worker.time(batch, length, first)
    before = [worker.core_time for worker in live]
    end = time.monotonic() + seconds
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() > end:
            break
        for worker in shuffle.sample(live, len(live)):
            times[worker.variant.name].append(worker.time(batch, length, tokens))
        on_round()
    waited = waited_by_most(before, [worker.core_time for worker in live])
    return [summarize(name, batch, length, samples, waited) for name, samples in times.items()]
