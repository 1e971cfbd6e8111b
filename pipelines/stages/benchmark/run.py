"""The work of stage `benchmark`: measure quality, bytes, FLOPs and latency of every exported file against dense PyTorch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compressor.checkpoint import save_checkpoint
from compressor.deltas.links import merge_all
from compressor.tasks.data import MetricInputs
from export.latency.core_time import disturbance
from export.latency.measure import LatencyVariant
from export.runtimes.runtime import Device
from export.runtimes.runtime_registry import RUNTIMES, packages_of
from pipelines.engine.environment import machine
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.benchmark.config import STAGE, BenchmarkConfig
from pipelines.stages.benchmark.costs import ModelFacts, cost_of, facts_of_models, share_of
from pipelines.stages.benchmark.measured_files import Candidate, candidates, evaluate, left_out
from pipelines.stages.benchmark.timings import Timings, inputs_of, timed
from pipelines.stages.loading import load_data, load_model
from pipelines.stages.recover.config import CONTROL
from pipelines.stages.recover.control import control_of, metric_inputs_of_control


def providers(rows: Iterable[Candidate], device: Device) -> dict[str, str]:
    """The execution provider of each measured runtime, which its session has checked."""
    measured = {row.runtime for row in rows}
    return {name: runtime.computes_with(device) for name, runtime in RUNTIMES.items() if name in measured}


def quality_of(judged: MetricInputs, reference: MetricInputs, control: MetricInputs | None) -> dict[str, Any]:
    """A candidate's quality, and the 95 % intervals of its differences from the reference and from a control."""
    against = {"control_interval": list(judged.change_from(control))} if control else {}
    return {"quality": judged.quality, "difference_interval": list(judged.change_from(reference)), **against}


def times_of(row: Candidate, model: ModelFacts, timings: Timings) -> dict[str, Any]:
    """A candidate's times, with the shares of the machine's limits that they are."""

    def record(timing, calls: Iterable[tuple[int, int]], first: bool = model.reads_first) -> dict[str, Any]:
        share = share_of(timings.limits, timing.p50, calls, row, model.shape, model.apart, first)
        return timing.to_json() | share

    every = (timings.shapes, timings.real, timings.further)
    shapes, real, further = ([timing for timing in made if timing.variant == row.name] for made in every)
    return {
        "latency": [record(timing, [(timing.batch, timing.length)]) for timing in shapes],
        "real_lengths": [record(timing, timing.batch_shapes) for timing in real],
        # one token at a time, and every one of them is read
        "further_tokens": [record(timing, [(timing.batch, 1)], first=False) for timing in further],
        **timings.profiles.get(row.name, {}),
    }


def run(config: BenchmarkConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write measurements.json: one record per candidate, latencies of one interleaved run, and the machine."""
    data = load_data(inputs)
    with tempfile.TemporaryDirectory() as scratch:
        dense = merge_all(load_model(inputs.dense, inputs.base))
        save_checkpoint(dense, Path(scratch), inputs.base.folder)
        every = candidates(inputs, Path(scratch))
        skipped = left_out(every, config.device)
        rows = [row for row in every if row not in skipped]
        for row in skipped:
            workspace.say(f"{row.name} is not measured: {row.why_left_out}")
        models = facts_of_models(dense, inputs)
        judged = {row.name: evaluate(row, data, workspace, inputs.threads, config.device) for row in rows}
        words = inputs_of(dense, inputs.base.folder, data)
        variants = [LatencyVariant(row.name, row.runtime, row.path, config.device, **words) for row in rows]
        timings = timed(variants, data, config, inputs, workspace)
    if told := disturbance(timings.waited):
        workspace.say(f"{told} (--force benchmark measures again)")
    reference, recovery = judged[rows[0].name], control_of(inputs.artifacts)
    control = metric_inputs_of_control(recovery, data, reference.labels) if recovery else None
    records = [
        {
            "name": row.name,
            "model": row.model,
            "runtime": row.runtime,
            "precision": row.precision,
            "bytes": row.bytes,
            "nonzeros": model.nonzeros,
            "density": model.density,
            **quality_of(judged[row.name], reference, control if row.model == "compressed" else None),
            **cost_of(model.shape, models["dense"].shape, config.length, model.deltas, model.apart),
            **times_of(row, model, timings),
        }
        for row in rows
        for model in [models[row.model]]
    ]
    result = {
        "device": config.device,
        "rounds": config.rounds,
        "machine": machine([STAGE], inputs.threads, packages_of(row.runtime for row in rows)),
        "limits": timings.limits.to_json() if timings.limits else None,
        "waited": timings.waited,
        "providers": providers(rows, config.device),
        "baseline": rows[0].name,
        "control": {"stage": recovery.entry, **recovery.metadata[CONTROL]} if recovery else None,
        "candidates": records,
        "left_out": [{"name": row.name, "bytes": row.bytes, "why": row.why_left_out} for row in skipped],
    }
    (workspace.folder / "measurements.json").write_text(json.dumps(result, indent=1) + "\n")
    return {"candidates": [row.name for row in rows]}
