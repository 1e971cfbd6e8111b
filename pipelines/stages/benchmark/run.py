"""The work of stage `benchmark`: measure quality, bytes, FLOPs and latency of every exported file against dense PyTorch."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from compressor.checkpoint import load, save_checkpoint
from compressor.cost import ModelShape, paper_flops_ratio, shape_of
from compressor.deltas.links import merge_all
from compressor.methods import method
from compressor.models.first_token import reads_first_token
from compressor.models.hub import TEXT2TEXT, end_id
from compressor.models.modules import STRUCTURES
from compressor.models.special_tokens import start_id
from compressor.pruning.weights import nonzeros
from compressor.tasks import GENERATED
from compressor.tasks.data import Data, MetricInputs
from compressor.tasks.features import DECODER_IDS, model_rows, torch_forward
from compressor.tasks.task_kind import kind_of
from export.latency.core_time import disturbance
from export.latency.machine_limits import Limits, measure_limits
from export.latency.measure import TOKEN_SECONDS, TOKENS, LatencyVariant, Measurement, measure
from export.latency.passes import Pass, PassMeasurement, measure_passes, passes_of, rows_of
from export.latency.profiling import measure_profile
from export.runtimes import sessions
from export.runtimes.runtime import Device
from export.runtimes.runtime_registry import RUNTIMES, packages_of
from pipelines.engine.environment import machine
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.benchmark.config import STAGE, BenchmarkConfig
from pipelines.stages.loading import density_of, judge_rows, load_data, load_model
from pipelines.stages.recover.config import CONTROL
from pipelines.stages.recover.control import control_of, metric_inputs_of_control


@dataclass(frozen=True)
class Candidate:
    """One measured model. `path` is a file of the runtime, or a checkpoint folder for PyTorch."""

    name: str
    model: str
    runtime: str
    precision: str
    path: Path
    bytes: int

    @property
    def devices(self) -> tuple[Device, ...]:
        """What it is meant to run on."""
        return RUNTIMES[self.runtime].precisions[self.precision] if self.runtime in RUNTIMES else ("cpu", "cuda")

    @property
    def why_left_out(self) -> str:
        return f"a file for {' and '.join(device.upper() for device in self.devices)}"


def candidates(inputs: Inputs, dense_folder: Path) -> list[Candidate]:
    """Dense PyTorch, then every exported file, dense ones first, including those for CUDA."""
    exported = inputs.nearest("onnx")
    weights = sum(path.stat().st_size for path in dense_folder.glob("*.safetensors"))
    rows = [Candidate("dense PyTorch fp32", "dense", "pytorch", "fp32", dense_folder, weights)]
    for model in ("dense", "compressed"):
        for runtime, files in exported.metadata["files"][model].items():
            for precision, file in files.items():
                name = f"{model} {RUNTIMES[runtime].label} {precision}"
                rows.append(Candidate(name, model, runtime, precision, exported.folder / file["path"], file["bytes"]))
    return rows


def left_out(rows: list[Candidate], device: str) -> list[Candidate]:
    """Files that do not run on this device."""
    return [row for row in rows if device not in row.devices]


def evaluate(candidate: Candidate, data: Data, workspace: Workspace, threads: int | None, device: str = "cpu") -> MetricInputs:
    """How good the candidate is on all validation rows in its own runtime; a file that is not for the CPU on the `device`
    that is measured."""
    rows = data.validation
    if candidate.runtime == "pytorch":
        return judge_rows(torch_forward(load(candidate.path)), rows, data, workspace, candidate.name)
    device = "cpu" if "cpu" in candidate.devices else device
    runtime = RUNTIMES[candidate.runtime]
    forward = partial(sessions.run, sessions.session(candidate.path, runtime=runtime, device=device, threads=threads))
    # a baseline whose outputs are not finite is a row whose comparison failed, and does not end the stage
    return judge_rows(forward, rows, data, workspace, candidate.name, rows.kind.metric_inputs)


def cost_of(
    shape: ModelShape, dense: ModelShape, lengths: list[int], delta: dict[str, Any], apart: dict[str, int] | None = None
) -> dict[str, Any]:
    """Parameters, FLOPs of one row by length, the papers' FLOPs ratio (unmerged delta of tune, linear layers only), and the
    part of adapters, prefixes and deltas that were kept `apart` (their parameters and multiply-adds per token)."""
    bare, apart = shape.bare, apart or {"parameters": 0, "macs": 0}
    beside = {length: 2 * length * apart["macs"] for length in lengths}
    flops = {length: shape.flops(length) + beside[length] for length in lengths}
    return {
        "parameters": shape.parameters + apart["parameters"],
        "flops": {str(length): count for length, count in flops.items()},
        "flops_ratio": {str(length): count / dense.flops(length) for length, count in flops.items()},
        "apart": {"parameters": apart["parameters"], "flops": {str(length): count for length, count in beside.items()}},
        "paper_flops_ratio": paper_flops_ratio(shape, dense, **delta),
        "inserted": {
            "kinds": shape.inserted_kinds,
            "parameters": shape.inserted,
            "bytes": shape.bytes - bare.bytes,
            "flops": {str(length): shape.flops(length) - bare.flops(length) for length in lengths},
        },
        "layers": [{name: layer.units(name) for name in STRUCTURES} for layer in shape.layers],
    }


def delta_of_dense(inputs: Inputs) -> dict[str, Any]:
    """Cost of the dense model's unmerged delta, for the papers' FLOPs: modules, rank and positions (empty after full tuning).

    A training that continues older deltas does not describe them: the one that created them does.
    """
    if method(inputs.dense.metadata["method"]).trains_base:
        return {"modules": (), "rank": 0, "places": 0}
    before = itertools.takewhile(lambda artifact: artifact.id != inputs.dense.id, inputs.artifacts)
    facts = [artifact.metadata for artifact in (*before, inputs.dense)]
    made = next(entry for entry in reversed(facts) if "places" in entry)
    return {key: made[key] for key in ("modules", "rank", "places")}


def providers(rows: Iterable[Candidate], device: Device) -> dict[str, str]:
    """The execution provider of each measured runtime, which its session has checked."""
    measured = {row.runtime for row in rows}
    return {name: runtime.computes_with(device) for name, runtime in RUNTIMES.items() if name in measured}


def real_passes(config: BenchmarkConfig, data: Data, seed: int) -> list[Pass]:
    """Validation rows of their own lengths in batches, drawn with the seed; none where they are not to be timed."""
    if not config.real_lengths:
        return []
    rows = model_rows(data.validation.draw(max(map(rows_of, config.batch)), seed).tokens)
    return passes_of([at_first_token(row) for row in rows], data.pad_id, config.batch)


def at_first_token(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """A row as it comes to a server: behind an encoder there is nothing but the decoder's start token."""
    if DECODER_IDS not in row:
        return row
    return {**{name: row[name] for name in ("input_ids", "attention_mask")}, DECODER_IDS: row[DECODER_IDS][:1]}


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
    variants: list[LatencyVariant], config: BenchmarkConfig, inputs: Inputs, workspace: Workspace
) -> dict[str, dict[str, Any]]:
    """Name of an exported file -> where its time goes on the CPU at the largest shape; a file without a profile is told."""
    files = [variant for variant in variants if variant.runtime in RUNTIMES]
    if not config.profile:
        return {}
    profiles = {}
    with workspace.progress("profiling", len(files)) as bar:
        for file in files:
            profile = measure_profile(file, max(config.batch), max(config.length), inputs.threads)
            if profile:
                profiles[file.name] = {"profile": profile}
            else:
                workspace.say(f"{file.name} has no profile: {RUNTIMES[file.runtime].title} gave none")
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


