"""The times of stage `benchmark`: fixed shapes, real lengths, further tokens, the machine's limits, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from compressor.models.build import TEXT2TEXT, end_id
from compressor.models.special_tokens import start_id
from compressor.tasks import GENERATED
from compressor.tasks.data import Data
from compressor.tasks.task_kind import kind_of
from export.latency.machine_limits import Limits, measure_limits
from export.latency.measure import TOKEN_SECONDS, TOKENS, LatencyVariant, Measurement, measure
from export.latency.passes import Pass, PassMeasurement, measure_passes, passes_of, rows_of
from export.latency.profiling import measure_profile
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.benchmark.config import BenchmarkConfig


@dataclass(frozen=True)
class Timings:
    """All times of one run of the stage; those of a variant by its name."""

    limits: Limits | None
    shapes: list[Measurement]
    real: list[PassMeasurement]
    further: list[Measurement]
    profiles: dict[str, dict[str, Any]]

    @property
    def waited(self) -> float:
        """The largest share of time that the measured processes waited for a core."""
        return max(timing.waited for timing in (*self.shapes, *self.real, *self.further))


def timed(variants: list[LatencyVariant], data: Data, config: BenchmarkConfig, inputs: Inputs, workspace: Workspace) -> Timings:
    """Measure everything that the config asks for, with progress bars. Raises UserError E603."""
    limits = limits_of(config, inputs, workspace)
    grid = [(batch, length) for length in config.length for batch in config.batch]
    with workspace.progress("measuring latency", config.rounds * len(grid)) as bar:
        options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
        shapes = measure(variants, grid, config.rounds, **options)
    real = timed_passes(variants, real_passes(config, data, inputs.seed), config, inputs, workspace)
    further = timed_tokens(variants, grid, config, inputs, workspace)
    return Timings(limits, shapes, real, further, profiles_of(variants, shapes, config, inputs, workspace))


def real_passes(config: BenchmarkConfig, data: Data, seed: int) -> list[Pass]:
    """Validation rows of their own lengths in batches, drawn with the seed; none where they are not to be timed."""
    if not config.real_lengths:
        return []
    return passes_of(data.validation.draw(max(map(rows_of, config.batch)), seed).requests, data.pad_id, config.batch)


def inputs_of(dense: nn.Module, folder: Path, data: Data) -> dict[str, Any]:
    """The options of a `LatencyVariant` for the random rows of a model, the base model's being in `folder`."""
    start = start_id(dense.config, data.pad_id) if dense.config.is_encoder_decoder and data.kind.generates else None
    return {"vocabulary": dense.config.vocab_size, "end": end_id(folder), "start": start}


def timed_passes(
    variants: list[LatencyVariant], passes: list[Pass], config: BenchmarkConfig, inputs: Inputs, workspace: Workspace
) -> list[PassMeasurement]:
    """Every variant on every pass of real rows, with a progress bar. Raises UserError E603."""
    if not passes:
        return []
    with workspace.progress("measuring real lengths", (config.real_rounds + 1) * len(passes)) as bar:
        options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
        return measure_passes(variants, passes, config.real_rounds, **options)


def timed_tokens(
    variants: list[LatencyVariant],
    shapes: list[tuple[int, int]],
    config: BenchmarkConfig,
    inputs: Inputs,
    workspace: Workspace,
) -> list[Measurement]:
    """Every variant of a model that generates, on one token at a time behind prompts of every shape. Raises UserError E603."""
    if inputs.task.kind not in GENERATED or not config.further_tokens:
        return []
    if config.device != "cpu":
        workspace.say("tokens behind a prompt are timed on the CPU only")
        return []
    with workspace.progress("measuring further tokens", config.real_rounds * len(shapes)) as bar:
        options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
        return measure(variants, shapes, config.real_rounds, tokens=TOKENS, seconds=TOKEN_SECONDS, **options)


def profiles_of(
    variants: list[LatencyVariant],
    shapes: list[Measurement],
    config: BenchmarkConfig,
    inputs: Inputs,
    workspace: Workspace,
) -> dict[str, dict[str, Any]]:
    """Name of an exported file -> where its time goes on the CPU at the largest shape; a file without a profile is told. Its
    passes were timed before, as `shapes`."""
    files = [variant for variant in variants if variant.runtime in RUNTIMES]
    if not config.profile:
        return {}
    profiles = {}
    with workspace.progress("profiling", len(files)) as bar:
        for file in files:
            ms = max(row.p50 for row in shapes if row.variant == file.name)
            profile = measure_profile(file, max(config.batch), max(config.length), inputs.threads, ms)
            if profile:
                profiles[file.name] = {"profile": profile}
            else:
                workspace.say(f"{file.name} has no profile: {RUNTIMES[file.runtime].title} gave none in time")
            bar.advance()
    return profiles


def limits_of(config: BenchmarkConfig, inputs: Inputs, workspace: Workspace) -> Limits | None:
    """The rates of this machine's CPU with the run's threads; None on a GPU, where unwanted and where not measurable, and for a
    decoder behind an encoder: FLOPs are not counted for one token behind a text."""
    if config.device != "cpu" or not config.machine_limits or kind_of(inputs.task.kind).auto_class == TEXT2TEXT:
        return None
    limits = measure_limits(inputs.threads)
    if limits is None:
        workspace.say("the rates of this machine could not be measured: no latency is compared with them")
    return limits
