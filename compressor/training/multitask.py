"""Many tasks on one base (ProPETL section 3.4): batches of one task each, a head per task (of tasks that
generate the pretrained one), masks that tasks share.

`join_heads` makes one model of several tasks; `compressor.methods.apply` then gives each task its mask.
`model.compression.tasks`, and the keyword `task` of the model's forward, select the active task. Such a model is trained on a
`Mixture`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from compressor.account import Plan
from compressor.compression import Tasks, compression_of
from compressor.cost import shape_of
from compressor.deltas.sources import FixedMasks, Masked, Scores
from compressor.models.build import head_names, weightless_model
from compressor.tasks import TaskConfig
from compressor.tasks.reading import check_data
from compressor.tasks.task_kind import kind_of
from compressor.training.training_rows import TrainingRows


def probabilities(sizes: Sequence[int], temperature: float) -> np.ndarray:
    """p_i ∝ (n_i / Σ n)^(1/T), (tasks,) float64 (ProPETL appendix C.2): T = 1 is by size, T -> ∞ uniform.

    Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not positive")
    logs = np.log(np.asarray(sizes, dtype=np.float64)) / temperature
    weights = np.exp(logs - logs.max())  # with a small temperature all of them would underflow
    return weights / weights.sum()


class TaskSampler(torch.utils.data.Sampler[int]):
    """Row numbers of one epoch, for tasks one after another: `batch` rows of one task in every optimizer step.

    A step's task is drawn with `probabilities`. The rows of a task are shuffled, and again after each pass. Both depend only
    on seed and step: an epoch resumed in the middle continues as if it had not stopped.
    """

    def __init__(self, sizes: Sequence[int], temperature: float, batch: int, seed: int):
        self.sizes, self.batch, self.seed, self.epoch = tuple(sizes), batch, seed, 0
        self.steps = math.ceil(sum(sizes) / batch)
        self.bounds = np.cumsum(probabilities(sizes, temperature))

    def __len__(self) -> int:
        return self.steps * self.batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def tasks(self, steps: int) -> np.ndarray:
        """The tasks of the first `steps` steps of the training, int64 (steps,)."""
        drawn = np.searchsorted(self.bounds, np.random.default_rng([self.seed, 0]).random(steps), side="right")
        return drawn.clip(max=len(self.sizes) - 1)  # by rounding, the last bound may be slightly below 1

    def _rows(self, task: int, taken: int) -> Iterator[int]:
        """Endless row numbers of one task, after the first `taken`."""
        size, first = self.sizes[task], sum(self.sizes[:task])
        for number in itertools.count(taken // size):
            order = first + np.random.default_rng([self.seed, 1 + task, number]).permutation(size)
            yield from order[taken % size if number == taken // size else 0 :].tolist()

    def __iter__(self) -> Iterator[int]:
        start = self.epoch * self.steps
        drawn = self.tasks(start + self.steps)
        taken = self.batch * np.bincount(drawn[:start], minlength=len(self.sizes))
        streams = [self._rows(task, int(count)) for task, count in enumerate(taken)]
        for task in drawn[start:]:
            yield from itertools.islice(streams[task], self.batch)


class Mixture(torch.utils.data.Dataset):
    """The rows of all tasks, one task after another; every item contains the number of its task."""

    def __init__(self, parts: Sequence[TrainingRows], temperature: float):
        self.parts, self.temperature = parts, temperature
        self.kinds = tuple(kind for part in parts for kind in part.kinds)
        self.starts = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict:
        task = bisect_right(self.starts, index) - 1
        return {**self.parts[task][index - self.starts[task]], "task": task}

    def sampler(self, batch: int, seed: int) -> TaskSampler:
        """The sampler of a training with `batch` rows per optimizer step."""
        return TaskSampler([len(part) for part in self.parts], self.temperature, batch, seed)


class PerTask(nn.Module):
    """Replacement for a module of the task head: one module per task, of which the active task's is computed."""

    def __init__(self, tasks: Tasks, each: Sequence[nn.Module]):
        super().__init__()
        self.tasks, self.each = tasks, nn.ModuleList(each)

    def forward(self, *arguments, **named):
        return self.each[self.tasks.active](*arguments, **named)


class TaskScores(nn.Module):
    """The task masks over one prototype, shared by every block: the mask of the active task is used."""

    def __init__(self, tasks: Tasks, masks: Sequence[Scores | FixedMasks]):
        super().__init__()
        self.tasks, self.each = tasks, nn.ModuleList(masks)

    def mask(self, name: str) -> Tensor | None:
        return self.each[self.tasks.active].mask(name)


def join_heads(models: Iterable[tuple[str, nn.Module]]) -> nn.Module:
    """Join the heads of (task, model) pairs on one base into one model: the first, changed in place. Models that generate have
    none but the pretrained one, which all tasks use.

    Its forward takes a keyword `task`, the number of the task that is active from then on; `model.compression.tasks` names
    them.
    """
    names, first, heads = [], None, []
    for name, model in models:
        first = model if first is None else first
        names.append(name)
        heads.append(_head_modules(model))
    compression = compression_of(first)
    tasks = compression.tasks = Tasks(names)
    for path in heads[0]:
        tasks.heads[path] = PerTask(tasks, [modules[path] for modules in heads])
        first.set_submodule(path, tasks.heads[path])
    compression.head_parameters = frozenset(
        f"{path}.{leaf}" for path, module in tasks.heads.items() for leaf, _ in module.named_parameters()
    )
    first.register_forward_pre_hook(_choose, with_kwargs=True)
    return first


def _head_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that contain nothing but the task head, by path."""
    head, modules = head_names(model), {}
    for path, module in model.named_modules():
        inside = [f"{path}.{leaf}" for leaf, _ in module.named_parameters()]
        below = any(path.startswith(f"{above}.") for above in modules)
        if inside and not below and head.issuperset(inside):
            modules[path] = module
    return modules


def _choose(model: nn.Module, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    """Forward pre-hook that makes the batch's task the active one."""
    task = named.pop("task", None)
    if task is not None:
        compression_of(model).tasks.active = int(task)
    return arguments, named


def trained_parts(model: nn.Module) -> dict[str, int]:
    """Trained scalars of a model of many tasks without its heads, by part, where tasks have masks. Shared ones count once."""
    views = [module for module in model.modules() if isinstance(module, Masked)]
    if not views:
        return {}
    parts = {
        "prototype": [view.prototype for view in views],
        "layer_scores": [view.layer for view in views],
        "task_scores": [view.task for view in views],
    }
    return {part: sum(p.numel() for p in nn.ModuleList(modules).parameters()) for part, modules in parts.items()}


def start_plan(base_folder: Path, tasks: Mapping[str, TaskConfig]) -> Plan:
    """`Plan.start` for many tasks: every head is stored, and each row uses one of them."""

    models = {
        name: weightless_model(base_folder, check_data(task)[0], kind_of(task.kind).auto_class) for name, task in tasks.items()
    }
    head_macs = max(shape_of(model).head_macs for model in models.values())
    model = join_heads(models.items())
    shape = replace(shape_of(model), head_macs=head_macs)
    return Plan(shape, shape, model, length=max(task.max_length for task in tasks.values()))
