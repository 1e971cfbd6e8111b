"""The work of stage `recover`: train the pruned model with a fresh optimizer, by default with the dense model as teacher."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressor.deltas.links import Change, merge_all, merge_deltas
from compressor.methods import apply, method, set_trainable
from compressor.tasks.data import Data
from compressor.tasks.features import torch_forward
from compressor.training.distillation import HIDDEN_WEIGHT, HiddenTeacher
from pipelines.engine.stage import Artifact, Inputs, Workspace
from pipelines.stages.loading import load_data, load_model, predict_rows
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.trainings import load_options, settings_of, starting_model, train_and_save


def prepare(model: nn.Module, config: RecoverConfig, previous: Artifact, inputs: Inputs) -> dict[str, Any]:
    """Set which parameters are trained, in place; returns the method that they belong to, and its settings."""
    groups = sorted({module.group for module in model.modules() if isinstance(module, Change)})
    before = previous.metadata["method"]
    if config.method == "full" or (config.method == "same" and before == "full"):
        merge_deltas(model)
        set_trainable(model, base=True, groups=())
        return {"method": "full"}
    if config.method == "same":
        set_trainable(model, base=False, groups=groups)
        return {"method": before}
    row, options = method(config.method), load_options(config, inputs, group=str(len(groups) + 1))
    apply(model, row.name, options)
    return {"method": row.name, **settings_of(row, options, model)}


def teach(config: RecoverConfig, model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> dict[str, Any]:
    """Arguments for `train_and_save` about the teacher: the dense model's logits for every training row, without dropout, or
    the model in memory (always if its logits over a vocabulary are too many to store)."""
    if not config.distill:
        return {}
    dense = merge_all(load_model(inputs.dense, inputs.base))
    if config.distill == "logits" and not data.kind.generates:
        return {"logits": predict_rows(torch_forward(dense), data.train, data, workspace, "computing the teacher's outputs")}
    weight = 0.0 if config.distill == "logits" else config.hidden_weight or HIDDEN_WEIGHT
    return {"teacher": HiddenTeacher(dense, model, weight=weight, logits=config.distill != "hidden")}


def run(config: RecoverConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Train the pruned model with a fresh optimizer and schedule, and write its state."""
    data, previous = load_data(inputs), inputs.nearest("model")
    model = starting_model(inputs, data)
    settings = prepare(model, config, previous, inputs)
    teaching = teach(config, model, inputs, data, workspace)
    metadata = train_and_save(model, config, inputs, workspace, data, row=method(settings["method"]), **teaching)
    return {**metadata, **settings, "distill": config.distill}
