"""Which of the compressed model's exported files is deployed, and what the artifact says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.engine.stage import Inputs
from pipelines.stages.deploy.config import DeployConfig


def chosen_file(config: DeployConfig, inputs: Inputs) -> tuple[str, str, Path]:
    """(runtime, precision, path). Raises CheckError E616."""
    exported = inputs.nearest("onnx")
    files = exported.metadata["files"]["compressed"]
    # in the order of the export's config: keys of stored metadata are sorted
    runtime, precision = config.chosen(exported.metadata["runtimes"], files)
    return runtime, precision, exported.folder / files[runtime][precision]["path"]


def deployment(
    config: DeployConfig, runtime: str, precision: str, interfaces: Sequence[str], parity: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the stage's artifact says of a served file, whatever its kind of task: reports and checks of runs read it."""
    served = {"runtime": runtime, "precision": precision, "device": config.device}
    return {"model": config.name, "interfaces": list(interfaces), **served, "parity": parity}
