"""Quality of logits against labels, with intervals: a difference without one proves nothing."""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose largest logit is the label's. `logits` (rows, classes), `labels` (rows,)."""
    return float((logits.argmax(axis=1) == labels).mean())


def matthews(logits: np.ndarray, labels: np.ndarray) -> float:
    """Matthews correlation of predictions and labels in [-1, 1], for any number of classes (Gorodkin 2004); 0 where one of them
    is constant. CoLA's metric: guessing the larger class is worth nothing.
    """
    confusion = np.zeros((logits.shape[1], logits.shape[1]))
    np.add.at(confusion, (labels, logits.argmax(axis=1)), 1.0)
    true, predicted, rows = confusion.sum(axis=1), confusion.sum(axis=0), confusion.sum()
    covariance = np.trace(confusion) * rows - true @ predicted
    spread = (rows**2 - true @ true) * (rows**2 - predicted @ predicted)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def _interval(per_row: np.ndarray, seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean over rows."""
    draws = np.random.default_rng(seed).integers(0, len(per_row), size=(RESAMPLES, len(per_row)))
    low, high = np.percentile(per_row[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def accuracy_interval(logits: np.ndarray, labels: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the accuracy over validation rows."""
    return _interval((logits.argmax(axis=1) == labels).astype(float), seed)


def difference_interval(candidate: np.ndarray, reference: np.ndarray, labels: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % paired bootstrap interval of accuracy(candidate) - accuracy(reference): both are judged on the same draws."""
    hits = [(logits.argmax(axis=1) == labels).astype(float) for logits in (candidate, reference)]
    return _interval(hits[0] - hits[1], seed)
