"""What differs between kinds of tasks, one object a kind: `kind_of("regression")`. Everything else asks it.

A new kind is a file here with a `KIND` row, and a word in `KINDS`. A kind whose model is none for sequences (tokens, text) will
also have to say which Auto class builds it: `compressor.models.hollow` and `compressor.checkpoint` know one so far.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.tasks import KINDS, TaskConfig
from compressor.tasks.metrics import interval

if TYPE_CHECKING:
    from torch import Tensor, nn

Labels = Sequence[int] | Sequence[float]
Column = Sequence[tuple[int, Any]]
"""(line, label) of every row of a file."""


@dataclass(frozen=True)
class Metric:
    """A figure of quality, the larger the better: a kind whose figure falls turns its sign.

    `value` takes outputs (rows, outputs) and labels (rows,). `key` names it in metadata, `name` in sentences; 100 times the
    value is shown, with `unit` behind it.
    """

    key: str
    name: str
    value: Callable[[np.ndarray, np.ndarray], float]
    unit: str = ""


@dataclass(frozen=True)
class Agreement:
    """How far two models say the same, whatever the labels are.

    `measure` takes two arrays of outputs (rows, outputs) and gives 1.0 where they say the same. `least` is what a hop that
    bounds no single difference must reach, by the kind of hop; `name` heads a column, `words` come before the share.
    """

    measure: Callable[[np.ndarray, np.ndarray], float]
    name: str
    words: str
    least: Mapping[str, float]


@dataclass(frozen=True)
class Kind:
    """A row of the table of kinds.

    - `read`: a cell of the label's column -> the label, None for what is none; `label` says what one is, and how to mend it;
    - `outputs`: (task, the training labels) -> the names of the model's outputs; raises UserError E208;
    - `targets`: (file, its labels, the outputs' names) -> what loss and metrics take; raises UserError E208, E209;
    - `lacks`: (targets of a part of the rows, the outputs' names) -> what is missing for a training on it, or None;
    - `start`: (model, training targets) -> None: what is known of a fresh task head before any training is written into it;
    - `loss`: (outputs (rows, outputs), labels (rows,), reduction "mean" or "sum") -> a scalar;
    - `distillation`: (student's outputs, teacher's outputs, labels) -> a scalar, the mean over rows;
    - `metrics`: the first is the one that gates, intervals and reports are about;
    - `answers`: outputs -> the labels that the model itself would give;
    - `prediction`: (the outputs' names, one row of outputs) -> what a client is told, a dataclass that is shown by `str`.
    """

    name: str
    label: tuple[str, str]
    read: Callable[[object], Any]
    outputs: Callable[[TaskConfig, list], list[str]]
    targets: Callable[[Path, Column, list[str]], Labels]
    lacks: Callable[[Labels, list[str]], str | None]
    start: Callable[[nn.Module, Labels], None]
    loss: Callable[..., Tensor]
    distillation: Callable[[Tensor, Tensor, Tensor], Tensor]
    metrics: tuple[Metric, ...]
    agreement: Agreement
    answers: Callable[[np.ndarray], np.ndarray]
    prediction: Callable[[Sequence[str], np.ndarray], Any]

    @property
    def metric(self) -> Metric:
        """The main one."""
        return self.metrics[0]

    def quality(self, outputs: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        """Every metric, the main one with its 95 % bootstrap interval, as they stand in metadata and reports."""
        main, *others = self.metrics
        return {
            main.key: main.value(outputs, labels),
            "interval": list(interval(main.value, outputs, labels)),
            **{other.key: other.value(outputs, labels) for other in others},
            "rows": len(labels),
        }


def kind_of(name: str) -> Kind:
    """The kind called `name`. Raises ValueError for an unknown name."""
    if name not in KINDS:
        raise ValueError(f"no kind of task is called {name!r}")
    return importlib.import_module(f"compressor.tasks.{name}").KIND


def kind_with(outputs: int) -> Kind:
    """The kind of a sequence model with so many outputs that says nothing else of itself: a single one is a number."""
    return kind_of("regression" if outputs == 1 else "classification")
