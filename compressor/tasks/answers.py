"""Where a model answers: once a row, or at every token that has a label of its own.

The labels of a split say which: (rows,), or (rows, longest) with IGNORED at every token without one. Outputs of a split are
(answers, outputs) either way, row after row, so that whoever compares two models need not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

IGNORED = -100
"""The label of a token without one, as PyTorch's losses know it."""


def answers_in(outputs: np.ndarray, label: Any) -> np.ndarray:
    """The answers (answers, outputs) of one row: `outputs` are (outputs,), or (length, outputs) where tokens have labels."""
    if np.ndim(label) == 0:
        return outputs[None]
    return outputs[np.flatnonzero(np.asarray(label) != IGNORED)]


def rows_of(labels: np.ndarray) -> np.ndarray:
    """The row of every answer, int64 (answers,)."""
    return np.arange(len(labels)) if labels.ndim == 1 else np.nonzero(labels != IGNORED)[0]


def by_row(outputs: np.ndarray, labels: np.ndarray) -> Sequence[np.ndarray]:
    """Answers (answers, outputs) as a training takes a teacher's (`compressor.training.trainer.Rows`), row by row: (outputs,),
    or (the row's answers, outputs)."""
    if labels.ndim == 1:
        return outputs
    return np.split(outputs, np.cumsum((labels != IGNORED).sum(axis=1))[:-1])


def every_token(rows: Sequence[dict[str, list[int]]]) -> np.ndarray:
    """Labels (rows, longest) that ask for an answer at every token of unpadded rows."""
    lengths = np.array([len(row["input_ids"]) for row in rows])
    return np.where(np.arange(lengths.max()) < lengths[:, None], 0, IGNORED)


def cut(labels: Any, length: int) -> Any:
    """The labels (rows, ...) of a batch that is `length` tokens long, an array or a tensor."""
    return labels if labels.ndim == 1 else labels[:, :length]


def spread(taught: Sequence[np.ndarray], labels: np.ndarray) -> np.ndarray:
    """A batch of what `by_row` gives, in the shape that a model gives it: (rows, outputs), or (rows, length, outputs) with
    zeros at tokens without a label."""
    if labels.ndim == 1:
        return np.stack(taught)
    answers = np.concatenate(taught)
    outputs = np.zeros((*labels.shape, answers.shape[-1]), dtype=answers.dtype)
    outputs[labels != IGNORED] = answers
    return outputs
