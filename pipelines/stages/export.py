"""Stage `export`: the dense and the compressed model as ONNX, fp32 and dynamic int8, each proven against PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from pipelines.loading import Data, Rows


class ExportConfig(StageConfig):
    """`precision` lists what is written; fp32 is always made, since int8 is quantized from it."""

    precision: list[Literal["fp32", "int8"]] = Field(default=["fp32", "int8"], min_length=1)

    @field_validator("precision", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


def check(config: ExportConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    models = [entry for entry in earlier if entry.name in ("tune", "prune", "recover", "merge")]
    if models and models[-1].name != "merge":
        yield Problem("E504", f"'{models[-1].id}' leaves deltas that are not merged", "Put a merge before export")


def export_one(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, threads: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write NAME/*.onnx and compare each with PyTorch on all validation rows.

    Returns the parity records and the files: precision -> {"path", "bytes", "quality"}. Raises CheckError E6xx.
    """
    from compressor.tasks.features import pad, torch_forward
    from export.onnx import export_onnx
    from export.sessions import run as run_onnx
    from export.sessions import session
    from pipelines.hops import ask, compare_graph, runs
    from pipelines.loading import quality

    rows = data.validation
    sample = pad(data.validation.sample(2).tokens, data.pad_id)
    folder = workspace.folder / name
    with workspace.progress(f"exporting {name} to ONNX", 1) as bar:
        paths = export_onnx(model, sample, folder, precisions=tuple(config.precision))
        bar.advance()
    reference = ask(torch_forward(model), rows, data, workspace, f"{name} in PyTorch")
    parity, files = [], {}
    for precision in config.precision:
        path = paths[precision]
        live = session(path, threads=threads)
        hop, kind = f"{name}: PyTorch -> ONNX {precision}", "onnx" if precision == "fp32" else precision
        with runs(hop):
            answers = ask(partial(run_onnx, live), rows, data, workspace, f"{name} in ONNX {precision}")
        result = compare_graph(hop, kind, model, reference, path, answers, rows, data)
        parity.append(result.to_json())
        size = sum(file.stat().st_size for file in folder.glob(f"{path.name}*"))
        files[precision] = {"path": f"{name}/{path.name}", "bytes": size, "quality": quality(answers.logits, rows.labels)}
    return parity, files


def onnx_logits(
    path: Path,
    rows: Rows,
    data: Data,
    workspace: Workspace,
    description: str,
    *,
    threads: int | None,
    batch_size: int = 32,
) -> np.ndarray:
    """Logits (rows, classes) of an ONNX file in ONNX Runtime."""
    from export.sessions import run, session
    from pipelines.loading import predict_rows

    live = session(path, threads=threads)
    return predict_rows(lambda encoding: run(live, encoding), rows, data, workspace, description, batch_size)


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
        records, files[name] = export_one(name, model, config, data, workspace, inputs.threads)
        parity += records
    return {"files": files, "parity": parity, "labels": data.label_names}


STAGE = Stage(
    name="export",
    summary="write ONNX in fp32 and int8, dense and compressed, each proven against PyTorch",
    config=ExportConfig,
    produces="onnx",
    needs=("model",),
    uses_dense=True,
    packages=("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    run=run,
    check=check,
)
