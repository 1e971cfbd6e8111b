"""Multiple choice: which of several texts goes with the first text of a row, as in COPA and SWAG.

The model is one for pairs with one output, the score of (text, choice); a row is all its pairs, and the choice with the
largest score is its prediction. So a file of the model and a server score pairs, as of a regression, and know nothing of
choices; here the scores of a row's pairs are its logits (rows, choices). Loss is the cross-entropy over them, the metric is
accuracy. All rows of a task have the same number of choices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.features import GroupedRow, tokenize
from compressor.tasks.kinds import classification
from compressor.tasks.kinds.classification import INTEGER
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.listing import cell_shown
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import Column, Example, TaskKind, require_text

if TYPE_CHECKING:
    from torch import Tensor

LIST_FIX = 'Name a column for each choice in task.text, or one with lists such as ["it rained", "it snowed"]'


def choice_texts(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> tuple[str, ...]:
    """The text and the choices of a row, from a column each, or from one with a list. Raises UserError E206, E223."""
    first, *columns = task.text_columns
    where = f"{path}:{line}"
    choices = [row[name] for name in columns]
    if len(columns) == 1:
        choices = listed_choices(choices[0])
        if choices is None or len(choices) < 2:
            what = f"column '{columns[0]}' holds {cell_shown(row[columns[0]])}, not a list of two choices or more"
            raise UserError("E223", what, LIST_FIX, where)
    names = columns if len(columns) > 1 else columns * len(choices)
    for name, text in ((first, row[first]), *zip(names, choices, strict=True)):
        require_text(name, text, where)
    return (row[first], *choices)


def listed_choices(cell: object) -> list | None:
    """The members of a list in JSON; None for anything else."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    return cell if isinstance(cell, list) else None


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """The text and the choices of a row; (number of the right one, how many there are). Raises UserError E206, E223, E224."""
    texts = choice_texts(row, task, path, line)
    cell, count = row[task.label], len(texts) - 1
    number = str(cell).strip() if isinstance(cell, int | str) and not isinstance(cell, bool) else ""
    if not INTEGER.fullmatch(number) or not 0 <= int(number) < count:
        what = f"column '{task.label}' holds {cell_shown(cell)}, not the number of one of {count} choices"
        raise UserError("E224", what, f"Count them from 0 to {count - 1}", f"{path}:{line}")
    return texts, (int(number), count)


def outputs(task: TaskConfig, labels: list[tuple[int, int]]) -> list[str]:
    """The name of the only output, the score of a pair; it tells the number of choices."""
    return [score_name(labels[0][1])]


def score_name(count: int) -> str:
    """Name of the score of one of `count` choices."""
    return f"score of {count} choices"


def targets(path: Path, column: Column, names: list[str]) -> list[int]:
    """The numbers of the right choices. Raises UserError E223 for a row with more or fewer choices than in training."""
    for line, (_, count) in column:
        if score_name(count) != names[0]:
            what = f"{count} choices, where the first training row is for a {names[0]}"
            raise UserError("E223", what, "Give every row the same number of choices", f"{path}:{line}")
    return [number for _, (number, _) in column]


def spread(labels: Sequence[int], names: list[str]) -> dict[str, int]:
    """Number of rows whose right choice is the first, the second, ..."""
    counts = Counter(labels)
    return {f"choice {number}": counts[number] for number in range(max(labels) + 1)}


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[GroupedRow], np.ndarray]:
    """The tokens of every row's pairs, and the numbers of the right choices (rows,). Raises UserError E223."""
    count = len(split.texts[0]) - 1
    for texts, line in zip(split.texts, split.lines, strict=True):
        if len(texts) - 1 != count:
            what = f"{len(texts) - 1} choices, where the first row has {count}"
            raise UserError("E223", what, "Give every row the same number of choices", f"{path}:{line}")
    firsts = [first for first, *choices in split.texts for _ in choices]
    seconds = [choice for _, *choices in split.texts for choice in choices]
    pairs = tokenize(tokenizer, Split(list(zip(firsts, seconds, strict=True)), split.labels), task)
    groups = (pairs[start : start + count] for start in range(0, len(pairs), count))
    return [{key: [pair[key] for pair in group] for key in group[0]} for group in groups], np.array(split.labels)


def by_choice(outputs: Tensor, labels: Tensor) -> Tensor:
    """Scores of pairs (rows x choices, 1), or stored ones (rows, choices), as logits (rows, choices)."""
    return outputs.reshape(len(labels), -1)


def loss(outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy over the choices of each row. Outputs are (rows x choices, 1), row after row."""
    return classification.loss(by_choice(outputs, labels), labels, reduction)


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """0.5 CE + 0.5 T² KL(teacher ‖ student) over the choices of each row."""
    return classification.distillation_loss(by_choice(student, labels), by_choice(teacher, labels), labels)


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """KL(teacher ‖ student) over the choices of each row, unsoftened."""
    return classification.imitation_loss(by_choice(student, labels), by_choice(teacher, labels), labels)


@dataclass(frozen=True)
class Choice:
    """The most likely choice for one text, its number, and the probability of each in the order given."""

    choice: str
    number: int
    scores: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.choice}  ({'  '.join(f'{score:.3f}' for score in self.scores)})"


def chosen(choices: Sequence[str], scores: Sequence[float]) -> Choice:
    """The choice with the largest score of its pair."""
    weights = np.exp(np.array(scores) - max(scores))
    best = int(weights.argmax())
    return Choice(choices[best], best, tuple((weights / weights.sum()).tolist()))


TIMED = "Latency, throughput and FLOPs are of one pair of texts: a row of the task has one for each choice."

KIND = TaskKind(
    name="choices",
    example=example,
    texts=choice_texts,
    outputs=outputs,
    targets=targets,
    lacks=lambda labels, names: None if labels else "no row",
    spread=spread,
    constant=classification.constant,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    metrics=(replace(CLASSIFICATION.metrics[0], note=TIMED),),
    agreement=CLASSIFICATION.agreement,
    predicted_labels=lambda logits: logits.argmax(axis=1),
    decided=lambda logits: logits.argmax(axis=1),
    # of one pair; a client puts those of a row together
    prediction=lambda names, row, *_: float(row[0]),
    encode=encode,
    pair=lambda task: True,
    sentences=1,
)
