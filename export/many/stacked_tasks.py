"""Delta files of one base -> one ONNX file that serves all their tasks, each compared with its own merged model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compressor.arguments import NAME_FIX, NAME_PATTERN
from compressor.deltas.stacking import changes_of_task, stack_tasks
from compressor.errors import UserError
from compressor.models.build import GENERATIVE, TOKENS
from compressor.models.reference import Reference
from compressor.models.special_tokens import padding_id, tokenizer_of
from compressor.models.tasks_table import BY_AUTO_CLASS
from compressor.storage.delta_file import DeltaFile, read
from compressor.storage.live import apply, base_of, load_on, strip
from compressor.tasks.features import pad, predict, torch_forward
from compressor.tasks.predictions import every_token
from compressor.tasks.task_kind import kind_of, kind_shown, kind_with
from export.graph.rewrite import can_fuse
from export.many.stacked_graph import TASK, trace_stacked, write_stacked
from export.parity.compare import ParityResult, compare, failure
from export.runtimes.runtime import Runtime, Session
from export.runtimes.runtime_registry import DEFAULT
from export.runtimes.sessions import run, session
from export.standalone.source_model import random_rows

Rows = Sequence[dict[str, list[int]]]

ROWS, ALONE = 16, 5
"""Random rows of a task that are compared, of all lengths; every how manieth is also computed alone."""
BATCH = 32
"""Rows of a mixed batch in the comparison."""


@dataclass(frozen=True)
class StackedTask:
    """One task of the model: its number is its place. `kind` is what its outputs are: classification, regression or tokens;
    `bytes` those of its delta file."""

    name: str
    labels: list[str]
    kind: str
    bytes: int

    @property
    def outputs(self) -> int:
        return len(self.labels)

    @property
    def facts(self) -> dict[str, Any]:
        """What a file says of the task."""
        return {"name": self.name, "labels": self.labels, "kind": self.kind}


@dataclass(frozen=True)
class StackedFile:
    """What `stack_files` wrote: the file, its tasks and the base, and the comparison of each task with its merged model.

    `changes` are the bytes that all tasks together take in the file; `base_bytes` those of what they share.
    """

    path: Path
    tasks: list[StackedTask]
    base: Reference
    pad_id: int
    base_bytes: int
    changes: int
    parity: list[ParityResult]

    def to_json(self) -> dict[str, Any]:
        """The summary of the file as JSON data."""
        rows = zip(self.tasks, self.parity, strict=True)
        return {
            "base": self.base.reference,
            "base_sha256": self.base.sha256,
            "pad_id": self.pad_id,
            "base_bytes": self.base_bytes,
            "changes_bytes": self.changes,
            "tasks": [{**asdict(task), "parity": result.to_json()} for task, result in rows],
        }


def stack_files(paths: Sequence[Path], folder: Path, *, base: str | None = None, runtime: Runtime = DEFAULT) -> StackedFile:
    """Write FOLDER/model.onnx (or what `runtime` calls it), which computes every task of the delta files `paths` on their one
    base, in fp32.

    Its inputs are those of the base and `task`, int64 (batch,): the place of each row's task in `paths`. `base` defaults to
    the reference in the first file. Every task is compared with its merged model in PyTorch, on random rows in batches that
    mix all tasks, and alone.

    Raises UserError E775 (files of different bases, prunings or heads), E776 (changes that cannot be stacked), E777 (names of
    tasks), those of reading a delta file (E306, E310, E311, E316), and CheckError E610; ValueError for no files.
    """
    if not paths:
        raise ValueError("paths is empty: give the delta files of the tasks")
    deltas = [read(path) for path in paths]
    _check_alike(paths, deltas)  # before the names: that of the file that tasks share is none of a task
    names = task_names(paths)
    tasks = [StackedTask(*facts) for facts in zip(names, *_facts(paths, deltas), strict=True)]
    resolved = base_of(deltas[0], base, paths[0])
    model = load_on(deltas[0], base or deltas[0].base, paths[0])
    tokenizer, pad_id = tokenizer_of(resolved.folder), padding_id(model.config, resolved.folder)
    rows = random_rows(model, tokenizer)
    every = max(1, len(rows) // ROWS)
    samples = [rows[number % every :: every] for number in range(len(tasks))]
    changes, expected = [], []
    for number, path in enumerate(paths):
        if number:
            apply(model, path)
        changes.append(changes_of_task(model, names[number], str(path)))
        expected.append(_merged_outputs(model, samples[number], tasks[number], pad_id))
    strip(model)
    base_bytes = _bytes(model) - sum(model.get_parameter(name).nbytes for name in changes[-1].head)
    fuse, stacked = can_fuse(model), stack_tasks(model, changes)
    graph = trace_stacked(stacked, pad([samples[0][0], samples[0][-1]], pad_id), [task.facts for task in tasks], resolved)
    path = write_stacked(graph, folder, runtime, fuse=fuse)
    parity = prove_tasks(path, tasks, samples, expected, pad_id)
    return StackedFile(path, tasks, resolved, pad_id, base_bytes, _bytes(stacked) - base_bytes, parity)


def _bytes(model: nn.Module) -> int:
    """Bytes of a model's tensors; what several share counts once."""
    tensors = {(tensor.data_ptr(), tensor.shape): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def task_names(paths: Sequence[Path]) -> list[str]:
    """The names of tasks: those of their files, up to `.safetensors` or `.delta.safetensors`. Raises UserError E777."""
    names = [path.name.removesuffix(".safetensors").removesuffix(".delta") for path in paths]
    for number, (name, path) in enumerate(zip(names, paths, strict=True)):
        if not re.fullmatch(NAME_PATTERN, name):
            raise UserError("E777", f"'{name}' is not a name of a task", NAME_FIX, str(path))
        if name in names[:number]:
            what = f"two tasks are named '{name}', the other by {paths[names.index(name)]}"
            raise UserError("E777", what, "Rename one of the files: a task has the name of its file", str(path))
    return names


def _check_alike(paths: Sequence[Path], deltas: Sequence[DeltaFile]) -> None:
    """Raises UserError E775 for a file that cannot be in one model with the first, or in any."""
    first = deltas[0]
    for path, delta in zip(paths, deltas, strict=True):
        if reason := _unstackable(delta):
            raise UserError("E775", reason, "Leave it out", str(path))
        if reason := _differs(delta, first):
            raise UserError("E775", reason, "Leave it out, or stack it with files like it", str(path))


def _unstackable(delta: DeltaFile) -> str:
    """Why the file cannot be in any model of many tasks; empty if it can."""
    if delta.auto_class in GENERATIVE:
        return "a task that generates cannot be stacked"
    if delta.kind:
        return f"a task of kind '{delta.kind}' needs a model of its own"
    if delta.head is None and delta.labels:
        return "it has no task head, and tasks of one model have one each"
    if not delta.labels:
        return "this is the file that tasks share, not one of the tasks"
    types = {tensor.dtype for tensor in delta.tensors.values() if tensor.is_floating_point()}
    if others := types - {torch.float32}:
        return f"its numbers are {str(others.pop()).removeprefix('torch.')}, those of a stacked file float32"
    return ""


def _differs(delta: DeltaFile, first: DeltaFile) -> str:
    """Why the file cannot be in one model with the first; empty if it can."""
    if delta.base_sha256 != first.base_sha256:
        return f"its base '{delta.base}' is not that of the first file, '{first.base}'"
    if delta.kept != first.kept:
        return "its base is pruned otherwise than that of the first file"
    if delta.auto_class != first.auto_class:
        kinds = [BY_AUTO_CLASS[one.auto_class].kind for one in (delta, first)]
        return f"it is a task of {kinds[0]}, the first file is one of {kinds[1]}"
    return ""


def _facts(paths: Sequence[Path], deltas: Sequence[DeltaFile]) -> list[list[Any]]:
    """Labels, kinds and bytes of the tasks."""
    kinds = [kind_shown(delta.auto_class, len(delta.labels)) for delta in deltas]
    return [[delta.labels for delta in deltas], kinds, [path.stat().st_size for path in paths]]


def _merged_outputs(model: nn.Module, rows: Rows, task: StackedTask, pad_id: int) -> np.ndarray:
    """Outputs (predictions, outputs) of the live task: its deltas are computed into the weights, as when they are merged."""
    forward = torch_forward(model, accelerate=False)
    return predict(forward, rows, pad_id, labels=every_token(rows) if kind_of(task.kind).auto_class == TOKENS else None)


def prove_tasks(
    path: Path, tasks: Sequence[StackedTask], samples: Sequence[Rows], expected: Sequence[np.ndarray], pad_id: int
) -> list[ParityResult]:
    """Compare each task's `expected` outputs for its `samples` with those of the file at `path`. Raises CheckError E610.

    The file computes them in batches that mix tasks and lengths, and some rows alone.
    """
    live, order = session(path), np.random.default_rng(0)
    pairs = [(number, row) for number, rows in enumerate(samples) for row in range(len(rows))]
    places = order.permutation(len(pairs))
    mixed: dict[tuple[int, int], np.ndarray] = {}
    for start in range(0, len(pairs), BATCH):
        chosen = [pairs[place] for place in places[start : start + BATCH]]
        mixed |= dict(zip(chosen, outputs_of(live, tasks, samples, chosen, pad_id), strict=True))
    results = []
    for number, (task, rows) in enumerate(zip(tasks, samples, strict=True)):
        few = [(number, row) for row in range(0, len(rows), ALONE)]
        found = [mixed[number, row] for row in range(len(rows))]
        ends = np.cumsum([len(values) for values in found])
        parts = np.split(expected[number], ends[:-1])
        alone = np.concatenate([part for pair in few for part in outputs_of(live, tasks, samples, [pair], pad_id)])
        reference = np.concatenate([parts[row] for _, row in few])
        kind = kind_with(task.outputs)
        result = compare(
            f"task '{task.name}', merged -> {path.name}",
            "fp32",
            expected[number],
            np.concatenate(found),
            kind.predicted_labels(expected[number]),
            task=kind,
            batches=({"batch 1": reference}, {"batch 1": alone}),
        )
        if not result.passed:
            raise failure(result, fix=f"Nothing was written. Leave the delta of '{task.name}' out")
        results.append(result)
    return results


def outputs_of(
    live: Session, tasks: Sequence[StackedTask], samples: Sequence[Rows], chosen: Sequence[tuple[int, int]], pad_id: int
) -> list[np.ndarray]:
    """The outputs (predictions, outputs) of each of the `chosen` (task, row) in one batch."""
    rows = [samples[number][row] for number, row in chosen]
    encoding = {**pad(rows, pad_id), TASK: np.array([number for number, _ in chosen])}
    logits = run(live, encoding)
    cut = [values[..., : tasks[number].outputs] for values, (number, _) in zip(logits, chosen, strict=True)]
    return [
        values[: len(row["input_ids"])] if values.ndim == 2 else values[None] for values, row in zip(cut, rows, strict=True)
    ]
