"""What a recovery learns from: the task's training rows, texts without labels, and the stored outputs of its teacher."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from torch import nn

from compressor.deltas.links import merge_all
from compressor.errors import UserError
from compressor.models.build import build, config_of
from compressor.models.special_tokens import padding_id, tokenizer_of
from compressor.tasks.augmentation import variants
from compressor.tasks.data import Data, TokenRows, tokenized
from compressor.tasks.features import length_of, predict, torch_forward
from compressor.tasks.predictions import of_tokens, rows_of
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split, read_by
from compressor.tasks.task_kind import kind_of
from compressor.tasks.texts import task_texts, unlabelled
from compressor.training.processes import in_turn
from compressor.training.trainer import SeededGroups
from pipelines.engine.environment import accelerator, distribution
from pipelines.engine.stage import Inputs, Workspace
from pipelines.engine.store import digest, fingerprint
from pipelines.stages.loading import load_model
from pipelines.stages.once import once
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.recover.teacher_checks import texts_of, within_positions
from pipelines.stages.training_plan import few_of_teacher


@dataclass(frozen=True)
class Lessons:
    """`data`, whose training rows are learned: the last `texts` of them have no labels, and of these the last `variants` are
    variants of others. `logits` (predictions, outputs) are the teacher's, NaN of rows that no step reads; None where a model in
    memory is the teacher, or nothing is distilled."""

    data: Data
    texts: int = 0
    variants: int = 0
    logits: np.ndarray | None = None


def lessons_of(config: RecoverConfig, inputs: Inputs, data: Data, workspace: Workspace) -> Lessons:
    """The rows of a recovery, and its teacher's outputs without dropout, computed once for all runs of a store.

    With texts, the labels of the training rows are not learned either: one loss on all rows, the distance from the teacher.
    """
    texts, made = drawn_texts(config, inputs) if config.unlabelled else (Split([], []), 0)
    if config.unlabelled:
        labelled = replace(data.train, kind=data.kind.unlabelled)
        own = tokenized(inputs.base.folder, texts, inputs.task, config.texts or inputs.task.train)
        data = replace(data, training=labelled.followed_by(own))
    lessons = Lessons(data, len(texts), made)
    # logits over a vocabulary are too many to store
    if config.distill != "logits" or data.kind.generates:
        return lessons
    if config.teacher is None:
        teacher, rows, pad_id = digest(inputs.dense), data.train, data.pad_id
    else:
        teacher, rows, pad_id = _for_teacher(config, inputs, texts)

    def load_teacher() -> nn.Module:
        if config.teacher is None:
            return merge_all(load_model(inputs.dense, inputs.base))
        return build(inputs.models[config.teacher].folder, data.label_names, auto_class=data.kind.auto_class)

    def logits_of(asked: TokenRows) -> np.ndarray:
        return stored_logits(load_teacher, teacher, asked, pad_id, data.batch_size, inputs, workspace)

    few = few_of_teacher(config, len(rows))
    if few is None:
        return replace(lessons, logits=logits_of(rows))
    order = SeededGroups(config.step_size, [length_of(row) for row in data.train.tokens], inputs.seed)
    chosen = np.unique([*itertools.islice(order, few)])
    return replace(lessons, logits=of_all_rows(logits_of(rows.at(chosen)), rows.labels, chosen))


def of_all_rows(logits: np.ndarray, labels: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Predictions (predictions, outputs) of all rows with these `labels` from those of the `asked` ones: NaN elsewhere, so that
    a training which read one of those would stop."""
    known = np.isin(rows_of(labels), asked)
    every = np.full((len(known), *logits.shape[1:]), np.nan, dtype=logits.dtype)
    every[known] = logits
    return every


