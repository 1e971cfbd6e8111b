"""Layers that serve many tasks at once: one product with the base's weight for all rows, and the deltas of each row's own task.

`compressor.deltas.stacking` makes a model of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from compressor.deltas.links import Stack
from compressor.errors import UserError
from compressor.pruning.emptied import Constant

NO_OUTPUT = torch.finfo(torch.float32).min / 2
"""Output of a row beyond those of its task: it is never the largest, and its probability is 0."""


class RowTasks:
    """The task of each row (batch,) of the batch that a stacked model is computing, where its layers read it."""

    ids: Tensor


class Vectors(nn.Module):
    """One vector a task, `values` (slots, 1, size): task (batch,) -> (batch, 1, size). `slots` as in `Stack`."""

    def __init__(self, vectors: Sequence[Tensor]):
        super().__init__()
        self.register_buffer("slots", None)
        self.values = nn.Parameter(torch.stack([vector.detach() for vector in vectors])[:, None], requires_grad=False)

    def forward(self, task: Tensor) -> Tensor:
        slot = task if self.slots is None else self.slots.index_select(0, task)
        return self.values.index_select(0, slot)


class StackedLayer(nn.Module):
    """A linear layer, a Conv1D, a LayerNorm or the Constant of a sublayer without units with what many tasks change in it.

    `stacks` change its weight; `vectors` by name replace its bias, or a norm's weight; `after` change its output.
    """

    def __init__(
        self,
        base: nn.Module,
        row_tasks: RowTasks,
        stacks: Sequence[Stack] = (),
        vectors: Mapping[str, Vectors] | None = None,
        after: Sequence[Stack] = (),
    ):
        super().__init__()
        self.base, self.row_tasks = base, row_tasks
        self.stacks, self.after = nn.ModuleList(stacks), nn.ModuleList(after)
        self.vectors = nn.ModuleDict(vectors)

    @property
    def weight(self) -> Tensor:
        """Weight of the base layer: models read a layer's dtype from it."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        task, flat = self.row_tasks.ids, x.dim() == 2
        if flat and x.shape[0] != task.shape[0]:  # DeBERTa's norm of its relative positions
            what = f"a {type(self.base).__name__} that is computed once for all rows cannot have changes of each row's task"
            raise UserError("E776", what, "Tune without it (by lora or dsee), or merge each task into a model of its own")
        x = x[:, None] if flat else x
        y = self._bare(x)
        if self.stacks and is_shared(x):  # DeBERTa's relative positions
            x, y = (states.expand(task.shape[0], -1, -1) for states in (x, y))
        # before the bias: runtimes fuse that with the activation behind it
        for stack in self.stacks:
            y = stack(x, y, task)
        y = self._with_vectors(y, task)
        for stack in self.after:
            y = stack(x, y, task)
        return y[:, 0] if flat else y

    def _bare(self, x: Tensor) -> Tensor:
        """The base's output without its bias, and without a norm's weight where tasks have their own."""
        if isinstance(self.base, nn.LayerNorm):
            weight = None if "weight" in self.vectors else self.base.weight
            return functional.layer_norm(x, self.base.normalized_shape, weight, None, self.base.eps)
        if isinstance(self.base, Constant):
            return x.new_zeros(*x.shape[:-1], self.base.hidden)
        return x @ self.base.weight if isinstance(self.base, Conv1D) else functional.linear(x, self.base.weight)

    def _with_vectors(self, y: Tensor, task: Tensor) -> Tensor:
        if "weight" in self.vectors:
            y = y * self.vectors["weight"](task)
        if "bias" in self.vectors:
            return y + self.vectors["bias"](task)
        return y if self.base.bias is None else y + self.base.bias


def is_shared(x: Tensor) -> bool:
    """Whether a layer's input is one for all rows: in a trace the batch has no fixed size, but the first axis of such has."""
    return isinstance(x.shape[0], int) and x.shape[0] == 1


class StackedHead(nn.Module):
    """A linear layer of the task heads: `weight` (tasks, in, out) and `bias` (tasks, 1, out), padded to the most outputs."""

    def __init__(self, row_tasks: RowTasks, weights: Sequence[Tensor], biases: Sequence[Tensor | None]):
        super().__init__()
        self.row_tasks = row_tasks
        outputs, like = [len(weight) for weight in weights], weights[0]
        most = max(outputs)
        stacked = like.new_zeros(len(weights), like.shape[1], most)
        for task, weight in enumerate(weights):
            stacked[task, :, : outputs[task]] = weight.T
        self.weight = nn.Parameter(stacked, requires_grad=False)
        self.bias = None
        if biases[0] is not None or min(outputs) < most:
            offset = like.new_full((len(weights), 1, most), NO_OUTPUT)
            for task, bias in enumerate(biases):
                offset[task, :, : outputs[task]] = 0.0 if bias is None else bias
            self.bias = nn.Parameter(offset, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        task, flat = self.row_tasks.ids, x.dim() == 2
        y = (x[:, None] if flat else x) @ self.weight.index_select(0, task)
        y = y if self.bias is None else y + self.bias.index_select(0, task)
        return y[:, 0] if flat else y


class StackedModel(nn.Module):
    """A model of many tasks: its inputs and `task` (batch,) -> logits of each row's own task, (batch, most outputs) or
    (batch, tokens, most outputs)."""

    def __init__(self, model: nn.Module, row_tasks: RowTasks):
        super().__init__()
        self.model, self.config, self.row_tasks = model, model.config, row_tasks

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None, task: Tensor | None = None
    ) -> dict[str, Tensor]:
        self.row_tasks.ids = task
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return {"logits": self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits}
