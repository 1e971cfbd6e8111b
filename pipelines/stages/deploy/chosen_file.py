"""Which of the compressed model's exported files is deployed."""

from __future__ import annotations

from pathlib import Path

from pipelines.engine.stage import Inputs
from pipelines.stages.deploy.config import DeployConfig


def chosen_file(config: DeployConfig, inputs: Inputs) -> tuple[str, str, Path]:
    """(runtime, precision, path). Raises CheckError E616."""
    exported = inputs.nearest("onnx")
    files = exported.metadata["files"]["compressed"]
    # in the order of the export's config: keys of stored metadata are sorted
    runtime, precision = config.chosen(exported.metadata.get("runtimes") or list(files), files)
    return runtime, precision, exported.folder / files[runtime][precision]["path"]
