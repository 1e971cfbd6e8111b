"""The answers of a model that takes texts, by kind of task: how its outputs follow from the logits.

A new kind is a row of FORMATS (and its outputs in the writer's table, serving/layout/text_outputs.py). The server copies this
file into the backend's folder, so it imports nothing of this project but the files beside it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from best_spans import answer_characters, best_span, candidate_tokens
from door import Refused
from first_tokens import first_tokens
from span_marks import has_read_marks
from text_tasks import labels_of, of_any_kind, of_its_task

WORD = re.compile(r"\S+")


def any_text(text):
    """The text as it is tokenized, unchanged."""
    return text


def spaced_words(text):
    """Words separated by single spaces, as in training. Raises Refused where there is none."""
    if not isinstance(text, str) or not text.split():
        raise Refused("the text has no words")
    return " ".join(text.split())


def complete(row):
    """Raises Refused for a row of words that is truncated, or has a word without a token."""
    if row.encoding.overflowing:
        raise Refused("the text is longer than the model reads; split it")
    words = row.text.split()
    if None in (places := first_tokens(row.encoding.offsets, words)):
        raise Refused(f"the tokenizer produces no token for word {places.index(None) + 1}")
    row.places = places


def marked(row):
    """Raises Refused for a text whose marks are cut off: its class would be that of a text without them."""
    if not has_read_marks(row.written, row.encoding.offsets):
        raise Refused("the marked spans lie behind what the model reads; shorten the text before them")


def classes(facts, logits, rows):
    """The most likely label, its probability and those of all labels, from logits (rows, classes)."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    best = logits.argmax(axis=1)
    names = np.array([label.encode() for label in facts["labels"]], dtype=object)
    return {
        "LABEL": names[best, None],
        "SCORE": np.take_along_axis(scores, best[:, None], axis=1),
        "SCORES": scores,
        "LABELS": np.tile(names, (len(rows), 1)),
    }


def numbers(facts, logits, rows):
    """The predicted number, from outputs (rows, 1)."""
    return {"VALUE": logits[:, :1].astype(np.float32)}


def label_sets(facts, logits, rows):
    """A JSON list of the labels with a probability above 0.5, and all probabilities, from logits (rows, labels)."""
    names = np.array([label.encode() for label in facts["labels"]], dtype=object)
    chosen = [[label for label, logit in zip(facts["labels"], row, strict=True) if logit > 0] for row in logits]
    return {
        "PREDICTED": np.array([[json.dumps(labels, ensure_ascii=False).encode()] for labels in chosen], dtype=object),
        "SCORES": (1 / (1 + np.exp(-logits))).astype(np.float32),
        "LABELS": np.tile(names, (len(rows), 1)),
    }


def matches(facts, logits, rows):
    """The score of each pair of a text and a choice, from outputs (rows, 1)."""
    return {"MATCH": logits[:, :1].astype(np.float32)}


def entities(facts, logits, rows):
    """A JSON list with the tag of every word and its characters [start, end) in the text, from logits (rows, length, tags)."""
    answers = []
    for row, values in zip(rows, logits, strict=True):
        labels = labels_of(facts, row)
        tags = [labels[tag] for tag in values[row.places].argmax(axis=1)]
        words = [
            {"start": word.start(), "end": word.end(), "text": word[0], "tag": tag}
            for word, tag in zip(WORD.finditer(row.text), tags, strict=True)
        ]
        answers.append([json.dumps(words, ensure_ascii=False).encode()])
    return {"ENTITIES": np.array(answers, dtype=object)}


def whole(row):
    """Raises Refused for a question and context that are truncated."""
    if row.encoding.overflowing:
        raise Refused("question and context are longer than the model reads; split the context")
    row.places = candidate_tokens(row.encoding.offsets, row.encoding.sequence_ids)


def answers(facts, logits, rows):
    """The answer in each context, its characters [start, end) and its probability, from logits (rows, length, 2)."""
    texts, spans, scores = [], [], []
    for row, values in zip(rows, logits, strict=True):
        first, last, score = best_span(values[row.places])
        offsets = [row.encoding.offsets[token] for token in row.places]
        spans.append(answer_characters(row.written[1], offsets, first, last))
        texts.append([row.written[1][slice(*spans[-1])].encode()])
        scores.append([score])
    return {
        "ANSWER": np.array(texts, dtype=object),
        "SPAN": np.array(spans, dtype=np.int64),
        "SCORE": np.array(scores, dtype=np.float32),
    }


def all_of_them(facts, row, logits):
    """Every logit of a row."""
    return logits


def at_places(facts, row, logits):
    """Those at the row's places, from logits (length, outputs)."""
    return logits[row.places]


@dataclass(frozen=True)
class Format:
    """The form of a kind's texts and answers.

    `answer`: (serving.json, float64 logits of some rows, the rows) -> {output: array (rows, values)}. `read`: (serving.json, a
    row, its logits) -> those that its answer is made of. `written`: a text in the form of the training texts. `check`: refuses
    a tokenized row; `offsets`: whether it needs the characters of the tokens.
    """

    answer: Callable
    written: Callable = any_text
    check: Callable = lambda row: None
    offsets: bool = False
    read: Callable = all_of_them


FORMATS = {
    "classification": Format(classes),
    "marked": Format(classes, check=marked, offsets=True),
    "regression": Format(numbers),
    "tokens": Format(entities, spaced_words, complete, offsets=True, read=at_places),
    "multilabel": Format(label_sets),
    "spans": Format(answers, check=whole, offsets=True, read=at_places),
    "choices": Format(matches),
    "tasks": Format(of_any_kind, read=of_its_task),
}
