"""Which outputs of a model are predictions: one per row, or one at every token that has a label.

The labels of a split determine it: (rows,), or booleans (rows, labels) where a row has several labels, or integers
(rows, longest) with IGNORED at every token without one. Outputs of a split are (predictions, outputs) either way, row after
row, so that comparisons of two models need not distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

IGNORED = -100
"""The label of a token without one, as PyTorch's losses know it."""


def of_tokens(labels: Any) -> bool:
    """Whether labels (rows, ...), an array or a tensor, are of tokens, with IGNORED among them, and not of whole rows."""
    return labels.ndim > 1 and not str(labels.dtype).endswith("bool")


def predictions_in(outputs: np.ndarray, label: Any) -> np.ndarray:
    """The predictions (predictions, outputs) of one row: `outputs` are (outputs,), or (length, outputs) with token labels."""
    if not of_tokens(np.asarray(label)[None]):
        return outputs[None]
    return outputs[np.flatnonzero(np.asarray(label) != IGNORED)]


def rows_of(labels: np.ndarray) -> np.ndarray:
    """Index of the row of every prediction, int64 (predictions,)."""
    return np.nonzero(labels != IGNORED)[0] if of_tokens(labels) else np.arange(len(labels))


def by_row(outputs: np.ndarray, labels: np.ndarray) -> Sequence[np.ndarray]:
    """Split predictions (predictions, outputs) row by row, as training takes a teacher's outputs
    (`compressor.training.training_rows.TrainingRows`): (outputs,), or (the row's predictions, outputs)."""
    if not of_tokens(labels):
        return outputs
    return np.split(outputs, np.cumsum((labels != IGNORED).sum(axis=1))[:-1])


def every_token(rows: Sequence[dict[str, list[int]]]) -> np.ndarray:
    """Labels (rows, longest) that mark every token of unpadded rows as labelled."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    return np.where(np.arange(lengths.max()) < lengths[:, None], 0, IGNORED)


def cut(labels: Any, length: int) -> Any:
    """Cut the labels (rows, ...) of a batch, an array or a tensor, to `length` tokens."""
    return labels[:, :length] if of_tokens(labels) else labels


def spread(predictions_by_row: Sequence[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """Arrange a batch from `by_row` in the shape of the model's outputs: (rows, outputs), or (rows, length, outputs) with zeros
    at tokens without a label."""
    if not of_tokens(labels):
        return np.stack(predictions_by_row)
    predictions = np.concatenate(predictions_by_row)
    outputs = np.zeros((*labels.shape, predictions.shape[-1]), dtype=predictions.dtype)
    outputs[labels != IGNORED] = predictions
    return outputs
