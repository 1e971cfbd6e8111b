"""Regression: a number for each sentence or pair, e.g. how similar two sentences are (STS-B: 0 to 5).

One output, named after the label's column, is trained on unscaled labels, by the mean squared error: labels of a few units
suit the learning rates and the absolute parity bounds; labels in the thousands do not. The main metric is Spearman's
correlation, as usual for STS-B: it depends only on the order. Errors of scale or offset are detected by the agreement of the
parity check, the concordance of outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.errors import UserError
from compressor.models.build import head_names
from compressor.tasks.metrics import (
    concordance,
    pearson,
    pearson_and_spearman,
    pearson_and_spearman_of_draws,
    spearman,
    spearman_of_draws,
)
from compressor.tasks.task_kind import Agreement, Column, Metric, TaskKind, one_label

if TYPE_CHECKING:
    from torch import Tensor, nn

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""Format of a label. Stricter than `float()`, which also accepts '1_000' and 'nan'."""

LARGEST = float(np.finfo(np.float32).max)


def read(value: object) -> float | None:
    """A number that is finite in float32; None for anything else, including true and false."""
    if isinstance(value, str):
        number = float(value) if NUMBER.fullmatch(value := value.strip()) else math.nan
    else:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return float(number) if abs(number) <= LARGEST else None


def targets(path: Path, column: Column, names: list[str]) -> list[float]:
    """The labels. Raises UserError E208 where all are equal: there is nothing to learn, and no correlation."""
    labels = [label for _, label in column]
    if len(set(labels)) < 2:
        what = f"every row has the label {labels[0]:g}"
        raise UserError("E208", what, "A regression needs two different numbers or more in each file", str(path))
    return labels


def lacks(labels: Sequence[float], names: list[str]) -> str | None:
    """Message where all labels are equal; None otherwise."""
    return None if len(set(labels)) > 1 else "no two different labels"


def spread(labels: Sequence[float], names: list[str]) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum of the labels."""
    return {"mean": float(np.mean(labels)), "sd": float(np.std(labels)), "least": min(labels), "most": max(labels)}


def start(model: nn.Module, labels: Sequence[float]) -> None:
    """Initialize the output to the mean of the labels, where the head has a bias: otherwise the first steps are spent on that,
    and Adam's averages keep those large gradients for a long time."""
    for name in head_names(model):
        if name.endswith(".bias") and model.get_parameter(name).shape == (1,):
            model.get_parameter(name).data.fill_(float(np.mean(labels)))


def loss(outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Squared error. Outputs are (rows, 1), labels (rows,) of any floating type."""
    from torch.nn import functional

    return functional.mse_loss(outputs[:, 0], labels.to(outputs.dtype), reduction=reduction)


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """0.5 MSE against the labels + 0.5 MSE against the teacher. Outputs are (rows, 1)."""
    return 0.5 * loss(student, labels) + 0.5 * loss(student, teacher[:, 0])


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Squared error against the teacher. Outputs are (rows, 1)."""
    return loss(student, teacher[:, 0])


@dataclass(frozen=True)
class Estimate:
    """The predicted number for one text, and the name of the label."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.value:.3f}"


KIND = TaskKind(
    name="regression",
    example=one_label(read, "a finite number", "Use one number a row with a decimal point, or say kind: classification"),
    outputs=lambda task, labels: [task.label],
    targets=targets,
    lacks=lacks,
    spread=spread,
    start=start,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    metrics=(
        Metric("spearman", "Spearman", spearman, chance=0.0, by_degree=True, resampled=spearman_of_draws),
        Metric("pearson", "Pearson", pearson, by_degree=True),
    ),
    further=(
        Metric(
            "pearson_spearman",
            "mean of Pearson and Spearman",
            pearson_and_spearman,
            chance=0.0,
            by_degree=True,
            resampled=pearson_and_spearman_of_draws,
        ),
    ),
    agreement=Agreement(
        concordance,
        "concordance",
        "concordance",
        chance=lambda least, predictions: 0.0,
        beyond=lambda reference, candidate, noise: concordance(reference, candidate),
    ),
    predicted_labels=lambda outputs: outputs[:, 0],
    prediction=lambda names, row, *_: Estimate(names[0], float(row[0])),
    refuses_tokens=False,
    augments=True,
    shares_base=True,
)
