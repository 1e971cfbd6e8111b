"""What is tuned: fields of config.pbtxt, the values that are tried, and a setting written into a config."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import UserError
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import CPU_RUNTIMES, RUNTIMES
from serving.layout.text_outputs import TEXT_BACKEND
from serving.layout.version_file import read_version

BUDGET = "max_batch_tokens"
DELAYS = (None, 0, 250, 500, 2000, 5000)
BUDGETS = (64, 128, 256, 512, 1024, 2048)
DELAY_SHARE = 0.25
"""Largest share of the latency limit that a request may wait for others."""


@dataclass(frozen=True)
class Setting:
    """Model instances and threads of each, maximum queue delay in µs (None: no dynamic batching), and tokens of a batch with
    padding (None: the model has no such limit)."""

    instances: int
    threads: int
    delay_us: int | None
    batch_tokens: int | None = None

    @property
    def title(self) -> str:
        """'2 x 1 threads, delay 500 µs, 4096 tokens'."""
        delay = "no batching" if self.delay_us is None else f"delay {self.delay_us} µs"
        budget = "" if self.batch_tokens is None else f", {self.batch_tokens} tokens"
        return f"{self.instances} x {self.threads} thread{'s' * (self.threads > 1)}, {delay}{budget}"


@dataclass(frozen=True)
class Grid:
    """The values of each knob, in order: neighbours in a list are neighbours in the search."""

    layouts: tuple[tuple[int, int], ...]
    delays: tuple[int | None, ...]
    budgets: tuple[int | None, ...]

    def settings(self) -> list[Setting]:
        """Every combination."""
        return [Setting(*layout, delay, budget) for layout, delay, budget in product(*self._axes())]

    def coarse(self) -> list[Setting]:
        """Every layout with the shortest, a middle and the longest delay, and a middle budget.

        Throughput need not have one peak over the delay: what waits long enough for many clients may be as good as no delay."""
        delays = dict.fromkeys((self.delays[0], self.delays[len(self.delays) // 2], self.delays[-1]))
        return [
            Setting(*layout, delay, self.budgets[len(self.budgets) // 2]) for layout, delay in product(self.layouts, delays)
        ]

    def neighbours(self, setting: Setting) -> list[Setting]:
        """The settings that differ by one step of one knob."""
        place = [(setting.instances, setting.threads), setting.delay_us, setting.batch_tokens]
        found = []
        for number, axis in enumerate(self._axes()):
            at = axis.index(place[number])
            for value in (*axis[max(at - 1, 0) : at], *axis[at + 1 : at + 2]):
                layout, delay, budget = [*place[:number], value, *place[number + 1 :]]
                found.append(Setting(*layout, delay, budget))
        return found

    def _axes(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def grid_of(config: ModelConfig, present: Setting, cores: int, p99_ms: float) -> Grid:
    """The settings that are worth a try on so many cores with this limit of the p99 latency, and the `present` one."""
    longest = p99_ms * 1000 * DELAY_SHARE
    delays = {delay for delay in DELAYS if delay is not None and config.max_batch_size > 0 and delay <= longest}
    text = config.backend == TEXT_BACKEND
    known = ({*layouts(cores)}, delays if text and delays else {None, *delays}, {*BUDGETS} if text else {None})
    own = ((present.instances, present.threads), present.delay_us, present.batch_tokens)
    return Grid(*(tuple(sorted(values | {value}, key=_none_first)) for values, value in zip(known, own, strict=True)))


def fitting(grid: Grid, present: Setting, instances: int) -> Grid:
    """The settings of at most so many instances, and of the layout that is `present`."""
    own = (present.instances, present.threads)
    return replace(grid, layouts=tuple(layout for layout in grid.layouts if layout[0] <= instances or layout == own))


def _none_first(value: Any) -> tuple[bool, Any]:
    return value is not None, value


def layouts(cores: int) -> tuple[tuple[int, int], ...]:
    """(instances, threads of each) that use more than half of the cores and at most all: powers of two and divisors."""
    counts = [count for count in range(1, cores + 1) if cores % count == 0 or count & (count - 1) == 0]
    return tuple(
        (instances, threads) for instances, threads in product(counts, counts) if cores < 2 * instances * threads <= 2 * cores
    )


def setting_of(config: ModelConfig, runtime: Runtime, cores: int) -> Setting:
    """The setting in a config; `runtime` is that of its model file. A config without threads shares the `cores` equally."""
    threads, budget = (
        int(config.parameters[key].string_value) if key in config.parameters else None
        for key in (runtime.threads_parameter, BUDGET)
    )
    instances = sum(group.count for group in config.instance_group) or 1
    delay = config.dynamic_batching.max_queue_delay_microseconds if config.HasField("dynamic_batching") else None
    return Setting(instances, threads or max(1, cores // instances), delay, budget)


def configured(config: ModelConfig, setting: Setting, runtime: Runtime, name: str | None = None) -> ModelConfig:
    """A copy of a config with a setting, and with another name if one is given; `runtime` is that of its model file."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    changed.name = name or config.name
    if not changed.instance_group:
        changed.instance_group.add()
    for group in changed.instance_group:
        group.count = setting.instances
    changed.parameters[runtime.threads_parameter].string_value = str(setting.threads)
    if setting.delay_us is None:
        changed.ClearField("dynamic_batching")
    else:
        changed.dynamic_batching.max_queue_delay_microseconds = setting.delay_us
    if setting.batch_tokens is not None:
        changed.parameters[BUDGET].string_value = str(setting.batch_tokens)
    return changed


def runtime_of_model(folder: Path, config: ModelConfig) -> Runtime:
    """The runtime of a model's file: its backend, or for a model of texts what its newest version names. Raises UserError
    E752 for another backend."""
    name = config.backend
    if name == TEXT_BACKEND:
        newest = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
        name = read_version(newest).runtime
    if name not in CPU_RUNTIMES:
        fix = f"Tune a model of {', '.join(CPU_RUNTIMES)} or {TEXT_BACKEND}"
        raise UserError("E752", f"nothing is known of the settings of the backend '{name}'", fix, config.name)
    return RUNTIMES[name]


def as_text(config: ModelConfig) -> str:
    """The content of a config.pbtxt."""
    return text_format.MessageToString(config)
