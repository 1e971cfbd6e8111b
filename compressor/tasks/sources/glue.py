"""GLUE's tasks by name (Wang et al. 2018): files and columns of the usual download, or of `nyu-mll/glue` on the hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.tasks import PACKED
from compressor.tasks.sources.hub_set import HUB
from compressor.text_files import from_home

PREFIX = "glue/"
FOLDERS = ("glue", "glue_data", "GLUE")
"""Names of a folder with the download that is used where it is beside the pipeline file."""


@dataclass(frozen=True)
class GlueTask:
    """One task. `text` and `label` are columns of the download, `hub_text` those of the hub, where the label is `label`;
    `metric` is the figure that GLUE's leaderboard averages; `tests` are further files that are only scored."""

    folder: str
    text: tuple[str, ...]
    hub_text: tuple[str, ...]
    label: str = "label"
    kind: str = "classification"
    metric: str = "accuracy"
    validation: str = "dev"
    hub_validation: str = "validation"
    tests: tuple[tuple[str, str, str], ...] = ()
    """(name, file of the download, split of the hub)."""
    header: bool = True
    broken_rows: bool = False
    """Whether some rows of the download are broken over two lines; TensorFlow Datasets and the hub leave these out, too."""


SENTENCES = ("sentence1", "sentence2")
TASKS = {
    "cola": GlueTask("CoLA", ("column4",), ("sentence",), label="column2", metric="matthews", header=False),
    "sst2": GlueTask("SST-2", ("sentence",), ("sentence",)),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), SENTENCES, label="Quality", metric="accuracy_f1"),
    "stsb": GlueTask("STS-B", SENTENCES, SENTENCES, label="score", kind="regression", metric="pearson_spearman"),
    "qqp": GlueTask(
        "QQP",
        ("question1", "question2"),
        ("question1", "question2"),
        label="is_duplicate",
        metric="accuracy_f1",
        broken_rows=True,
    ),
    "mnli": GlueTask(
        "MNLI",
        SENTENCES,
        ("premise", "hypothesis"),
        label="gold_label",
        validation="dev_matched",
        hub_validation="validation_matched",
        tests=(("mismatched", "dev_mismatched", "validation_mismatched"),),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), ("question", "sentence")),
    "rte": GlueTask("RTE", SENTENCES, SENTENCES),
    "wnli": GlueTask("WNLI", SENTENCES, SENTENCES),
}


def glue_keys(name: object, folder: object, beside: Path, known: Collection[str], kind: object = None) -> dict[str, Any]:
    """The keys of a task's block: of the download in `folder` (relative to the folder `beside`), or in a folder of FOLDERS
    there; without either, of the hub. Keys that are not among the `known` ones of a task are left out, as is the metric where
    the rows are read as another `kind`.

    Raises UserError E233 for an unknown task, or a folder that lacks its files.
    """
    if not isinstance(name, str) or name not in TASKS:
        near = difflib.get_close_matches(str(name).lower(), TASKS, n=1)
        fix = f"Did you mean '{PREFIX}{near[0]}'?" if near else f"GLUE has: {', '.join(TASKS)}"
        raise UserError("E233", f"GLUE has no task '{name!s:.60}'", fix)
    if not isinstance(folder, str | None):
        raise UserError("E233", f"folder is {folder!r:.60}, not a path", "Give the folder of the GLUE download")
    task = TASKS[name]
    places = [from_home(folder)] if folder is not None else map(Path, FOLDERS)
    found = [place for part in places for place in (beside / part / task.folder, beside / part) if _holds(place, "train")]
    # a folder beside the pipeline has one folder for each task
    found = [place for place in found if folder is not None or place.name == task.folder]
    if folder is not None and not found:
        what = f"neither {task.folder}/train.tsv nor train.tsv (or {PACKED}) is in the folder"
        raise UserError("E233", what, "Give the folder of the GLUE download, or leave out the key folder", str(beside / folder))
    keys = _of_folder(task, found[0]) if found else _of_hub(task, name)
    metric = {"metric": task.metric} if kind in (None, task.kind) else {}
    return {key: value for key, value in {"kind": task.kind, **metric, **keys}.items() if key in known}


def _of_folder(task: GlueTask, folder: Path) -> dict[str, Any]:
    """Keys of the files in the folder of a task."""
    return {
        "train": _file(folder, "train"),
        "validation": _file(folder, task.validation),
        "text": list(task.text),
        "label": task.label,
        **({} if task.header else {"header": False}),
        **({"broken_rows": "skip"} if task.broken_rows else {}),
        **({"test": {name: _file(folder, file) for name, file, _ in task.tests}} if task.tests else {}),
    }


def _of_hub(task: GlueTask, name: str) -> dict[str, Any]:
    """Keys of the same splits on the hub."""
    start = f"{HUB}nyu-mll/glue:{name}/"
    return {
        "train": f"{start}train",
        "validation": f"{start}{task.hub_validation}",
        "text": list(task.hub_text),
        "label": "label",
        **({"test": {key: f"{start}{split}" for key, _, split in task.tests}} if task.tests else {}),
    }


def _holds(folder: Path, stem: str) -> bool:
    # Path.is_file raises where the name is too long to be one
    return any(os.path.isfile(folder / f"{stem}{suffix}") for suffix in (".tsv", f".tsv{PACKED}"))


def _file(folder: Path, stem: str) -> str:
    """The path of a file, compressed or not. Raises UserError E233."""
    if not _holds(folder, stem):
        raise UserError("E233", f"{stem}.tsv (or {PACKED}) is missing", "Copy the whole folder of the task", str(folder))
    plain = folder / f"{stem}.tsv"
    return str(plain if plain.is_file() else plain.with_name(f"{stem}.tsv{PACKED}"))
