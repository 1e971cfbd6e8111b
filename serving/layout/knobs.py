"""Settings of a served model, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from compressor.arguments import require_number, require_one_of, require_whole
from export.runtimes.runtime import Device

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
    - `max_queue_delay_us`: how long a text waits for others to share its batch; `max_queue_size`: texts that wait at most,
      more are refused (0: any number); `timeout_ms`: the longest wait (None: any);
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
