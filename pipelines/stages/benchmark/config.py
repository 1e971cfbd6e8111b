"""Stage `benchmark`: quality, size, FLOPs and latency of the dense and the compressed model, runtime by runtime."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from compressor.models.modules import STRUCTURES
from export.graph.half import FOR_CUDA
from pipelines.engine.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace
from pipelines.file import limits
from pipelines.stages.export.config import WORDS

if TYPE_CHECKING:
    from compressor.cost import ModelShape
    from export.runtimes.sessions import Device
    from pipelines.stages.loading import Data, Judged


class BenchmarkConfig(StageConfig):
    """Interleaved rounds over every runtime; one process a runtime, so that idle thread pools disturb nobody."""

    batch: list[Annotated[int, Field(gt=0, le=limits.BATCH)]] = Field(
        default=[1, 8], min_length=1, max_length=limits.LIST, description="rows of a pass that is timed"
    )
    length: list[Annotated[int, Field(gt=0, le=limits.TOKENS)]] = Field(
        default=[128], min_length=1, max_length=limits.LIST, description="tokens a row"
    )
    rounds: int = Field(default=20, ge=3, le=limits.ROUNDS, description="times that every file is timed, in turn")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="what computes")


def check(config: BenchmarkConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    exports = [entry for entry in earlier if entry.name == "export"]
    # ONNX Runtime has no CUDA kernel for DynamicQuantizeLinear and places it on the CPU without a word. Forbidding every
    # node on the CPU (session.disable_cpu_ep_fallback) is no way out: the shape arithmetic of fp32 graphs belongs there
    if config.device == "cuda" and exports and "openvino" in exports[-1].config.runtime:
        mend = f"Use device: cpu, or runtime: [onnxruntime] in '{exports[-1].id}'"
        yield Problem("E604", "OpenVINO runs on the CPU", mend, ("device",))
    if config.device == "cuda" and exports and "int8" in exports[-1].config.possible:
        mend = f"Use device: cpu, or precision: [fp32] in '{exports[-1].id}'"
        yield Problem("E604", "dynamic int8 would run partly on the CPU", mend, ("device",))

    if config.device == "cpu" and exports and set(exports[-1].config.precision) <= set(FOR_CUDA):
        mend = f"Use device: cuda, or add fp32 to precision in '{exports[-1].id}'"
        yield Problem("E643", "every exported file is for CUDA", mend, ("device",))


@dataclass(frozen=True)
class Candidate:
    """One thing that is measured. `path` is a file of the runtime, or a checkpoint folder for PyTorch."""

    name: str
    model: str
    runtime: str
    precision: str
    path: Path
    bytes: int


def candidates(inputs: Inputs, dense_folder: Path) -> list[Candidate]:
    """Dense PyTorch, then every exported file, dense first; those for CUDA too."""
    exported = inputs.nearest("onnx")
    weights = sum(path.stat().st_size for path in dense_folder.glob("*.safetensors"))
    rows = [Candidate("dense PyTorch fp32", "dense", "pytorch", "fp32", dense_folder, weights)]
    for model in ("dense", "compressed"):
        for runtime, files in exported.metadata["files"][model].items():
            for precision, file in files.items():
                name = f"{model} {WORDS[runtime]} {precision}"
                rows.append(Candidate(name, model, runtime, precision, exported.folder / file["path"], file["bytes"]))
    return rows


def left_out(rows: list[Candidate], device: str) -> list[Candidate]:
    """Files that this device is not for."""
    return [row for row in rows if device == "cpu" and row.precision in FOR_CUDA]


def judged_of(candidate: Candidate, data: Data, workspace: Workspace, threads: int | None, device: str = "cpu") -> Judged:
    """How good the candidate is on all validation rows in its own runtime; a file for CUDA on the `device` that is measured."""
    from compressor.checkpoint import load
    from compressor.tasks.features import torch_forward
    from export.runtimes.sessions import run, session
    from pipelines.stages.loading import judge_rows

    if candidate.runtime == "pytorch":
        forward = torch_forward(load(candidate.path))
    else:
        device = device if candidate.precision in FOR_CUDA else "cpu"
        forward = partial(run, session(candidate.path, device=device, threads=threads))
    return judge_rows(forward, data.validation, data, workspace, candidate.name)


def cost_of(
    shape: ModelShape, dense: ModelShape, lengths: list[int], delta: dict[str, Any], apart: dict[str, int] | None = None
) -> dict[str, Any]:
    """Parameters, FLOPs of one row by length, the papers' FLOPs ratio (unmerged delta of tune, linear layers only), and how
    much of this adapters and prefixes are, and deltas that were kept `apart` (their parameters and multiply-adds a token)."""
    from compressor.cost import paper_flops_ratio

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


def delta_of_tune(tuned: dict[str, Any]) -> dict[str, Any]:
    """What the tune's unmerged delta costs, for the papers' FLOPs: modules, rank and places (nothing after full tuning)."""
    if tuned["method"] == "full":
        return {"modules": (), "rank": 0, "places": 0}
    return {key: tuned[key] for key in ("modules", "rank", "places")}


def providers(rows: Iterable[Candidate], device: Device) -> dict[str, str]:
    """What computes in each runtime that is measured: its session has asserted it."""
    from export.runtimes.sessions import PROVIDERS

    every = {"onnxruntime": PROVIDERS[device], "openvino": "CPU, fp32 around int8"}
    return {name: every[name] for name in every if any(row.runtime == name for row in rows)}


def run(config: BenchmarkConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write measurements.json: one record a candidate, latencies of one interleaved run, and the machine."""
    from compressor.checkpoint import save_checkpoint
    from compressor.cost import shape_of
    from compressor.deltas.links import merge_all
    from compressor.models.hub import end_id
    from compressor.pruning.weights import nonzeros
    from export.latency.measure import Variant, measure
    from pipelines.engine.environment import machine
    from pipelines.stages.loading import load_data, load_model

    data = load_data(inputs)
    with tempfile.TemporaryDirectory() as scratch:
        dense = merge_all(load_model(inputs.dense, inputs.base))
        save_checkpoint(dense, Path(scratch), inputs.base.folder)
        every, merged = candidates(inputs, Path(scratch)), inputs.nearest("model")
        skipped = left_out(every, config.device)
        rows = [row for row in every if row not in skipped]
        for row in skipped:
            workspace.say(f"{row.name} is not measured: a file for CUDA")
        models = {"dense": dense, "compressed": merge_all(load_model(merged, inputs.base))}
        shapes, left = ({name: count(model) for name, model in models.items()} for count in (shape_of, nonzeros))
        judged = {row.name: judged_of(row, data, workspace, inputs.threads, config.device) for row in rows}
        words = {"vocabulary": dense.config.vocab_size, "end": end_id(inputs.base.folder)}
        variants = [Variant(row.name, row.runtime, row.path, config.device, **words) for row in rows]
        grid = [(batch, length) for length in config.length for batch in config.batch]
        with workspace.progress("measuring latency", config.rounds * len(grid)) as bar:
            options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
            timings = measure(variants, grid, config.rounds, **options)
    delta = delta_of_tune(inputs.dense.metadata)
    apart = {"dense": None, "compressed": inputs.nearest("onnx").metadata.get("apart")}
    reference, records = judged[rows[0].name], []
    for row in rows:
        low, high = judged[row.name].change_from(reference)
        records.append(
            {
                "name": row.name,
                "model": row.model,
                "runtime": row.runtime,
                "precision": row.precision,
                "bytes": row.bytes,
                "nonzeros": left[row.model],
                "density": merged.metadata.get("density", []) if row.model == "compressed" else [],
                "quality": judged[row.name].quality,
                "difference_interval": [low, high],
                **cost_of(shapes[row.model], shapes["dense"], config.length, delta, apart[row.model]),
                "latency": [timing.to_json() for timing in timings if timing.variant == row.name],
            }
        )
    result = {
        "device": config.device,
        "rounds": config.rounds,
        "machine": machine([STAGE], inputs.threads, {"openvino"} & {row.runtime for row in rows}),
        "providers": providers(rows, config.device),
        "baseline": rows[0].name,
        "candidates": records,
        "left_out": [{"name": row.name, "bytes": row.bytes, "why": "a file for CUDA"} for row in skipped],
    }
    (workspace.folder / "measurements.json").write_text(json.dumps(result, indent=1) + "\n")
    return {"candidates": [row.name for row in rows]}


STAGE = Stage(
    name="benchmark",
    summary="measure quality, bytes, FLOPs and latency of every exported model against dense PyTorch",
    config=BenchmarkConfig,
    produces="measurements",
    needs=("model", "onnx"),
    uses_dense=True,
    packages=("torch", "transformers", "onnxruntime"),
    version=7,
    run=run,
    check=check,
    lengths=lambda config: [(("length", place), length) for place, length in enumerate(config.length)],
)
