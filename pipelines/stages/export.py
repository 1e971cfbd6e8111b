"""Stage `export`: the dense and the compressed model for each runtime, in fp32 and int8, each proven against PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from pipelines.loading import Data


WORDS = {"onnxruntime": "ONNX", "openvino": "OpenVINO"}
"""What a runtime is called in names of hops and variants."""
CALIBRATION_ROWS, CALIBRATION_BATCH = 128, 8


class ExportConfig(StageConfig):
    """`precision` and `runtime` list what is written, each precision for each runtime. int8 is dynamic in ONNX Runtime and
    static in OpenVINO: calibrated on `calibration_rows` training rows (default 128), drawn at random with the seed."""

    precision: list[Literal["fp32", "int8"]] = Field(default=["fp32", "int8"], min_length=1)
    runtime: list[Literal["onnxruntime", "openvino"]] = Field(default=["onnxruntime"], min_length=1)
    calibration_rows: int | None = Field(default=None, ge=1, description="training rows that static int8 is calibrated on")

    @field_validator("precision", "runtime", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def check(config: ExportConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    models = [entry for entry in earlier if entry.name in ("tune", "prune", "recover", "merge")]
    if models and models[-1].name != "merge":
        yield Problem("E504", f"'{models[-1].id}' leaves deltas that are not merged", "Put a merge before export")
    if config.calibration_rows and not ("openvino" in config.runtime and "int8" in config.precision):
        mend = "Remove it, or export int8 for the runtime openvino"
        yield Problem("E606", "nothing here is calibrated", mend, ("calibration_rows",))


def export_one(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write NAME/model* for every runtime and precision and compare each with PyTorch on all validation rows.

    Returns the parity records and the files: runtime -> precision -> {"path", "bytes", "quality"}. Raises CheckError E6xx.
    """
    from compressor.tasks.features import torch_forward
    from export.sessions import run as run_session
    from export.sessions import session
    from pipelines.hops import ask, compare_graph, runs

    rows = data.validation
    paths = write(name, model, config, data, workspace, inputs.seed)
    reference = ask(torch_forward(model), rows, data, workspace, f"{name} in PyTorch")
    parity, files = [], {}
    for (runtime, precision), path in paths.items():
        words = f"{WORDS[runtime]} {precision}"
        live = session(path, threads=inputs.threads)
        hop, kind = f"{name}: PyTorch -> {words}", "onnx" if precision == "fp32" else precision
        with runs(hop):
            answers = ask(partial(run_session, live), rows, data, workspace, f"{name} in {words}")
        result = compare_graph(hop, kind, model, reference, path, answers, rows, data)
        parity.append(result.to_json())
        record = {"path": f"{name}/{path.name}", "bytes": stored_bytes(path), "quality": rows.quality(answers.logits)}
        files.setdefault(runtime, {})[precision] = record
    return parity, files


def stored_bytes(path: Path) -> int:
    """Bytes of a graph and of the weights beside it, where they are not inside."""
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")
    return sum(file.stat().st_size for file in (path, weights) if file.is_file())


def write(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, seed: int
) -> dict[tuple[str, str], Path]:
    """Trace once and write every file: (runtime, precision) -> path."""
    from compressor.tasks.features import pad
    from export.onnx import can_fuse, trace, write_onnx
    from export.openvino import export_openvino

    folder, paths = workspace.folder / name, {}
    with workspace.progress(f"exporting {name}", 1 + len(config.runtime)) as bar:
        graph = trace(model, pad(data.validation.sample(2).tokens, data.pad_id))
        bar.advance()
        for runtime in config.runtime:
            if runtime == "onnxruntime":
                made = write_onnx(graph, folder, precisions=config.precision, fuse=can_fuse(model))
            else:
                drawn = data.train.draw(config.calibration_rows or CALIBRATION_ROWS, seed).tokens
                # as they come, so that they are padded as a server's batches are
                starts = range(0, len(drawn), CALIBRATION_BATCH)
                rows = [pad(drawn[start : start + CALIBRATION_BATCH], data.pad_id) for start in starts]
                made = export_openvino(graph, folder, precisions=config.precision, rows=rows)
            paths |= {(runtime, precision): path for precision, path in made.items()}
            bar.advance()
    return paths


def run(config: ExportConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Export the dense model (the last tuned one, merged) and the compressed one, and prove both."""
    from compressor.deltas import merge_all
    from pipelines.loading import load_data, load_model

    data = load_data(inputs)
    models = {
        "dense": merge_all(load_model(inputs.dense, inputs.base)),
        "compressed": load_model(inputs.nearest("model"), inputs.base),
    }
    parity, files = [], {}
    for name, model in models.items():
        records, files[name] = export_one(name, model, config, data, workspace, inputs)
        parity += records
    return {"files": files, "parity": parity, "labels": data.label_names}


STAGE = Stage(
    name="export",
    summary="write fp32 and int8 for ONNX Runtime and OpenVINO, dense and compressed, each proven against PyTorch",
    config=ExportConfig,
    produces="onnx",
    needs=("model",),
    uses_dense=True,
    packages=("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    extras=lambda config: ("openvino", "nncf") if "openvino" in config.runtime else (),
    version=2,
    run=run,
    check=check,
)