def drawn_texts(config: RecoverConfig, inputs: Inputs) -> tuple[Split, int]:
    """The texts without labels, and how many of them, the last, are variants: the file's that are not in the task's files, then
    variants of these and of the training rows, as the base's tokenizer reads them. If the training takes fewer, a random sample
    of the file's comes first.

    Raises UserError E204 where there is neither a file nor a new variant."""
    kind, data, alike = kind_of(inputs.task.kind), read_task(inputs.task), read_by(tokenizer_of(inputs.base.folder))
    most = None if config.steps is None else config.steps * config.step_size
    texts, lines, made = [], [], []
    if config.texts is not None:
        file = texts_of(config.texts, inputs.task, data, alike)
        chosen = sorted(np.random.default_rng(inputs.seed).permutation(len(file))[:most].tolist())
        texts, lines = ([column[row] for row in chosen] for column in (file.texts, file.lines))
    if config.augment is not None:
        known = task_texts(inputs.task, data)
        every = variants([*texts, *data.train.texts], config.augment, inputs.seed, known, alike)
        made = [*itertools.islice(every, None if most is None else most - len(texts))]
    if not texts and not made:
        fix = "Remove the key, or give other texts (recover.texts)"
        raise UserError("E204", "no random variant of a training row is a new text", fix, str(inputs.task.train))
    return unlabelled([*texts, *made], [*lines, *[0] * len(made)], kind), len(made)


def _for_teacher(config: RecoverConfig, inputs: Inputs, texts: Split) -> tuple[str, TokenRows, int]:
    """The sha256 of another model, the rows as its own tokens, and the id that pads them."""
    model = inputs.models[config.teacher]
    task = within_positions(inputs.task, model.folder)
    rows = tokenized(model.folder, read_task(inputs.task).train, task, task.train)
    if texts:
        rows = rows.followed_by(tokenized(model.folder, texts, task, config.texts or task.train))
    return model.sha256, rows, padding_id(config_of(model.folder), model.folder)


def stored_logits(
    load_teacher: Callable[[], nn.Module],
    teacher: str,
    rows: TokenRows,
    pad_id: int,
    batch_size: int,
    inputs: Inputs,
    workspace: Workspace,
) -> np.ndarray:
    """The outputs (predictions, outputs) of a teacher, whose weights the text `teacher` identifies, on rows of its tokens."""

    def compute() -> bytes:
        forward = torch_forward(load_teacher())
        inputs.require_unchanged()
        with workspace.progress("computing the teacher's outputs", len(rows)) as bar:
            options = {"labels": rows.labels, "batch_size": batch_size, "on_batch": bar.advance}
            return save({"logits": predict(forward, rows.tokens, pad_id, **options)})

    facts = {
        "teacher": teacher,
        "rows": json_sha256([rows.tokens, _predicted(rows.labels)]),
        "pad": pad_id,
        "batch": batch_size,
        "threads": inputs.threads,
        "packages": [distribution("torch"), distribution("transformers"), accelerator()],
    }
    name = f"teacher-{fingerprint(facts)[:16]}"
    return load(in_turn(lambda: once(name, compute, workspace, ending="safetensors")))["logits"]


def json_sha256(value: Any) -> str:
    """sha256 of a value's text in JSON, without the text of all its rows in memory at once."""
    made = hashlib.sha256()
    for part in _json_parts(value):
        made.update(part.encode())
    return made.hexdigest()


def _json_parts(value: Any) -> Iterator[str]:
    """The text of `json.dumps`, that of a list of lists or of objects member by member."""
    if not isinstance(value, list | tuple) or not value or not isinstance(value[0], list | tuple | dict):
        yield json.dumps(value)
        return
    for number, member in enumerate(value):
        yield ", " if number else "["
        yield from _json_parts(member)
    yield "]"


def _predicted(labels: np.ndarray) -> list[Any]:
    """Where the model predicts: nothing to say where it does once per row."""
    return [np.flatnonzero(row >= 0).tolist() for row in labels] if of_tokens(labels) else []


def facts_of(config: RecoverConfig, lessons: Lessons, inputs: Inputs) -> dict[str, Any]:
    """What was learned from, for the artifact's metadata; nothing where it was the training rows and the dense model."""
    teacher = inputs.models[config.teacher] if config.teacher else None
    facts = {}
    if lessons.texts:
        file = {"file": config.texts.name} if config.texts else {}
        made = {"variants": lessons.variants} if lessons.variants else {}
        rows = {"rows": lessons.texts - lessons.variants, "labelled": len(lessons.data.train) - lessons.texts}
        facts["texts"] = {**file, **rows, **made}
    if teacher is not None:
        facts["teacher"] = {"reference": teacher.reference, "sha256": teacher.sha256}
    return facts
