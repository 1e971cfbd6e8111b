"""The work of stage `deploy`: write the Triton model repository and compare it with a local session on a live server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from compressor.tasks.data import Data
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.deploy.chosen_file import chosen_file, deployment
from pipelines.stages.deploy.config import DeployConfig
from pipelines.stages.deploy.generating import deploy_generator
from pipelines.stages.deploy.recording import record_answers
from pipelines.stages.loading import load_data
from pipelines.stages.served_checks import Served, compare_served
from serving.layout.model_limits import limits_of
from serving.layout.version_file import VersionFacts
from serving.repository import write_repository


def deployed_as(config: DeployConfig, inputs: Inputs, data: Data, repository: Path) -> tuple[Served, dict[str, Any]]:
    """The compressed model as it is served from `repository`, and what else is written there: `write_repository`'s options."""
    runtime, precision, path = chosen_file(config, inputs)
    options = {
        "facts": facts_of(inputs, data, precision),
        "tokenizer_folder": inputs.base.folder,
        "interfaces": config.interfaces,
        "knobs": config.knobs,
    }
    return Served(repository, config.name, RUNTIMES[runtime], path, tuple(config.interfaces), config.knobs, precision), options


def facts_of(inputs: Inputs, data: Data, precision: str) -> VersionFacts:
    """What the server and its clients must know of the model."""
    task = inputs.task
    return VersionFacts(
        task=task.kind,
        labels=tuple(data.label_names),
        max_length=task.max_length,
        pad_id=data.pad_id,
        pair=data.kind.pair(task),
        precision=precision,
        **limits_of(inputs.base.folder, task.max_length),
    )


def run(config: DeployConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write repository/NAME and NAME-text with the compressed model and its tokenizer; check them on the embedded server."""
    data = load_data(inputs)
    if data.kind.generates:
        return deploy_generator(config, inputs, data, workspace)
    served, options = deployed_as(config, inputs, data, workspace.folder / "repository")
    write_repository(served.repository, served.name, served.path, runtime=served.runtime, **options)
    record = partial(record_answers, served, inputs.task, data)
    results = compare_served(served, inputs.task, data, workspace, inputs.threads, record)
    parity = [result.to_json() for result in results]
    return deployment(config, served.runtime.key, served.precision, config.interfaces, parity)
