"""Distillation of hidden states: the pruned model learns the dense model's states, block by block, beside its outputs, whose
loss belongs to the kind of task (as FitNets, Romero et al. 2015, and TinyBERT, Jiao et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import kept_of
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.task_kind import TaskKind
from compressor.training.mixed_precision import computed, widened
from compressor.training.schedule import Precision

HIDDEN_WEIGHT = 1.0
"""Weight of the distance between hidden states, relative to the loss on logits or labels."""


def hidden_distance(student: Sequence[Tensor], teacher: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """Mean over blocks, rows and a row's real tokens of ‖s - t‖² / ‖t‖², the squared error in units of the teacher's length.

    States are (batch, length, hidden), one a block; its mask (batch, length) is 1 for real tokens. Every row has the same
    weight whatever its length, so that accumulated batches give the same step. The distance is normalized per token, because
    a few tokens have much larger norms than all others.
    """
    distances = []
    for ours, theirs, mask in zip(student, teacher, masks, strict=True):
        real = mask.to(ours.dtype)
        scale = theirs.square().sum(-1).clamp_min(torch.finfo(theirs.dtype).tiny)
        each = (ours - theirs).square().sum(-1) / scale
        distances.append(((each * real).sum(1) / real.sum(1)).mean())
    return torch.stack(distances).mean()


class HiddenTeacher:
    """The dense model as a live teacher of a student that was pruned from it: every remaining block learns the hidden states of
    the same block of the dense model (T5: of the encoder and of the decoder).

    It costs its own weights in memory and a forward pass at each step; it uses no random numbers and trains nothing. `logits`:
    distil those, too; with `weight` 0, only those.
    """

    def __init__(self, dense: nn.Module, student: nn.Module, *, weight: float = HIDDEN_WEIGHT, logits: bool = False):
        self.dense, self.weight, self.logits = dense.eval().requires_grad_(False), weight, logits
        theirs, ours = layers_of(dense), layers_of(student)
        numbers = [int(number) for number in kept_of(student)] or range(len(theirs))
        self.layers = ours if weight else []
        self.ours = [layer.module for layer in self.layers]
        self.theirs = [theirs[number].module for number in numbers] if weight else []

    def loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        labels: Tensor,
        kind: TaskKind = CLASSIFICATION,
        precision: Precision = "fp32",
    ) -> tuple[Any, Tensor]:
        """The student's outputs on one batch, and the loss (or `distillation`) of the kind + weight · `hidden_distance`; both
        models are computed in `precision`."""
        # the LM head is skipped where its logits are not distilled
        teacher = self.dense if self.logits or not kind.generates else self.dense.base_model
        self.dense.to(labels.device)
        with torch.no_grad(), _states(self.theirs) as theirs:
            teacher_outputs = computed(teacher, inputs, precision)
        with _states(self.ours) as ours:
            outputs = computed(model, inputs, precision)
        logits = widened(outputs.logits)
        taught = widened(teacher_outputs.logits) if self.logits else None
        loss = kind.loss(logits, labels) if taught is None else kind.distillation(logits, taught, labels)
        if self.weight:
            masks = [layer.token_mask(inputs) for layer in self.layers]
            loss = loss + self.weight * hidden_distance(ours, theirs, masks)
        return outputs, loss


@contextmanager
def _states(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Context that records the output of every block in one forward pass, in the order of `blocks`."""
    states: list[Tensor] = []

    def keep(block: nn.Module, arguments: tuple, output: Tensor | tuple) -> None:
        states.append(widened(output[0] if isinstance(output, tuple) else output))

    hooks = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
