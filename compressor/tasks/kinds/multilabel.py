"""Multi-label classification: any number of labels, also none, for each sentence or pair.

A row's labels are a JSON list, or a text with commas, semicolons or bars between them. Each output is the logit of one label,
trained alone (sigmoid and binary cross-entropy); a label is predicted where its probability is above 0.5. The main metric is
micro F1 over all labels of all rows; macro F1 (the mean over labels) and the share of rows with exactly the right labels
stand beside it, by scikit-learn's definitions: a label that is neither true nor predicted anywhere has the F1 0.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.features import tokenize
from compressor.tasks.kinds.classification import TEMPERATURE, in_order, read, require_classes, shown_scores
from compressor.tasks.listing import cell_shown, listed
from compressor.tasks.metrics import NOISES, OfRows, two_errors
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import Agreement, Column, Example, Metric, TaskKind, text_cells

if TYPE_CHECKING:
    from torch import Tensor

LabelSet = tuple[bool, ...]
"""Whether a row has each label, in the order of the outputs."""
SEPARATOR = re.compile(r"[,;|]")
LIST_FIX = 'Write a JSON list such as ["joy", "love"], or labels with commas between them; [] is a row without a label'


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """The texts of a row, and its labels. Raises UserError E206, E220."""
    texts, where = text_cells(row, task, path, line), f"{path}:{line}"
    cells = cells_of(row[task.label])
    if cells is None:
        what = f"column '{task.label}' holds {cell_shown(row[task.label])}, not a list of labels"
        raise UserError("E220", what, LIST_FIX, where)
    labels = [read(cell) for cell in cells]
    for cell, label in zip(cells, labels, strict=True):
        if label is None:
            raise UserError("E220", f"{cell!r:.60} in column '{task.label}' is not a label", LIST_FIX, where)
    if len(set(labels)) < len(labels):
        raise UserError("E220", f"label '{Counter(labels).most_common(1)[0][0]:.60}' appears twice", "Keep one", where)
    return texts, tuple(labels)


def cells_of(cell: object) -> list | None:
    """The members of a list in JSON, or of a text with separators; None for anything else."""
    if isinstance(cell, str) and cell.strip().startswith("["):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    if isinstance(cell, str):
        return [part.strip() for part in SEPARATOR.split(cell)] if cell.strip() else []
    return cell if isinstance(cell, list) else None


def outputs(task: TaskConfig, labels: list[tuple[str, ...]]) -> list[str]:
    """Distinct labels, integers in numeric order, words in alphabetical order. Raises UserError E208."""
    names, path = {label for row in labels for label in row}, str(task.train)
    if len(names) < 2:
        what = f"{len(names)} distinct labels in {len(labels)} rows"
        raise UserError("E208", what, "Training needs two labels or more; for one, say kind: classification", path)
    uses = sum(len(row) for row in labels)
    require_classes(len(names), uses, f"{len(names)} distinct labels, {uses:,} in all", path)
    return in_order(names)


def targets(path: Path, column: Column, names: list[str]) -> list[LabelSet]:
    """Which of `names` each row has. Raises UserError E209 for an unknown label, E208 where no row has one."""
    known = set(names)
    for line, labels in column:
        if unknown := [label for label in labels if label not in known]:
            what, fix = f"label '{unknown[0]:.60}' never occurs in training", f"Training has: {listed(names)}"
            raise UserError("E209", what, fix, f"{path}:{line}")
    if not any(labels for _, labels in column):
        raise UserError("E208", "no row has a label", "F1 is undefined without labels", str(path))
    return [tuple(name in labels for name in names) for _, labels in column]


def lacks(labels: Sequence[LabelSet], names: list[str]) -> str | None:
    """Message that names the first label without a row; None if every label has one."""
    missing = np.flatnonzero(~np.array(labels, dtype=bool).reshape(-1, len(names)).any(axis=0))
    return f"none of label '{names[missing[0]]}'" if len(missing) else None


def spread(labels: Sequence[LabelSet], names: list[str]) -> dict[str, int]:
    """Number of rows that have each label."""
    return dict(zip(names, np.array(labels).sum(axis=0).tolist(), strict=True))


def constant(labels: Sequence[LabelSet]) -> float:
    """Largest micro F1 of the same labels for every row, which are the most frequent ones."""
    counts = -np.sort(-np.array(labels).sum(axis=0))
    predicted = len(labels) * np.arange(1, len(counts) + 1)
    return float((2 * counts.cumsum() / (predicted + counts.sum())).max())


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens, and booleans (rows, labels)."""
    return tokenize(tokenizer, split, task), np.array(split.labels, dtype=bool)


def loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross-entropy, the mean over the labels of each row. Logits and labels are (rows, labels)."""
    from torch.nn import functional

    each = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
    return getattr(each.mean(dim=1), reduction)()


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """0.5 BCE + 0.5 T² KL(teacher ‖ student) of each label's probability, softened by T. Logits are (rows, labels)."""
    return 0.5 * loss(student, labels) + 0.5 * TEMPERATURE**2 * _divergence(student / TEMPERATURE, teacher / TEMPERATURE)


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """KL(teacher ‖ student) of each label's probability, unsoftened. Logits are (rows, labels)."""
    return _divergence(student, teacher)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows and labels of the KL divergence of two Bernoulli distributions."""
    from torch.nn import functional

    cross, own = (
        functional.binary_cross_entropy_with_logits(logits, teacher.sigmoid(), reduction="mean")
        for logits in (student, teacher)
    )
    return cross - own


def micro_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """2 right / (predicted + true) over all labels of all rows; 0 where there is none. Booleans (rows, labels)."""
    return float(_f1((predicted & labels).sum(), predicted.sum() + labels.sum()))


def micro_f1_of_draws(predicted: np.ndarray, labels: np.ndarray) -> OfRows:
    """`micro_f1` on draws of these rows, from counts of each row: with 200 labels in a hundredth of its time."""
    right, total = (predicted & labels).sum(axis=1), predicted.sum(axis=1) + labels.sum(axis=1)
    return lambda rows: float(_f1(right[rows].sum(), total[rows].sum()))


def macro_f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Mean over labels of their F1, which is 0 for a label that is neither true nor predicted. Booleans (rows, labels)."""
    return float(_f1((predicted & labels).sum(axis=0), predicted.sum(axis=0) + labels.sum(axis=0)).mean())


def macro_f1_of_draws(predicted: np.ndarray, labels: np.ndarray) -> OfRows:
    """`macro_f1` on draws of these rows: the mean over the labels that occur in a draw, times the share of labels that occur in
    all rows. A draw often lacks the few rows of a rare label: counted as 0 there, it would pull the draws below the value."""
    from scipy import sparse  # imported here: it would dominate the time of checking a pipeline file

    # of each row the right, then all of every label: mostly zeros, which the product with the counts of a draw leaves out
    each = np.hstack([predicted & labels, predicted.astype(np.int8) + labels])
    by_label, share = sparse.csr_array(each.T, dtype=np.float64), each.any(axis=0)[labels.shape[1] :].mean()

    def of_draw(rows: np.ndarray) -> float:
        right, total = np.split(by_label @ np.bincount(rows, minlength=len(labels)), 2)
        return float(share * _f1(right, total)[total > 0].mean()) if total.any() else 0.0

    return of_draw


def _f1(right: np.ndarray, total: np.ndarray) -> np.ndarray:
    """2 right / total, which is predicted + true, of numbers or arrays; 0 where there is none."""
    return 2 * right / np.maximum(total, 1)


def exact_match(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of rows whose labels are all right, and no others predicted. Booleans (rows, labels)."""
    return float((predicted == labels).all(axis=1).mean())


def exact_match_of_draws(predicted: np.ndarray, labels: np.ndarray) -> OfRows:
    """`exact_match` on draws of these rows."""
    right = (predicted == labels).all(axis=1)
    return lambda rows: float(right[rows].mean())


def of_the_rarest(labels: np.ndarray) -> float:
    """About how far one decision can move macro F1: by a row of the rarest label. Booleans (rows, labels)."""
    counts = labels.sum(axis=0)
    return float(2 / counts[counts > 0].min() / labels.shape[1])


def decisions_agree(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Share of all (row, label) decisions that are equal in two arrays of logits (rows, labels)."""
    return float(((reference > 0) == (candidate > 0)).mean())


def clear_decisions_agree(reference: np.ndarray, candidate: np.ndarray, noise: float) -> float:
    """`decisions_agree`, where logits within NOISES x the rounding noise of 0 count as agreeing.

    `noise` is that of the difference of two logits, √2 times as much as of one.
    """
    turned = (reference > 0) != (candidate > 0)
    return float(1 - (turned & (np.abs(reference) > NOISES * noise / np.sqrt(2))).mean())


@dataclass(frozen=True)
class LabelsFound:
    """The labels of one text with a probability above 0.5, and the probability of every label in the model's order."""

    labels: tuple[str, ...]
    scores: dict[str, float]

    def __str__(self) -> str:
        return f"{', '.join(self.labels) or '-'}  ({shown_scores(self.scores)})"


def prediction(names: Sequence[str], logits: np.ndarray, *_: object) -> LabelsFound:
    """The labels of one row of logits, (labels,), and their probabilities."""
    scores = dict(zip(names, (1 / (1 + np.exp(-logits))).tolist(), strict=True))
    return LabelsFound(tuple(name for name, logit in zip(names, logits, strict=True) if logit > 0), scores)


KIND = TaskKind(
    name="multilabel",
    # 2 in one list and "2" in another are one label
    classes=lambda cell: [read(member) for member in cells_of(cell)],
    example=example,
    outputs=outputs,
    targets=targets,
    lacks=lacks,
    spread=spread,
    constant=constant,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    placeholder=lambda texts: (False,),
    problem_type="multi_label_classification",
    metrics=(
        Metric("micro_f1", "micro F1", micro_f1, " %", chance=0.0, resampled=micro_f1_of_draws),
        Metric("macro_f1", "macro F1", macro_f1, " %", grain=of_the_rarest, resampled=macro_f1_of_draws),
        Metric(
            "exact_match",
            "exact match",
            exact_match,
            " %",
            grain=lambda labels: 1 / len(labels),
            resampled=exact_match_of_draws,
        ),
    ),
    # a row lacks most labels, and clearly so: agreement is easier to reach than between classes
    agreement=Agreement(
        decisions_agree, "decisions agree", "decisions agree on", two_errors, clear_decisions_agree, softmax=False
    ),
    predicted_labels=lambda logits: logits > 0,
    prediction=prediction,
    grain=lambda labels: 2 / max(int(labels.sum()), 1),
    encode=encode,
    refuses_tokens=False,
    augments=True,
    metric_inputs=lambda outputs, labels: (outputs > 0, labels),
)
