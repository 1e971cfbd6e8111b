"""Faults of a recovery's texts and teacher that are found before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from compressor.cost import human_bytes, shape_of
from compressor.errors import UserError
from compressor.models.architectures import row_of
from compressor.models.build import config_of, end_id, head_origin, weightless_model
from compressor.models.reference import Reference
from compressor.models.special_tokens import tokenizer_of
from compressor.tasks import TaskConfig
from compressor.tasks.data import TokenRows, tokenized
from compressor.tasks.features import tokens_of
from compressor.tasks.listing import listed
from compressor.tasks.predictions import IGNORED, of_tokens
from compressor.tasks.reading import TaskData, read_task
from compressor.tasks.rows import Row, Split, read_by, spaced
from compressor.tasks.task_kind import kind_of
from compressor.tasks.texts import new_texts, read_texts
from pipelines.engine.stage import Models, Problem


def file_problems(texts: Path | None, keys: Iterable[str], task: TaskConfig) -> Iterable[Problem]:
    """Faults of the given `keys` with this kind of task. Raises UserError E2xx for a file of texts that cannot be used."""
    if kind_of(task.kind).generates:
        for key in keys:
            what = f"{key} is not used by a task of kind {task.kind}"
            yield Problem("E403", what, "Remove the key: the dense model teaches on the training rows", (key,))
    elif texts is not None:
        texts_of(texts, task, read_task(task))


def texts_of(path: Path, task: TaskConfig, data: TaskData, alike: Callable[[Row], Row] = spaced) -> Split:
    """The texts of a file that are in no file of the task, compared by what `alike` gives. Raises UserError E2xx."""
    return new_texts(read_texts(path, task), task, data, path, alike)


def require_tokens(file: Path | None, task: TaskConfig, base: Path, models: Models) -> None:
    """Raises UserError E410 for a teacher with another task head, or that predicts at other places of the rows; E204 where the
    base reads every text as one in a file of the task; E212, E213 for rows that it or the teacher cannot tokenize."""
    kind, data = kind_of(task.kind), read_task(task)
    for model in models.values():
        require_head(model, data.label_names, kind.auto_class)
    files = [] if file is None else [(texts_of(file, task, data, read_by(tokenizer_of(base))), file)]
    if kind.refuses_tokens or end_id(base) is not None:  # else long rows are truncated, and none is refused
        for split, path in files:
            tokenized(base, split, within_positions(task, base), path)
    for model in models.values():
        if model.folder == base or (not kind.refuses_tokens and end_id(model.folder) is None):
            continue
        for split, path in [*files, (data.train, task.train)]:
            rows = tokenized(model.folder, split, within_positions(task, model.folder), path)
            if of_tokens(rows.labels):
                require_places(model, rows, tokenized(base, split, within_positions(task, base), path))


def require_places(model: Reference, rows: TokenRows, own: TokenRows) -> None:
    """Raises UserError E410 unless the teacher predicts at the same places of its `rows` as the model of its `own`: words have
    one prediction whatever their tokens are, but an answer may begin and end at every token of its context."""
    theirs, ours = ([row[row != IGNORED].tolist() for row in each.labels] for each in (rows, own))
    if theirs != ours:
        what = f"the teacher '{model.reference}' has other tokens than the model: its outputs at them are none for the model's"
        raise UserError("E410", what, "Use a teacher with the model's tokenizer, or teacher: dense")


def within_positions(task: TaskConfig, folder: Path) -> TaskConfig:
    """The task with rows of at most as many tokens as the model in `folder` has positions for."""
    config = config_of(folder)
    most = row_of(config.model_type).most_tokens(config.to_dict())
    return task if most is None or most >= task.max_length else task.model_copy(update={"max_length": most})


def require_head(model: Reference, label_names: list[str], auto_class: str) -> None:
    """Raises UserError E410 unless the model's own task head has exactly these labels, in this order."""
    if head_origin(model.folder, label_names, auto_class) != "kept":
        labels = listed([str(name) for name in config_of(model.folder).id2label.values()])
        what = f"the teacher '{model.reference}' has no trained task head for the labels {listed(label_names)}"
        fix = (
            f"Fine-tune it for this task, or rename its labels ({labels}) in its config.json if they are the same in this order"
        )
        raise UserError("E410", what, fix)


def file_facts(
    file: Path | None, augment: int | None, task: TaskConfig, base: Path, models: Models
) -> dict[str, dict[str, Any]]:
    """What `compress check` says of the texts, their variants and the teacher, by key."""
    facts, data = {}, read_task(task)
    mean, given = task.max_length, len(data.train)
    if file is not None:
        every, tokenizer = read_texts(file, task), tokenizer_of(base)
        texts = new_texts(every, task, data, file, read_by(tokenizer))
        lengths = np.minimum(tokens_of(tokenizer, texts, with_labels=False), task.max_length)
        mean, left_out = float(lengths.mean()), len(every) - len(texts)
        told = f"{len(texts):,} texts without labels; {left_out:,} more are in the task's files or repeated"
        given += len(texts)
        facts["texts"] = {"file": str(file), "rows": len(texts), "left_out": left_out, "mean": mean, "told": told}
    if augment is not None:
        told = f"up to {augment * given:,} random variants of the training rows{' and texts' if file else ''}"
        facts["augment"] = {"rows": augment * given, "told": told}
    for key, model in models.items():
        shape = shape_of(weightless_model(model.folder, data.label_names, kind_of(task.kind).auto_class))
        told = f"{model.reference}: {human_bytes(shape.bytes)}"
        facts[key] = {"model": model.reference, "flops": shape.flops(max(int(mean), 1)), "bytes": shape.bytes, "told": told}
    return facts
