"""Losses of tasks with several labels per row (`compressor.tasks.predictions`): a row counts with the mean over its labels.

So the loss of a batch, the mean over its rows, gives the same step however rows are split into batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.tasks.kinds.classification import TEMPERATURE
from compressor.tasks.predictions import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


def _mean_of_rows(each: Tensor, labels: Tensor) -> Tensor:
    """Mean over the labels of each row, (rows,): `each` (labels,) has one value per label, row after row."""
    labelled = labels != IGNORED
    sums = each.new_zeros(len(labels)).index_add(0, labelled.nonzero()[:, 0], each)
    return sums / labelled.sum(dim=1)


def loss(outputs: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy, averaged over the labels of each row, optionally with smoothed labels (Szegedy et al. 2016). Outputs are
    (rows, length, outputs), labels (rows, length)."""
    from torch.nn import functional

    labelled = labels != IGNORED
    each = functional.cross_entropy(outputs[labelled], labels[labelled], reduction="none", label_smoothing=label_smoothing)
    return getattr(_mean_of_rows(each, labels), reduction)()


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """0.5 CE + 0.5 T² KL(teacher ‖ student) at tokens with a label, as in classification. Outputs: (rows, length, outputs)."""
    soft = _divergence(student, teacher, labels, TEMPERATURE)
    return 0.5 * loss(student, labels, label_smoothing=label_smoothing) + 0.5 * TEMPERATURE**2 * soft


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """KL(teacher ‖ student) at tokens with a label, whatever it is, unsoftened. Outputs are (rows, length, outputs)."""
    return _divergence(student, teacher, labels, 1.0)


def _divergence(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Mean over rows of KL(teacher ‖ student), both softened by the temperature."""
    from torch.nn import functional

    labelled = labels != IGNORED
    softened = (functional.log_softmax(outputs[labelled] / temperature, dim=-1) for outputs in (student, teacher))
    each = functional.kl_div(*softened, reduction="none", log_target=True).sum(dim=-1)
    return _mean_of_rows(each, labels).mean()
