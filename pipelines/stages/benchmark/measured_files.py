"""What is measured: dense PyTorch and every exported file, and how good each is on the validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compressor.checkpoint import load
from compressor.tasks.data import Data, MetricInputs
from compressor.tasks.features import torch_forward
from export.runtimes import sessions
from export.runtimes.runtime import Device
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.loading import judge_rows


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
    """Dense PyTorch, then every exported file, those for CUDA too: dense ones first, runtimes as the export names them."""
    exported = inputs.nearest("onnx")
    weights = sum(path.stat().st_size for path in dense_folder.glob("*.safetensors"))
    rows = [Candidate("dense PyTorch fp32", "dense", "pytorch", "fp32", dense_folder, weights)]
    for model in ("dense", "compressed"):
        written = exported.metadata["files"][model]  # in stored metadata keys are sorted
        for runtime in (name for name in exported.metadata["runtimes"] if name in written):
            for precision, file in written[runtime].items():
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
