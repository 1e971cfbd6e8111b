"""Token classification: a tag for each word of a sentence, such as the entities of CoNLL-2003.

Tags are O, B-TYPE and I-TYPE. They are read as IOB2, so that an I-TYPE that does not follow its own type begins an entity:
IOB1 and invalid sequences are then read as by conlleval and seqeval (by default). The outputs are O and, for every type that
occurs in training, B-TYPE and I-TYPE: output 2k + 1 begins an entity of type k, 2k + 2 continues it.

The output at a word's first token is its prediction. The loss of a row is the mean over its words, that of a batch over rows:
so a step is the same however its rows are split into batches. The main metric is micro F1 of entities: the same words, the
same type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.models.build import TOKENS
from compressor.tasks import TaskConfig, ending
from compressor.tasks.features import in_parts, shared_rows
from compressor.tasks.first_tokens import first_tokens
from compressor.tasks.kinds.classification import MANY_CLASSES
from compressor.tasks.kinds.token_losses import distillation_loss, imitation_loss, loss
from compressor.tasks.listing import cell_shown, listed
from compressor.tasks.metrics import decided_labels_agree, entity_f1, entity_starts, labels_agree, two_errors, word_accuracy
from compressor.tasks.predictions import IGNORED, rows_of
from compressor.tasks.reading import WORD_FILES
from compressor.tasks.rows import Split, require_lengths
from compressor.tasks.task_kind import Agreement, Column, Example, Metric, TaskKind

if TYPE_CHECKING:
    from tokenizers import Encoding

OUTSIDE = "O"
WORDS_FIX = 'Give a list of words in .jsonl, e.g. ["EU", "rejects"], or a word a line in .conll'


def sentence_words(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> tuple[tuple[str, ...]]:
    """The words of a sentence. Raises UserError E206."""
    column, words = task.text_columns[0], row[task.text_columns[0]]
    if not isinstance(words, list) or not words:
        raise UserError("E206", f"column '{column}' holds {cell_shown(words)}, not words", WORDS_FIX, f"{path}:{line}")
    for number, word in enumerate(words):
        if not isinstance(word, str) or word.split() != [word]:
            fix = "Fix or remove it, with its tag: a word is text without spaces"
            raise UserError("E206", f"word {number + 1} is {word!r:.60}", fix, _place(path, line, number))
    return (tuple(words),)


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """The words of a sentence, and their tags in IOB2. Raises UserError E206, E207, E214."""
    ((words,), tags) = sentence_words(row, task, path, line), row[task.label]
    if not isinstance(tags, list):
        fix = 'Give a list with a tag for each word, e.g. ["B-ORG", "O"]'
        raise UserError("E207", f"column '{task.label}' holds {cell_shown(tags)}, not tags", fix, f"{path}:{line}")
    if len(tags) != len(words):
        raise UserError("E214", f"{len(words)} words and {len(tags)} tags", "Give each word one tag", f"{path}:{line}")
    for number, tag in enumerate(tags):
        if not is_tag(tag):
            what = f"{tag!r:.60} of word {number + 1} ('{words[number]:.40}') is not a tag"
            raise UserError("E207", what, "Write O, B-TYPE or I-TYPE", _place(path, line, number))
    return (words,), to_iob2(tags)


def _place(path: Path, line: int, number: int) -> str:
    """Location of a word for an error message: in a file of word columns its own line, else the line of its row."""
    return f"{path}:{line + number if ending(path) in WORD_FILES else line}"


def is_tag(tag: object) -> bool:
    """Whether `tag` is O, or B- or I- with a type."""
    return isinstance(tag, str) and re.fullmatch(r"O|[BI]-\S+", tag) is not None


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The same entities in IOB2: each begins with a B- tag."""
    before = pairwise([OUTSIDE, *tags])
    return [f"B-{tag[2:]}" if tag[:2] == "I-" and last[2:] != tag[2:] else tag for last, tag in before]


def outputs(task: TaskConfig, labels: list[list[str]]) -> list[str]:
    """O, then B- and I- of every type, in alphabetical order. Raises UserError E208."""
    types = sorted({tag[2:] for tags in labels for tag in tags if tag != OUTSIDE})
    if not types:
        raise UserError("E208", "every word has the tag O", "Training needs at least one entity", str(task.train))
    if 1 + 2 * len(types) > MANY_CLASSES:
        what = f"{len(types)} types of entities"
        raise UserError("E208", what, f"At most {(MANY_CLASSES - 1) // 2}; check task.label", str(task.train))
    return [OUTSIDE, *(f"{prefix}-{name}" for name in types for prefix in "BI")]


def targets(path: Path, column: Column, names: list[str]) -> list[list[int]]:
    """Indices of the tags in `names`. Raises UserError E209 for an unknown type, E208 where there is no entity."""
    numbers = {name: number for number, name in enumerate(names)}
    for line, tags in column:
        for number, tag in enumerate(tags):
            if tag not in numbers:
                what = f"entities of type '{tag[2:]:.60}' never occur in training"
                fix = f"Training has: {listed([name[2:] for name in names[1::2]])}"
                raise UserError("E209", what, fix, _place(path, line, number))
    if all(tag == OUTSIDE for _, tags in column for tag in tags):
        raise UserError("E208", "every word has the tag O", "F1 is undefined without entities", str(path))
    return [[numbers[tag] for tag in tags] for _, tags in column]


