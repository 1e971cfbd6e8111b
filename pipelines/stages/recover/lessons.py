"""What a recovery learns from: the task's training rows, texts without labels, and the stored outputs of its teacher."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from torch import nn

from compressor.deltas.links import merge_all
from compressor.models.hub import build, config_of, padding_id
from compressor.tasks.data import Data, TokenRows, tokenized
from compressor.tasks.features import predict, torch_forward
from compressor.tasks.predictions import of_tokens
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split
from compressor.training.processes import in_turn
from pipelines.engine.environment import accelerator, distribution
from pipelines.engine.stage import Inputs, Workspace
from pipelines.engine.store import digest, fingerprint
from pipelines.stages.loading import load_model
from pipelines.stages.once import once
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.recover.teacher_checks import texts_of, within_positions


@dataclass(frozen=True)
class Lessons:
    """`data`, whose training rows are learned, the last `texts` of them without labels, and the teacher's `logits` on them
    (predictions, outputs); None where a model in memory is the teacher, or nothing is distilled."""

    data: Data
    texts: int = 0
    logits: np.ndarray | None = None


def lessons_of(config: RecoverConfig, inputs: Inputs, data: Data, workspace: Workspace) -> Lessons:
    """The rows of a recovery, and its teacher's outputs without dropout, computed once for all runs of a store.

    With texts, the labels of the training rows are not learned either: one loss on all rows, the distance from the teacher.
    """
    texts = None if config.texts is None else drawn_texts(config, inputs)
    if texts is not None:
        labelled = replace(data.train, kind=data.kind.unlabelled)
        data = replace(data, train=labelled.followed_by(tokenized(inputs.base.folder, texts, inputs.task, config.texts)))
    lessons = Lessons(data, 0 if texts is None else len(texts))
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

    return replace(lessons, logits=stored_logits(load_teacher, teacher, rows, pad_id, data.batch_size, inputs, workspace))


def drawn_texts(config: RecoverConfig, inputs: Inputs) -> Split:
    """The file's texts that are not in the task's files; a random sample of them if the training takes fewer."""
    texts = texts_of(config.texts, inputs.task, read_task(inputs.task))
    most = len(texts) if config.steps is None else config.steps * config.step_size
    chosen = sorted(np.random.default_rng(inputs.seed).permutation(len(texts))[:most].tolist())
    return Split(*([column[row] for row in chosen] for column in (texts.texts, texts.labels, texts.lines)))


def _for_teacher(config: RecoverConfig, inputs: Inputs, texts: Split | None) -> tuple[str, TokenRows, int]:
    """The sha256 of another model, the rows as its own tokens, and the id that pads them."""
    model = inputs.models[config.teacher]
    task = within_positions(inputs.task, model.folder)
    rows = tokenized(model.folder, read_task(inputs.task).train, task, task.train)
    if texts is not None:
        rows = rows.followed_by(tokenized(model.folder, texts, task, config.texts))
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
        "rows": hashlib.sha256(json.dumps([rows.tokens, _predicted(rows.labels)]).encode()).hexdigest(),
        "pad": pad_id,
        "batch": batch_size,
        "threads": inputs.threads,
        "packages": [distribution("torch"), distribution("transformers"), accelerator()],
    }
    name = f"teacher-{fingerprint(facts)[:16]}"
    return load(in_turn(lambda: once(name, compute, workspace, ending="safetensors")))["logits"]


def _predicted(labels: np.ndarray) -> list[Any]:
    """Where the model predicts: nothing to say where it does once per row."""
    return [np.flatnonzero(row >= 0).tolist() for row in labels] if of_tokens(labels) else []


def facts_of(config: RecoverConfig, lessons: Lessons, inputs: Inputs) -> dict[str, Any]:
    """What was learned from, for the artifact's metadata; nothing where it was the training rows and the dense model."""
    teacher = inputs.models[config.teacher] if config.teacher else None
    facts = {}
    if lessons.texts:
        facts["texts"] = {"file": config.texts.name, "rows": lessons.texts, "labelled": len(lessons.data.train) - lessons.texts}
    if teacher is not None:
        facts["teacher"] = {"reference": teacher.reference, "sha256": teacher.sha256}
    return facts
