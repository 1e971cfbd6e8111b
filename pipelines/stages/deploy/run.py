"""The work of stage `deploy`: write the Triton model repository and compare it with a local session on a live server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.models.hub import end_id
from compressor.tasks.data import Data
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.deploy.config import DeployConfig
from pipelines.stages.loading import PARITY_ROWS, load_data
from pipelines.stages.parity_checks import compare_served
from serving.repository import write_repository


def contents(config: DeployConfig, inputs: Inputs, data: Data) -> tuple[str, str, Path, dict[str, Any]]:
    """(runtime, precision, model file, other contents of the repository): the compressed model, the base's tokenizer."""
    exported, base = inputs.nearest("onnx"), inputs.base.folder
    end = end_id(base)
    files = exported.metadata["files"]["compressed"]
    # in the order of the export's config: keys of stored metadata are sorted
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
    """Write repository/NAME with the compressed model and its tokenizer, and check it on the embedded server."""
    data, repository = load_data(inputs), workspace.folder / "repository"
    runtime, precision, path, options = contents(config, inputs, data)
    write_repository(repository, config.name, path, runtime=RUNTIMES[runtime], **options)
    rows = data.compared(PARITY_ROWS)
    result = compare_served(repository, config.name, RUNTIMES[runtime], path, rows, data, workspace, inputs.threads)
    return {"model": config.name, "runtime": runtime, "precision": precision, "parity": [result.to_json()]}
