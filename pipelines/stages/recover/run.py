"""The work of stage `recover`: train the pruned model with a fresh optimizer, by default with the dense model as teacher."""

from __future__ import annotations

from typing import Any

from compressor.methods import method
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.loading import load_data
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.recover.control import train_control
from pipelines.stages.recover.lessons import facts_of, lessons_of
from pipelines.stages.recover.preparing import prepare, teaching
from pipelines.stages.trainings import load_options, starting_model, train_and_save


def run(config: RecoverConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Train the control, then the pruned model, each with a fresh optimizer and schedule; write the state of the second."""
    data, previous = load_data(inputs), inputs.nearest("model")
    lessons = lessons_of(config, inputs, data, workspace)
    control = train_control(config, inputs, workspace, data, lessons)
    model = starting_model(inputs, data)
    settings = prepare(model, config, previous.metadata["method"], lambda group: load_options(config, inputs, group))
    taught = teaching(config, model, inputs, lessons.logits)
    metadata = train_and_save(model, config, inputs, workspace, lessons.data, row=method(settings["method"]), **taught)
    facts = {"distill": config.distill, **facts_of(config, lessons, inputs)}
    return {**metadata, **settings, **facts, **({"control": control} if control else {})}
