"""Loading shared by several stages: the task's rows as tokens, and the model of an artifact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn

from compressor.checkpoint import load, load_state, save_state
from compressor.compression import compression_of
from compressor.models.reference import Reference
from compressor.pruning.surgery import kept_of
from compressor.pruning.weights import densities_apart
from compressor.tasks.data import Data, MetricInputs, TokenRows, read_data, read_test_rows
from compressor.tasks.features import Forward, metric_inputs_of, predict, torch_forward
from compressor.tasks.task_kind import kind_recorded
from pipelines.engine.stage import Artifact, Inputs, Workspace
from pipelines.stages.generated_texts import score_model, with_scores

PARITY_ROWS = 256
"""Validation rows that a parity check compares: the longest and the shortest are among them."""


def load_data(inputs: Inputs) -> Data:
    """Read and tokenize the files of the task with the base model's tokenizer, the training rows at their first use."""
    return read_data(inputs.base.folder, inputs.task, later=True)


def load_model(artifact: Artifact, base: Reference, seed: int = 0) -> nn.Module:
    """Load the model of an artifact with its chains attached: a state on the base, or a merged checkpoint.

    `seed` sets torch's random state, which new deltas are drawn from afterwards.
    """
    return load(artifact.folder) if artifact.metadata["merged"] else load_state(artifact.folder, base.folder, seed=seed)


def density_of(artifact: Artifact, model: nn.Module) -> list[dict[str, Any]]:
    """Densities by pattern of an artifact's model, merged or with masks of W alone: of its merge or, where that would fill
    what they hide, before it. None for other models."""
    return artifact.metadata.get("density") or [asdict(row) for row in densities_apart(model)]


def predict_rows(
    forward: Forward, rows: TokenRows, data: Data, workspace: Workspace, description: str, batch_size: int | None = None
) -> np.ndarray:
    """Logits (predictions, outputs) of any `Forward`, with a progress bar; the batch size is by default that of the data."""
    with workspace.progress(description, len(rows)) as bar:
        options = {"labels": rows.labels, "batch_size": batch_size or data.batch_size, "on_batch": bar.advance}
        return predict(forward, rows.tokens, data.pad_id, **options)


def judge_rows(
    forward: Forward,
    rows: TokenRows,
    data: Data,
    workspace: Workspace,
    description: str,
    arrays_of: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
) -> MetricInputs:
    """Arrays that the kind's `finite_inputs` (or another function) computes from a model's predictions. Shows a bar.

    Raises UserError E406 for predictions that are not finite, unless another function takes them.
    """
    with workspace.progress(description, len(rows)) as bar:
        options = {"batch_size": data.batch_size, "on_batch": bar.advance}
        arrays = metric_inputs_of(
            forward, rows.tokens, data.pad_id, rows.labels, arrays_of or rows.kind.finite_inputs, **options
        )
    return MetricInputs(*arrays, rows.kind)


def score_tests(model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> dict[str, dict[str, Any]]:
    """{"tests": name -> quality} on the files of the task that are only scored; {} if it has none. Their results are recorded
    and choose nothing."""
    if not inputs.task.tests:
        return {}
    rows = read_test_rows(inputs.base.folder, inputs.task, data.label_names)
    return {"tests": {name: quality_of(model, of, inputs, data, workspace, f"scoring {name}") for name, of in rows.items()}}


def quality_of(
    model: nn.Module, rows: TokenRows, inputs: Inputs, data: Data, workspace: Workspace, description: str
) -> dict[str, Any]:
    """Every metric of a model on rows, as recorded in metadata; those of generated texts where the main one is of texts."""
    return judged(model, rows, inputs, data, workspace, description)[1]


def judged(
    model: nn.Module, rows: TokenRows, inputs: Inputs, data: Data, workspace: Workspace, description: str
) -> tuple[MetricInputs, dict[str, Any]]:
    """What the metrics of a model's outputs are computed from, and its quality (`quality_of`)."""
    found = judge_rows(torch_forward(model), rows, data, workspace, description)
    if not rows.kind.metric.of_texts:
        return found, found.quality
    scored = score_model(model, rows, inputs, data, workspace, f"{description}, generating")
    return found, with_scores(found.quality, scored.record, rows.kind.metric)


def recorded(inputs: Inputs, data: Data) -> dict[str, Any]:
    """What the file of a state or of a delta records beside the tensors: the pipeline's base, the labels and the kind."""
    base, names = inputs.base, data.label_names
    kind = kind_recorded(data.kind, len(names))
    return {"base": base.reference, "base_sha256": base.sha256, "label_names": names, "kind": kind}


def publish_model(model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> dict:
    """Measure quality on all validation rows and write the model's state; returns the metadata common to all states."""
    quality = judge_rows(torch_forward(model), data.validation, data, workspace, "validating").quality
    save_state(model, workspace.folder, **recorded(inputs, data))
    return {
        "merged": False,
        "weights_moved": compression_of(model).weights_moved,
        "quality": quality,
        "kept": kept_of(model),
        "labels": data.label_names,
    }
