"""Classification: one of two or more classes for each sentence or pair."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.listing import listed
from compressor.tasks.metrics import (
    accuracy,
    accuracy_and_f1,
    decided_labels_agree,
    f1,
    labels_agree,
    macro_f1,
    matthews,
    two_errors,
)
from compressor.tasks.task_kind import Agreement, Column, Metric, TaskKind, one_label

if TYPE_CHECKING:
    from torch import Tensor

MANY_CLASSES, LEAST_ROWS, MAX_CLASSES = 200, 5, 2000
"""More than so many distinct labels with fewer rows of each on average are a column of ids or numbers, not of classes; the last
is how many there can be at all."""

MOST_SHOWN = 5
"""Scores of so many labels are shown for a text, the largest."""

INTEGER = re.compile(r"-?\d{1,99}")
"""A label that is an integer. `isdigit()` would also accept '²', and thousands of digits."""

TEMPERATURE = 2.0
"""Temperature T of the distillation loss 0.5 CE + 0.5 T² KL."""


def read(value: object) -> str | None:
    """A class as text; None if it is invalid: empty, several lines, a fraction, a list, bytes, digits that are no integer."""
    label = "" if value is None or isinstance(value, float | dict | list | bytes) else str(value).strip()
    if len(label.splitlines()) > 1:  # a server lists the labels in lines
        return None
    broken = label.lstrip("-").isdigit() and not INTEGER.fullmatch(label)
    return None if broken or not label else label


def outputs(task: TaskConfig, labels: list[str]) -> list[str]:
    """Distinct labels, integers in numeric order, words in alphabetical order. Raises UserError E208."""
    names, path = set(labels), str(task.train)
    if len(names) < 2:
        raise UserError("E208", f"every row has the label '{labels[0]:.60}'", "Training needs two classes or more", path)
    what = f"{len(names)} distinct labels in {len(labels)} rows"
    require_classes(len(names), len(labels), what, path, ", or say kind: regression where it is a score")
    return in_order(names)


def most_classes(count: int, rows: int) -> int:
    """Largest number of classes where `count` distinct labels stand in so many rows."""
    return MANY_CLASSES if rows < LEAST_ROWS * count else MAX_CLASSES


def require_classes(count: int, rows: int, what: str, path: str, otherwise: str = "") -> None:
    """Raise UserError E208, which says `what`, where `count` distinct labels in so many rows are too many to be classes."""
    most = most_classes(count, rows)
    if count > most:
        few = f" with fewer than {LEAST_ROWS} rows each" if most == MANY_CLASSES else ""
        raise UserError("E208", what, f"At most {most} classes{few}; check task.label{otherwise}", path)


def in_order(names: set[str]) -> list[str]:
    """Labels in the order of a model's outputs: integers by number, words alphabetically."""
    # not by the number alone: two spellings of one would be in another order in every process
    return sorted(sorted(names), key=int) if all(INTEGER.fullmatch(name) for name in names) else sorted(names)


def targets(path: Path, column: Column, names: list[str]) -> list[int]:
    """Indices of the labels in `names`. Raises UserError E209 for an unknown label."""
    numbers = {name: number for number, name in enumerate(names)}
    for line, label in column:
        if label not in numbers:
            what, fix = f"label '{label:.60}' never occurs in training", f"Training has: {listed(names)}"
            raise UserError("E209", what, fix, f"{path}:{line}")
    return [numbers[label] for _, label in column]


def lacks(labels: Sequence[int], names: list[str]) -> str | None:
    """Message that names the first class without a row; None if every class has one."""
    missing = set(range(len(names))) - set(labels)
    return f"none of class '{names[min(missing)]}'" if missing else None


def spread(labels: Sequence[int], names: list[str]) -> dict[str, int]:
    """Number of rows of every class."""
    counts = Counter(labels)
    return {name: counts[number] for number, name in enumerate(names)}


def constant(labels: Sequence[int]) -> float:
    """Accuracy of predicting the most frequent class for every row."""
    return max(Counter(labels).values()) / len(labels)


