"""What a recovery trains of a model, and its teacher: the same for the pruned model and for its control."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from compressor.deltas.links import Change, merge_all, merge_deltas
from compressor.methods import Options, apply, set_trainable
from compressor.training.distillation import HIDDEN_WEIGHT, HiddenTeacher
from pipelines.engine.stage import Inputs
from pipelines.stages.loading import load_model
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.training_config import method_of
from pipelines.stages.trainings import settings_of


def prepare(model: nn.Module, config: RecoverConfig, before: str, options_of: Callable[[str], Options]) -> dict[str, Any]:
    """Set which parameters are trained, in place; returns the method that they belong to, and its settings.

    `before` is the method of the training before, `options_of` gives the options of a new group of changes.
    """
    groups = sorted({module.group for module in model.modules() if isinstance(module, Change)})
    row = method_of(config, before)
    if row.trains_base:
        merge_deltas(model)
        set_trainable(model, base=True, groups=(), top=config.top)
        if not config.trains_embeddings:
            model.get_input_embeddings().requires_grad_(False)
        return {"method": row.name, **({"top": config.top} if config.top else {})}
    if config.method == "same":
        set_trainable(model, base=False, groups=groups)
        return {"method": row.name}
    # adapters and prefixes stay where a full recovery merged the deltas of groups before theirs
    name = next(str(number) for number in itertools.count(len(groups) + 1) if str(number) not in groups)
    options = options_of(name)
    apply(model, row.name, options)
    return {"method": row.name, **settings_of(row, options, model)}


def teaching(config: RecoverConfig, model: nn.Module, inputs: Inputs, logits: np.ndarray | None) -> dict[str, Any]:
    """Arguments for a training of `model` about the teacher: its stored logits, or the dense model in memory."""
    if not config.distill:
        return {}
    if logits is not None:
        return {"logits": logits}
    dense = merge_all(load_model(inputs.dense, inputs.base))
    weight = 0.0 if config.distill == "logits" else config.hidden_weight or HIDDEN_WEIGHT
    return {"teacher": HiddenTeacher(dense, model, weight=weight, logits=config.distill != "hidden")}