def lacks(labels: Sequence[Sequence[int]], names: list[str]) -> str | None:
    """Message that names the first type without an entity; None if every type has one."""
    types = {(tag - 1) // 2 for tags in labels for tag in tags if tag}
    missing = set(range(len(names) // 2)) - types
    return f"no entity of type '{names[2 * min(missing) + 1][2:]}'" if missing else None


def spread(labels: Sequence[Sequence[int]], names: list[str]) -> dict[str, int]:
    """Number of words, and of entities of every type: an odd output begins an entity."""
    counts = Counter(tag for tags in labels for tag in tags)
    return {"words": counts.total(), **{name[2:]: counts[place] for place, name in enumerate(names) if place % 2}}


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens, and labels (rows, longest): a word's at its first token, IGNORED elsewhere.

    Words are joined by spaces and tokenized as ordinary text, as in the tokenizer's training. Raises UserError E213 for a word
    without a token, truncated or dropped by the tokenizer: no word may be missing from the metric.
    """
    texts = [" ".join(words) for (words,) in split.texts]
    rows, places, known, sentences = [], [], {}, iter(split.texts)
    for part in in_parts(tokenizer, [texts], truncation=False, return_offsets_mapping=True):
        # offsets first: zip takes no sentence beyond them
        places += [first_tokens(spans, words) for spans, (words,) in zip(part.pop("offset_mapping"), sentences, strict=False)]
        rows += shared_rows(part, known)
    lengths = [len(row["input_ids"]) for row in rows]
    require_lengths(lengths, task.max_length, split, path, "sentences", "split such sentences")
    if lost := [(row, number) for row, tokens in enumerate(places) for number, token in enumerate(tokens) if token is None]:
        (row, number), more = lost[0], f", and of {len(lost) - 1} more" if len(lost) > 1 else ""
        what = f"the tokenizer produces no separate token for word {number + 1}, {split.texts[row][0][number]!r:.60}{more}"
        raise UserError("E213", what, "Fix or remove such words, with their tags", _place(path, split.lines[row], number))
    labels = np.full((len(texts), max(lengths)), IGNORED, dtype=np.int64)
    for row, tokens in enumerate(places):
        labels[row, tokens] = split.labels[row]
    return rows, labels


def metric_inputs(outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts per row for F1 and accuracy: (rows, 3) right and predicted entities, right words; (rows, 2) entities, words."""
    rows, size = rows_of(labels), len(labels)
    true, predicted = labels[labels != IGNORED], outputs.argmax(axis=1)
    ends = np.full(len(true), -1)
    starts, last = entity_starts(true, rows)
    ends[starts] = last
    begun, closed = entity_starts(predicted, rows)
    right = begun[(ends[begun] == closed) & ((true[begun] - 1) // 2 == (predicted[begun] - 1) // 2)]
    counts = [np.bincount(rows[places], minlength=size) for places in (right, begun, true == predicted, starts, true >= 0)]
    return np.stack(counts[:3], axis=1), np.stack(counts[3:], axis=1)


@dataclass(frozen=True)
class Tagged:
    """The words of one text and the most likely tag of each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(self.words, self.tags, strict=True))


def written(text: Any) -> str:
    """Words separated by single spaces, as in training. Raises UserError E717 for a pair, and for an empty text."""
    if not isinstance(text, str) or not text.split():
        raise UserError("E717", f"{text!r:.60} is no text with words", "Give one text, its words apart from each other")
    return " ".join(text.split())


def grain(labels: np.ndarray) -> float:
    """Largest change of F1 = 2 right / (predicted + true) by one tag: an entity removed, one or two wrong ones added."""
    true = labels[labels != IGNORED]
    return 3 / max(len(entity_starts(true, rows_of(labels))[0]), 1)


def prediction(names: Sequence[str], logits: np.ndarray, text: str, encoding: Encoding) -> Tagged:
    """The tags of a text from its logits (length, tags). Raises UserError E717 for a truncated text, and for a word without a
    token."""
    if encoding.overflowing:
        raise UserError("E717", f"{text!r:.60} is longer than the model reads", "Split the text")
    words = tuple(text.split(" "))
    places = first_tokens(encoding.offsets, words)
    if None in places:
        raise UserError(
            "E717", f"the tokenizer produces no token for word {places.index(None) + 1} of {text!r:.60}", "Remove the word"
        )
    return Tagged(words, tuple(names[tag] for tag in logits[places].argmax(axis=1)))


KIND = TaskKind(
    name="tokens",
    example=example,
    outputs=outputs,
    targets=targets,
    lacks=lacks,
    spread=spread,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    texts=sentence_words,
    placeholder=lambda texts: [0] * len(texts[0]),
    truncates=False,
    metrics=(
        Metric("f1", "entity F1", entity_f1, " %", chance=0.0),
        Metric("accuracy", "token accuracy", word_accuracy, " %", grain=lambda labels: 1 / (labels != IGNORED).sum()),
    ),
    # most words are O to every model: agreement is easier to reach than between classes
    agreement=Agreement(labels_agree, "tags agree", "tags agree on", two_errors, decided_labels_agree),
    predicted_labels=lambda logits: logits.argmax(axis=1),
    prediction=prediction,
    written=written,
    auto_class=TOKENS,
    grain=grain,
    encode=encode,
    metric_inputs=metric_inputs,
)