def constant_of(metric: Metric, labels: Sequence[int]) -> float:
    """Best value of a metric for predicting one class for every row."""
    labels = np.asarray(labels)
    return max(metric.value(np.full(len(labels), number), labels) for number in range(max(2, labels.max() + 1)))


def rarest(labels: np.ndarray) -> float:
    """About how far one prediction can move an F1 or a correlation: by a row of the smallest class."""
    counts = np.bincount(labels)
    return float(2 / counts[counts > 0].min())


def rarest_of_mean(labels: np.ndarray) -> float:
    """The same of a mean over the classes that occur."""
    return rarest(labels) / len(np.unique(labels))


def loss(logits: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy, optionally with smoothed labels (Szegedy et al. 2016). Logits are (rows, classes)."""
    from torch.nn import functional

    return functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=label_smoothing)


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """0.5 CE + 0.5 T² KL(teacher ‖ student), the KL softened by T (Hinton et al. 2015). Logits are (rows, classes).

    Smoothing applies to the labels of the CE alone: a teacher's distribution is soft already.
    """
    from torch.nn import functional

    soft = functional.kl_div(
        functional.log_softmax(student / TEMPERATURE, dim=-1),
        functional.log_softmax(teacher / TEMPERATURE, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return 0.5 * loss(student, labels, label_smoothing=label_smoothing) + 0.5 * TEMPERATURE**2 * soft


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """KL(teacher ‖ student), unsoftened. Logits are (rows, classes)."""
    from torch.nn import functional

    logs = (functional.log_softmax(logits, dim=-1) for logits in (student, teacher))
    return functional.kl_div(*logs, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class Prediction:
    """The most likely label of one text, and the probability of every label in the model's order."""

    label: str
    scores: dict[str, float]

    def __str__(self) -> str:
        return f"{self.label}  ({shown_scores(self.scores)})"


def shown_scores(scores: dict[str, float]) -> str:
    """The scores of a few labels in their order; of many the largest, and how many more there are."""
    most = sorted(scores, key=scores.__getitem__, reverse=True)[:MOST_SHOWN] if len(scores) > MOST_SHOWN else list(scores)
    more = [f"{len(scores) - MOST_SHOWN:,} more"] if len(scores) > MOST_SHOWN else []
    return "  ".join([*(f"{label} {scores[label]:.3f}" for label in most), *more])


def prediction(names: Sequence[str], logits: np.ndarray, *_: object) -> Prediction:
    """Prediction from the softmax of one row of logits, (classes,), with label names."""
    weights = np.exp(logits - logits.max())
    scores = dict(zip(names, (weights / weights.sum()).tolist(), strict=True))
    return Prediction(max(scores, key=scores.__getitem__), scores)


KIND = TaskKind(
    name="classification",
    example=one_label(read, "a class", "Use one word or integer a class"),
    outputs=outputs,
    targets=targets,
    lacks=lacks,
    spread=spread,
    constant=constant,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    smooths=True,
    classes=lambda cell: [cell],
    imitation=imitation_loss,
    metrics=(
        Metric("accuracy", "accuracy", accuracy, " %"),
        Metric("matthews", "Matthews", matthews, chance=0.0, grain=rarest),
    ),
    further=(
        Metric("f1", "F1", f1, " %", chance=0.0, of_class=True, grain=rarest),
        Metric("accuracy_f1", "mean of accuracy and F1", accuracy_and_f1, " %", of_class=True, grain=rarest),
        Metric("macro_f1", "macro F1", macro_f1, " %", grain=rarest_of_mean),
    ),
    constant_of=constant_of,
    # a classifier is unsure on random rows, so this limit is lower: it finds broken files and does not measure quality
    agreement=Agreement(
        labels_agree,
        "labels agree",
        "labels agree on",
        two_errors,
        decided_labels_agree,
    ),
    predicted_labels=lambda logits: logits.argmax(axis=1),
    decided=lambda logits: logits.argmax(axis=1),
    prediction=prediction,
    refuses_tokens=False,
    augments=True,
    shares_base=True,
)
