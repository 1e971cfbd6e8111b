"""Stage `deploy`: a Triton model repository, proven on a live Triton server before it is published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.loading import Data


class DeployConfig(StageConfig):
    """`name` is the model's name on the server; `runtime` is its Triton backend, by default the first that export names;
    `precision` defaults to int8 where it was exported."""

    name: str = Field(default="model", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    runtime: Literal["onnxruntime", "openvino"] | None = None
    precision: Literal["fp32", "int8"] | None = None
    max_batch_size: int = Field(default=32, ge=1)
    max_queue_delay_us: int = Field(default=500, ge=0, description="how long dynamic batching waits for company, µs")

    def chosen(self, runtimes: Sequence[str], precisions: Sequence[str]) -> tuple[str, str]:
        """The runtime and the precision that are deployed, out of those exported."""
        return self.runtime or runtimes[0], self.precision or ("int8" if "int8" in precisions else "fp32")


def check(config: DeployConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    exports = [entry for entry in earlier if entry.name == "export"]
    for key in ("runtime", "precision") if exports else ():
        wanted = getattr(config, key)
        if wanted and wanted not in getattr(exports[-1].config, key):
            yield Problem("E725", f"{wanted} is not exported", f"Add it to export.{key}", (key,))


def prove(config: DeployConfig, inputs: Inputs, runtime: str, path: Path, data: Data, workspace: Workspace) -> dict[str, Any]:
    """Start Triton on the repository and compare its answers with a local session. Raises CheckError, UserError E7xx."""
    from export.parity import compare, require
    from pipelines.loading import PARITY_ROWS, predict_rows
    from pipelines.stages.export import session_logits
    from serving.client import Client
    from serving.server import EmbeddedServer

    rows = data.validation.sample(PARITY_ROWS)
    # one batch size on both sides: dynamic int8 scales depend on what shares a batch
    batch = min(32, config.max_batch_size)
    local = session_logits(path, runtime, rows, data, workspace, "local session", threads=inputs.threads, batch_size=batch)
    with (
        EmbeddedServer(workspace.folder / "repository", log_path=workspace.log_folder / "triton.log") as server,
        Client(server.url) as client,
    ):
        wanted = {field["name"] for field in client.config(config.name)["input"]}

        def forward(encoding):
            features = {name: values for name, values in encoding.items() if name in wanted}
            return client.infer(config.name, features)["logits"]

        served = predict_rows(forward, rows, data, workspace, "through the live server", batch)
    result = compare("local session -> Triton", "served", local, served, rows.labels)
    require(result)
    return result.to_json()


def run(config: DeployConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write repository/NAME with the compressed model and its tokenizer, and prove it on the embedded server."""
    from pipelines.loading import load_data
    from serving.repository import write_repository

    data, exported = load_data(inputs), inputs.nearest("onnx")
    files = exported.metadata["files"]["compressed"]
    runtime, precision = config.chosen(list(files), list(next(iter(files.values()))))
    path = exported.folder / files[runtime][precision]["path"]
    write_repository(
        workspace.folder / "repository",
        config.name,
        path,
        labels=data.label_names,
        tokenizer_folder=inputs.base.folder,
        max_batch_size=config.max_batch_size,
        max_queue_delay_us=config.max_queue_delay_us,
        parameters={"task": inputs.task.kind, "max_length": inputs.task.max_length},
    )
    parity = prove(config, inputs, runtime, path, data, workspace)
    return {"model": config.name, "runtime": runtime, "precision": precision, "parity": [parity]}


STAGE = Stage(
    name="deploy",
    summary="write a Triton model repository and prove it on a live server",
    config=DeployConfig,
    produces="repository",
    needs=("onnx",),
    packages=("onnxruntime", "nvidia-pytriton", "tritonclient", "tokenizers"),
    extras=lambda config: ("openvino",) if config.runtime == "openvino" else (),
    run=run,
    check=check,
)
