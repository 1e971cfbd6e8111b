"""Keeping the best parameters of a training, by a measure of quality, instead of the last ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import TrainerCallback

from compressor.tensor_file import write_tensors
from compressor.training.processes import agreed
from compressor.training.unfinished import changing

KEPT, EVALUATIONS = "kept.safetensors", "evaluations.json"


class KeepBest(TrainerCallback):
    """Callback that keeps a copy of the trained parameters where `measure` (model -> value) is highest; lowest if it `falls`.

    It evaluates after each `every` steps and after the last one. Of equal values the first counts. After `patience`
    evaluations without improvement the training ends. A checkpoint holds the copy, so a resumed training keeps the same one.
    """

    def __init__(self, measure: Callable[[nn.Module], float], every: int, patience: int | None = None, *, falls: bool = False):
        self.measure, self.every, self.patience, self.falls = measure, every, patience, falls
        self.evaluations: list[dict[str, Any]] = []
        """{"step", "value"} of every evaluation."""
        self.kept: dict[str, Tensor] = {}

    @property
    def best(self) -> int:
        """Index of the best evaluation."""
        gains = [-evaluation["value"] if self.falls else evaluation["value"] for evaluation in self.evaluations]
        gains = [-math.inf if math.isnan(gain) else gain for gain in gains]
        return gains.index(max(gains))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every and state.global_step < state.max_steps:
            return
        value = agreed(lambda: float(self.measure(model)))
        self.evaluations.append({"step": state.global_step, "value": value})
        since = len(self.evaluations) - 1 - self.best
        if since == 0:
            self.kept = {name: tensor.detach().clone() for name, tensor in changing(model).items()}
        if self.patience is not None and since >= self.patience:
            control.should_training_stop = True
            control.should_save = False  # a training resumed here would take another step

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Copy the kept parameters back into the model."""
        for name, tensor in changing(model).items():
            tensor.copy_(self.kept[name])

    def save(self, folder: Path) -> None:
        """Write the copy and the evaluations so far into a checkpoint."""
        if self.evaluations:
            write_tensors({name: tensor.contiguous() for name, tensor in self.kept.items()}, folder / KEPT)
            (folder / EVALUATIONS).write_text(json.dumps(self.evaluations))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        if (folder / EVALUATIONS).exists():
            self.kept, self.evaluations = load_file(folder / KEPT), json.loads((folder / EVALUATIONS).read_text())
