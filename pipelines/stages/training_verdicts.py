"""What is said of a model that learnt nothing: shared by the training stages and the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipelines.reporting.format import hundredths

if TYPE_CHECKING:
    from compressor.tasks.task_kind import TaskKind


UNLEARNT = "the model is no better than a constant prediction"
ADVICE = "try a lower learning_rate, or more epochs"


def verdicts(kind: TaskKind, metadata: dict[str, Any]) -> Iterator[str]:
    """What a training stage says of a task that was not learnt, with what to try."""
    if kind.unlearnt(metadata["quality"]):
        yield f"{UNLEARNT}: {ADVICE}"
    if warning := below_constant(kind, metadata):
        yield f"{warning}: {ADVICE}"


def below_constant(kind: TaskKind, metadata: dict[str, Any]) -> str | None:
    """A sentence if a training's main metric is below that of one constant prediction for all rows; otherwise None."""
    constant, main = metadata.get("constant"), kind.metric
    if constant is None or (value := metadata["quality"][main.key]) >= constant:
        return None
    ours, least = (hundredths(share, main.unit) for share in (value, constant))
    return f"{main.name} is {ours}, below the {least} of a constant prediction"
