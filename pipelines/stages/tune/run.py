"""The work of stage `tune`: attach the method to the model, train it, and write the state."""

from __future__ import annotations

from typing import Any

from compressor.compression import compression_of
from compressor.methods import (
    apply,
    method,
)
from compressor.models.build import HEAD_ORIGINS
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.loading import load_data
from pipelines.stages.trainings import load_options, settings_of, starting_model, train_and_save
from pipelines.stages.tune.config import TuneConfig
from pipelines.stages.tune.many_tasks import tune_tasks


def run(config: TuneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Build the model with its task head, attach the method's deltas, train, and write the state (of many tasks: files)."""
    if inputs.tasks:
        return tune_tasks(config, inputs, workspace)
    data = load_data(inputs)
    model = starting_model(inputs, data)
    origin = compression_of(model).head_origin
    if origin != "fresh":
        workspace.say(HEAD_ORIGINS[origin])
    options = load_options(config, inputs, group="1")
    row = method(config.method)
    apply(model, row.name, options)
    metadata = train_and_save(model, config, inputs, workspace, data, row=row)
    return {**metadata, **settings_of(row, options, model), "head": origin}
