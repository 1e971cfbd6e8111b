"""Many tasks on one base -> one model whose rows each have a task.

`changes_of_task` reads what a task changes off the live model, `stack_tasks` builds the model of all of them: its layers are
those of `compressor.deltas.stacked`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.compression import compression_of
from compressor.deltas.inserts import Insert, inserts_of
from compressor.deltas.kinds.adapter import Adapter, AdapterStack
from compressor.deltas.links import Delta, Stack, attach, chain, chains, merge
from compressor.deltas.position_rows import has_position_rows, use_position_rows
from compressor.deltas.sources import PlainTensors
from compressor.deltas.stacked import RowTasks, StackedHead, StackedLayer, StackedModel, Vectors
from compressor.errors import UserError
from compressor.pruning.emptied import Constant

LAYERS = (nn.Linear, Conv1D, nn.LayerNorm, Constant)


@dataclass
class TaskChanges:
    """What one task changes, by the paths of the layers. `vectors` are whole biases (and weights of norms), changed; `place` is
    the file it is from."""

    name: str
    place: str = ""
    links: dict[str, list[Delta]] = field(default_factory=dict)
    vectors: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    inserts: dict[str, list[Insert]] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def changes_of_task(model: nn.Module, name: str, place: str = "") -> TaskChanges:
    """What the task attached to a live model changes; still valid when the model gets another task."""
    changes = TaskChanges(name, place)
    for path, layer, tensor in chains(model):
        if isinstance(layer, PlainTensors):  # tensors of a change, which reads them itself
            continue
        value = getattr(layer, tensor)
        if value.dim() == 1:
            changes.vectors[path][tensor] = value.detach().clone()
        else:
            changes.links[path] = [link.settled() for link in chain(layer, tensor)]
    for path, module in model.named_modules():
        if added := inserts_of(module):
            changes.inserts[path] = [insert.settled() for insert in added]
    changes.head = {name: model.get_parameter(name).detach() for name in sorted(compression_of(model).head_parameters or ())}
    return changes


@torch.no_grad()
def stack_tasks(model: nn.Module, tasks: Sequence[TaskChanges]) -> StackedModel:
    """The model of all tasks, on `model`, which is their base without any delta. It is used up: its layers are replaced.

    Raises UserError E776 for a change that cannot be stacked.
    """
    row_tasks = RowTasks()
    paths = dict.fromkeys(path for task in tasks for path in (*task.links, *task.vectors, *task.inserts))
    for path in paths:
        layer, adapters = model.get_submodule(path), _adapters(path, tasks)
        if not isinstance(layer, LAYERS):
            holder = next(task for task in tasks if path in task.links or path in task.vectors or path in task.inserts)
            raise _unstackable(holder, f"a change of a {type(layer).__name__}", path)
        _fold_common(layer, path, tasks)
        stacks, vectors = list(_stacks(layer, path, tasks)), _vectors(layer, path, tasks)
        _replace(model, path, StackedLayer(layer, row_tasks, stacks, vectors, adapters))
    _stack_heads(model, tasks, row_tasks)
    for module in model.modules():
        if has_position_rows(module) and any(isinstance(child, StackedLayer) for child in module.children()):
            use_position_rows(module)
    return StackedModel(model, row_tasks).eval()


def _unstackable(task: TaskChanges, change: str, path: str) -> UserError:
    fix = "Low-rank, sparse and VeRA deltas, biases and adapters can be; merge this task into a model of its own"
    return UserError("E776", f"task '{task.name}': {change} on {path} cannot be stacked", fix, task.place)


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, layer)


def _fold_common(layer: nn.Module, path: str, tasks: Sequence[TaskChanges]) -> None:
    """Merge links that cannot be stacked into the base's weight, if all tasks have the same: those of a pruned base.

    Raises UserError E776 if tasks differ in them, or have deltas below a mask.
    """
    odd = [[link for link in task.links.get(path, ()) if link.stack_key() is None] for task in tasks]
    holders = [(task, links) for task, links in zip(tasks, odd, strict=True) if links]
    if not holders:
        return
    masked = any(link.masks for links in odd for link in links)
    if not all(_equal(links, odd[0]) for links in odd) or (masked and any(map(_stackable, _at(path, tasks)))):
        task, links = holders[0]
        raise _unstackable(task, f"a change of kind '{links[0].kind}'", path)
    for link in odd[0]:
        attach(layer, link, check=False)
    merge(layer)


def _at(path: str, tasks: Sequence[TaskChanges]) -> Iterator[list[Delta]]:
    """The links of every task on one layer."""
    yield from (task.links.get(path, []) for task in tasks)


def _stackable(links: Sequence[Delta]) -> list[Delta]:
    return [link for link in links if link.stack_key() is not None]


def _equal(some: Sequence[Delta], others: Sequence[Delta]) -> bool:
    """Whether two lists of links change a weight alike."""
    if [(link.kind, link.place) for link in some] != [(link.kind, link.place) for link in others]:
        return False
    pairs = [(one.to_tensors(), other.to_tensors()) for one, other in zip(some, others, strict=True)]
    return all(torch.equal(tensor, other[name]) for one, other in pairs for name, tensor in one.items())


def _slotted(made: Stack | Vectors, present: Sequence[bool]) -> Stack | Vectors:
    """Give a stack, whose last slot is that of the tasks that are not `present`, the slot of each task."""
    if not all(present):
        slots = torch.tensor(present).cumsum(0) - 1
        slots[~torch.tensor(present)] = sum(present)
        made.slots = slots
    return made


def _stacks(layer: nn.Module, path: str, tasks: Sequence[TaskChanges]) -> Iterator[Stack]:
    """One stack for each kind of link on a layer's weight, and each repetition of that kind in one task."""
    groups: dict[tuple, list[Delta | None]] = defaultdict(lambda: [None] * len(tasks))
    for number, links in enumerate(_at(path, tasks)):
        seen: dict[tuple, int] = defaultdict(int)
        for link in _stackable(links):
            key = link.stack_key()
            groups[*key, seen[key]][number] = link
            seen[key] += 1
    for links in groups.values():
        first = next(filter(None, links))
        shape = first.place.read(layer.weight).shape
        present = [link is not None for link in links]
        yield _slotted(type(first).stack(_with_rest(links), shape), present)