def share_of(
    limits: Limits | None,
    timing: Measurement,
    row: Candidate,
    shape: ModelShape,
    apart: dict[str, int] | None = None,
    computed: int | None = None,
    first: bool = False,
) -> dict[str, Any]:
    """The share of the machine's limit that a candidate reaches at one shape; empty where it is unknown. `computed`: the tokens
    of a row that a call computes, default all; `first`: the head reads the first token alone, and so do files."""
    if limits is None:
        return {}
    length, beside = computed or timing.length, apart["macs"] if apart else 0
    flops = shape.flops(length, timing.batch) + 2 * timing.batch * length * beside
    if first and row.runtime in RUNTIMES:
        flops -= timing.batch * shape.unread_flops(length)
    return limits.share(row.precision, flops, shape.read_weights + beside, timing.p50)


def against_control(judged: MetricInputs, control: MetricInputs | None) -> dict[str, Any]:
    """The 95 % interval of the difference from the control, where there is one."""
    return {"control_interval": list(judged.change_from(control))} if control else {}


def run(config: BenchmarkConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write measurements.json: one record per candidate, latencies of one interleaved run, and the machine."""
    data = load_data(inputs)
    with tempfile.TemporaryDirectory() as scratch:
        dense = merge_all(load_model(inputs.dense, inputs.base))
        save_checkpoint(dense, Path(scratch), inputs.base.folder)
        every, merged = candidates(inputs, Path(scratch)), inputs.nearest("model")
        skipped = left_out(every, config.device)
        rows = [row for row in every if row not in skipped]
        for row in skipped:
            workspace.say(f"{row.name} is not measured: {row.why_left_out}")
        models = {"dense": dense, "compressed": load_model(merged, inputs.base)}
        density = density_of(merged, models["compressed"])
        if not density:
            merge_all(models["compressed"])
        facts = (shape_of, nonzeros, reads_first_token)
        shapes, remaining, first = ({name: fact(model) for name, model in models.items()} for fact in facts)
        metric_inputs = {row.name: evaluate(row, data, workspace, inputs.threads, config.device) for row in rows}
        words = inputs_of(dense, inputs.base.folder, data)
        variants = [LatencyVariant(row.name, row.runtime, row.path, config.device, **words) for row in rows]
        limits = limits_of(config, inputs, workspace)
        grid = [(batch, length) for length in config.length for batch in config.batch]
        with workspace.progress("measuring latency", config.rounds * len(grid)) as bar:
            options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
            timings = measure(variants, grid, config.rounds, **options)
        real = timed_passes(variants, real_passes(config, data, inputs.seed), config, inputs, workspace)
        further = timed_tokens(variants, grid, config, inputs, workspace)
        profiles = profiles_of(variants, config, inputs, workspace)
    waited = max(timing.waited for timing in (*timings, *real, *further))
    if told := disturbance(waited):
        workspace.say(f"{told} (--force benchmark measures again)")
    delta = delta_of_dense(inputs)
    apart = {"dense": None, "compressed": inputs.nearest("onnx").metadata.get("apart")}
    reference, records = metric_inputs[rows[0].name], []
    recovery = control_of(inputs.artifacts)
    control = metric_inputs_of_control(recovery, data, reference.labels) if recovery else None
    for row in rows:
        low, high = metric_inputs[row.name].change_from(reference)
        records.append(
            {
                "name": row.name,
                "model": row.model,
                "runtime": row.runtime,
                "precision": row.precision,
                "bytes": row.bytes,
                "nonzeros": remaining[row.model],
                "density": density if row.model == "compressed" else [],
                "quality": metric_inputs[row.name].quality,
                "difference_interval": [low, high],
                **against_control(metric_inputs[row.name], control if row.model == "compressed" else None),
                **cost_of(shapes[row.model], shapes["dense"], config.length, delta, apart[row.model]),
                "latency": [
                    timing.to_json()
                    | share_of(limits, timing, row, shapes[row.model], apart[row.model], first=first[row.model])
                    for timing in timings
                    if timing.variant == row.name
                ],
                "real_lengths": [timing.to_json() for timing in real if timing.variant == row.name],
                "further_tokens": [
                    timing.to_json() | share_of(limits, timing, row, shapes[row.model], apart[row.model], computed=1)
                    for timing in further
                    if timing.variant == row.name
                ],
                **profiles.get(row.name, {}),
            }
        )
    result = {
        "device": config.device,
        "rounds": config.rounds,
        "machine": machine([STAGE], inputs.threads, packages_of(row.runtime for row in rows)),
        "limits": limits.to_json() if limits else None,
        "waited": waited,
        "providers": providers(rows, config.device),
        "baseline": rows[0].name,
        "control": {"stage": recovery.entry, **recovery.metadata[CONTROL]} if recovery else None,
        "candidates": records,
        "left_out": [{"name": row.name, "bytes": row.bytes, "why": row.why_left_out} for row in skipped],
    }
    (workspace.folder / "measurements.json").write_text(json.dumps(result, indent=1) + "\n")
    return {"candidates": [row.name for row in rows]}
