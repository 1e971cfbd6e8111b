"""Extractive question answering: the words of a context that answer a question, as in SQuAD, or that there is no answer.

The head is that of token classification with two outputs, the logits of an answer's beginning and of its end at each token:
the same as transformers' head for question answering. An answer lies in the context; the row's first token stands for no
answer. The loss of a row is the mean of two cross-entropies over these tokens, of the beginning and of the end of its first
answer. Main metric is the F1 of the words of the predicted and the true answer, beside it the exact match, both with SQuAD's
normalization and the best of several true answers (Rajpurkar et al. 2016, 2018).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.models.build import TOKENS
from compressor.tasks import TaskConfig
from compressor.tasks.features import in_parts, shared_rows
from compressor.tasks.kinds.best_spans import answer_characters, best_span, candidate_tokens
from compressor.tasks.kinds.classification import TEMPERATURE
from compressor.tasks.listing import cell_shown
from compressor.tasks.metrics import concordance
from compressor.tasks.predictions import IGNORED
from compressor.tasks.rows import Split, require_lengths
from compressor.tasks.task_kind import Agreement, Column, Example, Metric, TaskKind, text_cells

if TYPE_CHECKING:
    from tokenizers import Encoding
    from torch import Tensor
    from transformers import BatchEncoding

Characters = tuple[tuple[int, int], ...]
"""The characters [start, end) in the context of each answer of a row; none where the context does not answer."""
BEGINS, ENDS, MARKS = 1, 2, 4
"""The label of a candidate token is MARKS x the row's number in its file + BEGINS + ENDS, where the first answer does."""
FIX = 'Write {"text": ["..."], "answer_start": [0]}, with empty lists where the context does not answer'
PUNCTUATION = str.maketrans("", "", string.punctuation)


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """Question and context, and the characters of the answers. Raises UserError E206, E221, E222."""
    texts, where = text_cells(row, task, path, line), f"{path}:{line}"
    pairs = answer_pairs(row[task.label])
    if pairs is None:
        raise UserError("E221", f"column '{task.label}' holds {cell_shown(row[task.label])}, not answers", FIX, where)
    for text, start in pairs:
        if texts[1][start : start + len(text)] != text:
            place = texts[1].find(text)
            what = f"the answer {text!r:.60} is not in the context at character {start}"
            fix = "Copy the answer from the context" if place < 0 else f"Its first occurrence is at {place}"
            raise UserError("E222", what, fix, where)
    return texts, tuple((start, start + len(text)) for text, start in pairs)


def answer_pairs(cell: object) -> list[tuple[str, int]] | None:
    """(text, start) of every answer in SQuAD's form: two lists, or a list of objects; None where it cannot be read."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return None
    if isinstance(cell, list):
        if not all(isinstance(item, dict) for item in cell):
            return None
        cell = {key: [item.get(key) for item in cell] for key in ("text", "answer_start")}
    texts, starts = (cell.get(key) if isinstance(cell, dict) else None for key in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return None
    whole = all(isinstance(text, str) and text.strip() for text in texts) and all(type(n) is int and n >= 0 for n in starts)
    return list(zip(texts, starts, strict=True)) if whole else None


def targets(path: Path, column: Column, names: list[str]) -> list[Characters]:
    """The answers. Raises UserError E208 where no row has one."""
    if missing := lacks([answers for _, answers in column], names):
        raise UserError("E208", missing, "Training and quality need rows with an answer; check task.label", str(path))
    return [answers for _, answers in column]


def lacks(labels: Sequence[Characters], names: list[str]) -> str | None:
    """Message where no row has an answer; None otherwise."""
    return None if any(labels) else "no row with an answer"


def spread(labels: Sequence[Characters], names: list[str]) -> dict[str, int]:
    """Number of rows with an answer, and of those without."""
    answered = sum(map(bool, labels))
    return {"answered": answered, "without an answer": len(labels) - answered}


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens, and labels (rows, longest) of the candidate tokens, IGNORED elsewhere.

    Raises UserError E213 for a row longer than `max_length`, whose answer might be cut off, and for an answer without a token.
    """
    questions, contexts = (list(column) for column in zip(*split.texts, strict=True))
    rows, places, known = [], [], {}
    for part in in_parts(tokenizer, [questions, contexts], truncation=False, return_offsets_mapping=True):
        places += _candidates(part)
        del part["offset_mapping"]
        rows += shared_rows(part, known)
    lengths = [len(row["input_ids"]) for row in rows]
    require_lengths(lengths, task.max_length, split, path, "rows", "split such contexts")
    labels = np.full((len(lengths), max(lengths)), IGNORED, dtype=np.int64)
    for row, answers in enumerate(split.labels):
        candidates, offsets = places[row]
        begin, end = span_of(answers[0], offsets) if answers else (0, 0)
        if begin is None:
            what = f"the tokenizer produces no token for the answer {contexts[row][slice(*answers[0])]!r:.60}"
            raise UserError("E213", what, "Fix or remove such rows", f"{path}:{split.lines[row]}")
        labels[row, candidates] = MARKS * row
        labels[row, candidates[begin]] += BEGINS
        labels[row, candidates[end]] += ENDS
    return rows, labels