def _with_rest(items: Sequence) -> list:
    """Those that are there, and None behind them if some are not."""
    present = [item for item in items if item is not None]
    return present if len(present) == len(items) else [*present, None]


def _vectors(layer: nn.Module, path: str, tasks: Sequence[TaskChanges]) -> dict[str, Vectors]:
    """The biases, and weights of a norm, that tasks have of their own; tasks without share the base's."""
    result = {}
    for name in dict.fromkeys(name for task in tasks for name in task.vectors.get(path, ())):
        each = [task.vectors.get(path, {}).get(name) for task in tasks]
        rows = [getattr(layer, name) if vector is None else vector for vector in _with_rest(each)]
        result[name] = _slotted(Vectors(rows), [vector is not None for vector in each])
    return result


def _adapters(path: str, tasks: Sequence[TaskChanges]) -> list[Stack]:
    """The adapters after a layer, first to last."""
    each = [task.inserts.get(path, []) for task in tasks]
    for task, inserts in zip(tasks, each, strict=True):
        if odd := [insert for insert in inserts if type(insert) is not Adapter]:
            raise _unstackable(task, f"a change of kind '{odd[0].kind}'", path)
    columns = zip_longest(*each)
    return [_slotted(AdapterStack(_with_rest(column)), [adapter is not None for adapter in column]) for column in columns]


def _stack_heads(model: nn.Module, tasks: Sequence[TaskChanges], row_tasks: RowTasks) -> None:
    """Replace the layers of the task head by those of all tasks. Raises UserError E776 for a layer of another kind."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in tasks[0].head):
        layer = model.get_submodule(path)
        of = {name: [task.head.get(f"{path}.{name}") for task in tasks] for name in ("weight", "bias")}
        if isinstance(layer, nn.Linear):
            _replace(model, path, StackedHead(row_tasks, of["weight"], of["bias"]))
        elif isinstance(layer, nn.LayerNorm):
            vectors = {name: Vectors(each) for name, each in of.items() if each[0] is not None}
            _replace(model, path, StackedLayer(layer, row_tasks, vectors=vectors))
        else:
            raise _unstackable(tasks[0], f"a task head with a {type(layer).__name__}", path)
