"""Length and learning rate of a training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from compressor.arguments import require_number, require_one_of, require_whole

Precision = Literal["fp32", "bf16"]
"""That of a training step's matrix products."""


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate: AdamW, linear decay after `warmup` (a fraction of all steps), gradients clipped to norm 1."""

    epochs: float
    learning_rate: float
    mask_learning_rate: float | None = None
    """Learning rate of ProPETL's scores and diff pruning's gates; None: `learning_rate`."""
    final_learning_rate: float | None = None
    """Learning rate of diff pruning after its projection; None: `learning_rate`."""
    batch_size: int = 32
    """Rows of a batch, of all processes together."""
    accumulate: int = 1
    """Number of batches whose gradients are accumulated in one step."""
    warmup: float = 0.06
    weight_decay: float = 0.0
    seed: int = 0
    max_steps: int | None = None
    """Number of optimizer steps, instead of that of `epochs`."""
    dropout: bool = True
    """False: the layers compute as in eval mode; only changes that differ in training, such as gates, do so."""
    precision: Precision = "fp32"
    """That of matrix products; parameters, gradients, optimizer and loss are fp32 in any case."""

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, get_args(Precision))
        for name in ("batch_size", "accumulate"):
            require_whole(name, getattr(self, name))
        if self.max_steps is not None:
            require_whole("max_steps", self.max_steps)
        require_number("epochs", self.epochs, 0, above=True)
        require_number("learning_rate", self.learning_rate, 0, above=True)
        require_number("warmup", self.warmup, 0, 1)

    def steps(self, rows: int) -> int:
        """Optimizer steps for a training set of `rows`."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.epoch_steps(rows) * self.epochs)

    def epoch_steps(self, rows: int) -> int:
        """Optimizer steps of one pass over `rows`."""
        return math.ceil(math.ceil(rows / self.batch_size) / self.accumulate)

    def rising(self, steps: int) -> int:
        """Number of warm-up steps among `steps`: never the last one, or a training of a single step would have rate 0."""
        return min(math.ceil(steps * self.warmup), max(0, steps - 1))

    def halves(self, first: int, steps: int) -> Callable[[int], float]:
        """Step (from 0) -> fraction of `learning_rate`: two trainings, of `first` steps and of the rest of `steps`, which ends
        at `final_learning_rate`. Each has its own warm-up and linear decay."""
        later = (self.final_learning_rate or self.learning_rate) / self.learning_rate

        def linear(step: int, of: int) -> float:
            rising = self.rising(of)
            return step / rising if step < rising else (of - step) / max(1, of - rising)

        return lambda step: linear(step, first) if step < first else later * linear(step - first, steps - first)
