"""The tasks of one training on disk: what they share in one file, and one small file per task (ProPETL section 3.4).

A task file holds the task's masks, if the method has any, and its head, and names the other by its checksum.
`compressor.load(base, delta=FILE)` loads it like any delta file; docs/deltas.md has the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from compressor.compression import compression_of
from compressor.models.build import class_facts
from compressor.storage.delta_file import changes_of, save
from compressor.storage.layout import SECTIONS

SHARED = "_shared.safetensors"
"""Name of the shared file. No task can have it: names of tasks begin with a letter or a digit."""


def write_tasks(
    model: nn.Module, folder: Path, *, base: str, base_sha256: str, label_names: Mapping[str, Sequence[str]]
) -> dict[str, Path]:
    """Write a model of many tasks (`compressor.training.multitask.join_heads`): SHARED, and one NAME.safetensors per task.

    `label_names` has the classes of every task, in the order of its outputs. Returns the task files by task. Raises UserError
    E312 if the changes of the model cannot be stored as deltas.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"base": base, "base_sha256": base_sha256, **class_facts(model)}
    changes, tensors = changes_of(model)
    common, masks = {section: entries for section, entries in changes.items() if section != "tasks"}, "tasks" in changes
    shared_facts = {**facts, "labels": [], "tasks": list(label_names)}
    sha256 = save(folder / SHARED, shared_facts, common, _of_tasks(tensors, False), None)
    nothing = {section: {} for section in ("prototypes", *SECTIONS)}
    paths, tasks = {}, compression_of(model).tasks
    for name, labels in label_names.items():
        tasks.choose(name)
        changes, tensors = changes_of(model)
        paths[name] = folder / f"{name}.safetensors"
        task_facts = {**facts, "labels": list(labels), "shared": {"file": SHARED, "sha256": sha256}}
        save(
            paths[name],
            task_facts,
            {**nothing, "tasks": changes["tasks"] if masks else {}},
            _of_tasks(tensors, True),
            tasks.head(name),
        )
    return paths


def _of_tasks(tensors: Mapping, masks: bool) -> dict:
    """The tensors of the task masks if `masks`, otherwise all others."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("tasks|") == masks}
