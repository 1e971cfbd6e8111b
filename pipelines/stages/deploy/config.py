"""Stage `deploy`: a Triton model repository, proven on a live Triton server before it is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compressor.errors import CheckError, UserError
from export.graph.half import FOR_CUDA
from pipelines.engine.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace
from pipelines.file import limits

if TYPE_CHECKING:
    from pathlib import Path

    from compressor.account import Plan
    from pipelines.stages.loading import Data


class DeployConfig(StageConfig):
    """`name` is the model's name on the server; `runtime` is its Triton backend, by default the first that export names;
    `precision` defaults to int8 where it was exported."""

    name: str = Field(
        default="model",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=limits.NAME,
        description="the model's name on the server",
    )
    runtime: Literal["onnxruntime", "openvino"] | None = Field(
        default=None, description="what serves it, default the first that export names"
    )
    precision: Literal["fp32", "int8"] | None = Field(default=None, description="of the file, default int8 where exported")
    max_batch_size: int = Field(default=32, ge=1, le=limits.BATCH, description="rows of a batch at most")
    max_queue_delay_us: int = Field(
        default=500, ge=0, le=limits.MICROSECONDS, description="how long dynamic batching waits for company, µs"
    )

    def chosen(self, runtimes: Sequence[str], files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
        """The runtime and the precision that are deployed, out of the compressed `files` (runtime -> precision -> file) that
        passed. Raises CheckError E616 where what is asked for was left out."""
        left = [name for name in runtimes if name in files and self.runtime in (None, name)]
        for runtime in left:
            for precision in ("int8", "fp32"):
                if precision in files[runtime] and self.precision in (None, precision):
                    return runtime, precision
        asked = " ".join(filter(None, (self.runtime, self.precision))) or "int8 or fp32"
        what = f"nothing to deploy: {asked} did not pass its comparison and was left out by the export"
        raise CheckError("E616", what, "See what failed in the report, or deploy another precision")


def check(config: DeployConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    exports = [entry for entry in earlier if entry.name == "export"]
    for key in ("runtime", "precision") if exports else ():
        wanted, exported = getattr(config, key), exports[-1].config
        if wanted and exported.auto:
            yield Problem("E725", f"'{exports[-1].id}' chooses the {key} itself (precision: auto)", "Remove it", (key,))
        elif wanted and wanted not in getattr(exported, key):
            yield Problem("E725", f"{wanted} is not exported", f"Add it to export.{key}", (key,))

    if exports and set(exports[-1].config.precision) <= set(FOR_CUDA):
        mend = f"Add fp32 to precision in '{exports[-1].id}'"
        yield Problem("E643", "every exported file is for CUDA, and Triton is tried on the CPU here", mend)


def plan(config: DeployConfig, plan: Plan) -> Plan:
    """Raises UserError E726 for a model that generates."""
    from compressor.models.hub import GENERATES, auto_class_of

    if auto_class_of(plan.model) == GENERATES:
        what = "a model that generates is not served: its cache would have to live on the server from token to token"
        raise UserError("E726", what, "Leave out deploy; `export.generation.greedy` generates with what export writes")
    return plan


def contents(config: DeployConfig, inputs: Inputs, data: Data) -> tuple[str, str, Path, dict[str, Any]]:
    """(runtime, precision, model file, what else a repository is written from): the compressed model, the base's tokenizer."""
    from compressor.models.hub import end_id

    exported, base = inputs.nearest("onnx"), inputs.base.folder
    end = end_id(base)
    files = exported.metadata["files"]["compressed"]
    # as export names them: the keys of stored metadata are sorted
    runtimes = exported.metadata.get("runtimes") or list(files)
    runtime, precision = config.chosen(runtimes, files)
    options = {
        "labels": data.label_names,
        "tokenizer_folder": base,
        "max_batch_size": config.max_batch_size,
        "max_queue_delay_us": config.max_queue_delay_us,
        "parameters": {
            "task": inputs.task.kind,
            "max_length": inputs.task.max_length,
            "pad_id": data.pad_id,
            **({} if end is None else {"end_id": end}),
        },
    }
    return runtime, precision, exported.folder / files[runtime][precision]["path"], options


def run(config: DeployConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write repository/NAME with the compressed model and its tokenizer, and prove it on the embedded server."""
    from pipelines.stages.hops import compare_served
    from pipelines.stages.loading import PARITY_ROWS, load_data
    from serving.repository import write_repository

    data, repository = load_data(inputs), workspace.folder / "repository"
    runtime, precision, path, options = contents(config, inputs, data)
    write_repository(repository, config.name, path, **options)
    rows = data.compared(PARITY_ROWS)
    result = compare_served(repository, config.name, path, rows, data, workspace, inputs.threads)
    return {"model": config.name, "runtime": runtime, "precision": precision, "parity": [result.to_json()]}


STAGE = Stage(
    name="deploy",
    summary="write a Triton model repository and prove it on a live server",
    config=DeployConfig,
    produces="repository",
    needs=("onnx",),
    packages=("onnxruntime", "nvidia-pytriton", "tritonclient", "tokenizers"),
    version=3,
    extras=lambda config: ("openvino",) if config.runtime == "openvino" else (),
    run=run,
    check=check,
    plan=plan,
    optional=True,
)