def _candidates(part: BatchEncoding) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """The candidate tokens of each row, and their characters."""
    for row, offsets in enumerate(part["offset_mapping"]):
        candidates = candidate_tokens(offsets, part.sequence_ids(row))
        yield candidates, [offsets[token] for token in candidates]


def span_of(characters: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int | None, int | None]:
    """(first, last) of the candidates that cover an answer; None where there is none. `offsets` are the candidates'."""
    start, stop = characters
    inside = [number for number, (begin, end) in enumerate(offsets) if number and begin < stop and end > start]
    return (inside[0], inside[-1]) if inside else (None, None)


@dataclass(frozen=True)
class ContextTexts:
    """The contexts of one file with the characters of their candidate tokens, and the true answers: what its metrics need.

    Called as `TaskKind.metric_inputs`; a label says which row of the file it is of.
    """

    contexts: Sequence[str]
    offsets: Sequence[Sequence[tuple[int, int]]]
    answers: Sequence[Characters]

    def __call__(self, outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """F1 and exact match (rows, 2) of the predicted answers, and ones (rows,)."""
        marked = labels != IGNORED
        scores = []
        for number, logits in zip(numbers_of(labels), np.split(outputs, np.cumsum(marked.sum(axis=1))[:-1]), strict=True):
            start, end = self.characters(number, logits)
            scores.append(self.score(number, self.contexts[number][start:end]))
        return np.array(scores), np.ones(len(labels))

    def offsets_of(self, labels: np.ndarray) -> list[Sequence[tuple[int, int]]]:
        """The characters of the candidate tokens of some rows, by their labels."""
        return [self.offsets[number] for number in numbers_of(labels)]

    def characters(self, number: int, logits: np.ndarray) -> tuple[int, int]:
        """The characters of the predicted answer in a row's context, from the logits (candidates, 2); (0, 0) for none."""
        first, last, _ = best_span(logits)
        return answer_characters(self.contexts[number], self.offsets[number], first, last)

    def score(self, number: int, predicted: str) -> tuple[float, float]:
        """(F1, exact match) of a predicted answer, the best over the row's true ones."""
        true = [self.contexts[number][start:end] for start, end in self.answers[number]] or [""]
        return max(word_f1(predicted, text) for text in true), max(exact(predicted, text) for text in true)


def numbers_of(labels: np.ndarray) -> np.ndarray:
    """The number in its file of each row of labels."""
    return labels.max(axis=1) // MARKS


def with_texts(kind: TaskKind, tokenizer, split: Split) -> TaskKind:
    """The kind for the rows of one file: its metrics compare texts."""
    questions, contexts = (list(column) for column in zip(*split.texts, strict=True))
    parts = in_parts(tokenizer, [questions, contexts], truncation=False, return_offsets_mapping=True)
    offsets = [spans for part in parts for _, spans in _candidates(part)]
    return replace(kind, metric_inputs=ContextTexts(contexts, offsets, split.labels))


def normalized(text: str) -> list[str]:
    """The words of a text by SQuAD's normalization: lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def word_f1(predicted: str, true: str) -> float:
    """F1 of the normalized words of two texts; where one has none, whether both have none."""
    ours, theirs = normalized(predicted), normalized(true)
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def exact(predicted: str, true: str) -> float:
    """Whether two texts have the same normalized words."""
    return float(normalized(predicted) == normalized(true))


def loss(outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Mean of the cross-entropies of an answer's beginning and end. Outputs are (rows, length, 2), labels (rows, length)."""
    marked = labels != IGNORED
    places = ((labels & mark > 0) & marked for mark in (BEGINS, ENDS))
    logs = _log_softmax(outputs, labels)
    each = sum(-logs[..., side][place] for side, place in enumerate(places)) / 2
    return getattr(each, reduction)()


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """0.5 CE + 0.5 T² KL(teacher ‖ student) of beginning and end, softened by T. Outputs are (rows, length, 2)."""
    return 0.5 * loss(student, labels) + 0.5 * TEMPERATURE**2 * _divergence(student, teacher, labels, TEMPERATURE)


def imitation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """KL(teacher ‖ student) of beginning and end, unsoftened. Outputs are (rows, length, 2)."""
    return _divergence(student, teacher, labels, 1.0)


def _log_softmax(outputs: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities over the candidate tokens of each row, of beginning and of end; others have almost none."""
    import torch

    least = torch.finfo(outputs.dtype).min / 4
    return outputs.masked_fill((labels == IGNORED)[..., None], least).log_softmax(dim=1)


def _divergence(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Mean over rows of the mean of both KL(teacher ‖ student)."""
    from torch.nn import functional

    softened = (_log_softmax(outputs / temperature, labels) for outputs in (student, teacher))
    return functional.kl_div(*softened, reduction="none", log_target=True).sum(dim=1).mean()


def outputs_agree(reference: np.ndarray, candidate: np.ndarray) -> float:
    """The lower concordance of the logits of beginnings, and of those of ends. Logits are (tokens, 2)."""
    return min(concordance(reference[:, [side]], candidate[:, [side]]) for side in (0, 1))


@dataclass(frozen=True)
class Answer:
    """The answer in a context, its characters [start, end) there, and its probability; empty where there is none."""

    answer: str
    start: int
    end: int
    score: float

    def __str__(self) -> str:
        return f"{self.answer or '-'}  ({self.score:.3f})"


def written(text: Any) -> Any:
    """A question and its context. Raises UserError E717 for a single text."""
    if isinstance(text, str):
        raise UserError("E717", f"{text!r:.60} has no context", "Give a question, and its context as the second of a pair")
    return text


def prediction(names: Sequence[str], logits: np.ndarray, text: tuple[str, str], encoding: Encoding) -> Answer:
    """The answer to a question in its context, from logits (length, 2). Raises UserError E717 for a row that is too long."""
    if encoding.overflowing:
        raise UserError("E717", f"the context {text[1]!r:.60} is longer than the model reads", "Split the context")
    candidates = candidate_tokens(encoding.offsets, encoding.sequence_ids)
    first, last, score = best_span(logits[candidates])
    start, end = answer_characters(text[1], [encoding.offsets[token] for token in candidates], first, last)
    return Answer(text[1][start:end], start, end, score)


KIND = TaskKind(
    name="spans",
    example=example,
    outputs=lambda task, labels: ["start", "end"],
    targets=targets,
    lacks=lacks,
    spread=spread,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    placeholder=lambda texts: (),
    truncates=False,
    metrics=(
        Metric("f1", "answer F1", lambda predicted, _: float(predicted[:, 0].mean()), " %", chance=0.0),
        Metric("exact_match", "exact match", lambda predicted, _: float(predicted[:, 1].mean()), " %"),
    ),
    agreement=Agreement(
        outputs_agree,
        "concordance",
        "concordance",
        chance=lambda least, predictions: 0.0,
        beyond=lambda reference, candidate, noise: outputs_agree(reference, candidate),
        softmax=False,  # each is over the tokens
    ),
    predicted_labels=lambda logits: logits.argmax(axis=1),
    prediction=prediction,
    written=written,
    auto_class=TOKENS,
    encode=encode,
    with_texts=with_texts,
)
