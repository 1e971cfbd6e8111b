"""Settings of a served model, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from compressor.arguments import require_number, require_one_of, require_whole
from compressor.errors import UserError
from export.runtimes.runtime import Device, Runtime

INTERFACES = ("tokens", "text")
"""What a deployed model can take: arrays of token ids (the model NAME), texts (NAME-text)."""
TOKENS_ON_A_GPU = 4096
"""Padded tokens of a sub-batch of texts on a GPU, at most: 4 times as many take 1.3 times as long (docs/export.md)."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Settings of a served model that trade throughput, latency and memory; docs/serving.md gives the measurements.

    - `max_batch_size`: most rows of a request, and of a merged batch of texts; 0 leaves the batch axis to the caller;
    - `instances`: copies of the model that compute at the same time; `threads` of each (None: the cores, shared equally);
    - `max_batch_tokens`: most padded tokens of a sub-batch of texts; `streams`: sub-batches that an instance computes at the
      same time, its threads shared equally;
    - `max_queue_delay_us`: how long a text waits for others to share its batch; `max_queue_size`: requests of texts that
      wait at most, more are refused (0: any number); `timeout_ms`: the longest wait (None: any);
    - `warmup`: whether each instance computes one short and one long row before it is ready;
    - `device`: cpu or cuda, where the instances are placed; None: on a GPU where the server has one and the file is for it.

    `instances`, `max_batch_tokens` and `streams` that are None are what is fastest in the runtime (export/runtimes).
    """

    max_batch_size: int = 32
    instances: int | None = None
    threads: int | None = None
    max_batch_tokens: int | None = None
    streams: int | None = None
    max_queue_delay_us: int = 250
    max_queue_size: int = 0
    timeout_ms: float | None = None
    warmup: bool = True
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_queue_delay_us", "max_queue_size"):
            require_whole(name, getattr(self, name), 0)
        for name in ("instances", "threads", "max_batch_tokens", "streams"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        if self.timeout_ms is not None:
            require_number("timeout_ms", self.timeout_ms, 0, above=True)
        if self.device is not None:
            require_one_of("device", self.device, get_args(Device))


DEFAULT_KNOBS = Knobs()


def instances(knobs: Knobs, runtime: Runtime) -> int:
    """Copies of the model that compute at the same time."""
    return knobs.instances or runtime.instances


def batch_tokens(knobs: Knobs, runtime: Runtime) -> int:
    """Padded tokens of a sub-batch of texts, at most."""
    return knobs.max_batch_tokens or (TOKENS_ON_A_GPU if knobs.device == "cuda" else runtime.text_tokens)


def streams(knobs: Knobs, runtime: Runtime) -> int:
    """Sub-batches at the same time, 0 for one a thread. Raises UserError E744 for more than the runtime, or a GPU, computes."""
    several = runtime.streams and knobs.device != "cuda"
    if knobs.streams is None:
        return 0 if several else 1
    if knobs.streams > 1 and knobs.device == "cuda":
        raise UserError("E744", f"streams is {knobs.streams}, and a GPU computes one sub-batch at a time", "Leave it out")
    if knobs.streams > 1 and not several:
        fix = "Leave it out: all threads compute each sub-batch"
        raise UserError("E744", f"streams is {knobs.streams}, and {runtime.title} computes one sub-batch at a time", fix)
    return knobs.streams
