"""Generation: a text for each prompt, such as a sentence about a row of a table (E2E), by a decoder (causal LM).

A row is the tokens of prompt and target, a space between, as the tokenizer reads running text, and the end of sentence. The
label of a token is the next token, if that belongs to the target or ends it: labels are shifted only here. The loss of a row
is the mean over its labels, that of a batch the mean over its rows: so a step is the same however its rows are split into
batches.

The main metric is the likelihood of a token, exp of the mean log-likelihood over all labels of a split: 1 / perplexity; or
one of generated texts, where the task has `decode` and chooses it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.models.build import GENERATES
from compressor.tasks import TaskConfig
from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.features import in_parts
from compressor.tasks.kinds.token_losses import distillation_loss, imitation_loss, loss
from compressor.tasks.metrics import (
    decided_labels_agree,
    labels_agree,
    likelihood,
    log_likelihood,
    perplexity,
    token_accuracy,
    two_errors,
)
from compressor.tasks.predictions import IGNORED, rows_of
from compressor.tasks.rows import Split, require_lengths
from compressor.tasks.task_kind import Agreement, Column, Example, Metric, TaskKind, one_label


def read(value: object) -> str | None:
    """A target without surrounding whitespace, or a finite number as text; None if it is neither, or empty."""
    if type(value) is int or (type(value) is float and math.isfinite(value)):  # a bool is an int, too
        return str(value)
    return (value.strip() or None) if isinstance(value, str) else None


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """A prompt and its target. Raises UserError E206, E207."""
    texts, target = one_label(read, "a text or a number", "Write the text that is to follow the prompt")(row, task, path, line)
    return tuple(text.strip() for text in texts), target


def targets(path: Path, column: Column, names: list[str]) -> list[str]:
    """The targets unchanged: the tokenizer turns them into labels."""
    return [target for _, target in column]


def spread(labels: Sequence[str], names: list[str]) -> dict[str, float]:
    """Number of words in the targets: mean and longest."""
    words = [len(label.split()) for label in labels]
    return {"target words, mean": sum(words) / len(words), "longest target": max(words)}


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens of prompt and target without the end token, which is no input, and labels (rows, longest): at each token the
    next one, from the last token of the prompt on, IGNORED elsewhere.

    Raises UserError E212 if there is no end-of-sentence token, or a target contains it; E213 for a row that is longer than
    `task.max_length`, or whose prompt or target has no token: nothing is truncated.
    """
    end = end_of(tokenizer, path)
    prompts = [prompt for (prompt,) in split.texts]
    texts = [f"{prompt} {target}" for prompt, target in zip(prompts, split.labels, strict=True)]
    parts = in_parts(tokenizer, [texts], truncation=False, return_offsets_mapping=True)
    encoded = (row for part in parts for row in zip(part["input_ids"], part["offset_mapping"], strict=True))
    rows = []
    for row, (ids, offsets) in enumerate(encoded):
        place = f"{path}:{split.lines[row]}"
        while offsets and offsets[-1] == (0, 0):  # special tokens that the tokenizer appends
            ids, offsets = ids[:-1], offsets[:-1]
        # the space between may be its own token: the model generates it, too
        start = next((number for number, (_, stop) in enumerate(offsets) if stop > len(prompts[row])), None)
        if not start:
            what = f"the tokenizer produces no separate token for {texts[row]!r:.60}, or none for its target"
            raise UserError("E213", what, "Fix or remove the row", place)
        require_no_end(ids[start:], split.labels[row], tokenizer, place)
        rows.append((ids, [IGNORED] * (start - 1) + ids[start:] + [end]))
    lengths = [len(ids) for ids, _ in rows]
    require_lengths(lengths, task.max_length, split, path, "rows", "drop such rows")
    encoded_rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids, _ in rows]
    return encoded_rows, label_matrix([following for _, following in rows])


def end_of(tokenizer, path: Path) -> int:
    """The end-of-sentence token, which ends every target. Raises UserError E212 where there is none."""
    if tokenizer.eos_token_id is None:
        raise UserError("E212", NO_END, "Give tokenizer_config.json an eos_token", str(path))
    return tokenizer.eos_token_id


def require_no_end(ids: Sequence[int], target: str, tokenizer, place: str) -> None:
    """Raise UserError E212 where the tokens of a target contain the one that ends it."""
    if tokenizer.eos_token_id in ids:
        what = f"the target {target!r:.60} spells the end of sentence, '{tokenizer.eos_token}'"
        raise UserError("E212", what, "Remove it from the text: it is appended to every target", place)


def label_matrix(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Labels of each row, (rows, longest), IGNORED behind those of a shorter one."""
    labels = np.full((len(rows), max(map(len, rows))), IGNORED, dtype=np.int64)
    for row, ids in enumerate(rows):
        labels[row, : len(ids)] = ids
    return labels


def check_end(tokenizer, config: Any, folder: Path) -> None:
    """Raises UserError E212 where config and tokenizer disagree on the end token: the model would be trained to write one and
    generate until the other."""
    ends_of, settings = {"config.json": config.eos_token_id}, folder / "generation_config.json"
    given = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id") if settings.is_file() else None
    if given is not None:  # else config.json's counts there, too
        ends_of[settings.name] = given
    for name, ends in ends_of.items():
        if tokenizer.eos_token_id not in (ends if isinstance(ends, list) else [ends]):
            what = f"the tokenizer ends a text with token {tokenizer.eos_token_id}, {name} with {ends}"
            raise UserError("E212", what, f"Give {name} the eos_token_id of the tokenizer", str(folder))


def metric_inputs(outputs: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per-row figures for the metrics: (rows, 2) the log-likelihood of the labels and how many of them are the most likely
    tokens; (rows, 1) the number of labels."""
    rows, true = rows_of(labels), labels[labels != IGNORED]
    top = outputs.max(axis=1)
    spread = np.log(np.exp(outputs - top[:, None]).sum(axis=1, dtype=np.float64))
    log_likelihoods = outputs[np.arange(len(true)), true] - top - spread
    right = outputs.argmax(axis=1) == true
    figures = [np.bincount(rows, weights=values, minlength=len(labels)) for values in (log_likelihoods, right)]
    return np.stack(figures, axis=1), np.bincount(rows, minlength=len(labels))[:, None]


NO_END = "the tokenizer has no end of sentence, by which a text that is generated would end"
TIMED = "Latency and throughput are of one pass over a prompt."


def in_perplexity(value: float) -> str:
    """Format a likelihood as perplexity."""
    return f", perplexity {1 / value:.2f}" if value > 1e-6 else f", perplexity {1 / value:.1e}"


def prediction(*_: object) -> None:
    """Raises UserError E716: one row of outputs is one token of a text, which takes many."""
    fix = "Ask its NAME-text (docs/serving.md), or generate with export.generation.greedy.open_generator"
    raise UserError("E716", "a model that generates gives a stream of text, no prediction", fix)


LOG_LIKELIHOOD = Metric("log_likelihood", "log-likelihood of a token", log_likelihood, note=TIMED, by_degree=True)
"""Bounded by the checks of an export whatever a task chooses: their bounds are in nats a token."""

KIND = TaskKind(
    name="generation",
    truncates=False,
    example=example,
    outputs=lambda task, labels: [],
    targets=targets,
    lacks=lambda labels, names: None if labels else "no row",
    spread=spread,
    start=lambda model, labels: None,
    loss=loss,
    distillation=distillation_loss,
    imitation=imitation_loss,
    smooths=True,
    metrics=(
        Metric("likelihood", "likelihood of a token", likelihood, " %", in_perplexity, TIMED, by_degree=True),
        LOG_LIKELIHOOD,
        Metric("perplexity", "perplexity", perplexity, falls=True, by_degree=True),
        Metric("accuracy", "token accuracy", token_accuracy, " %", note=TIMED),
    ),
    further=tuple(
        Metric(metric.key, metric.name, metric.value, falls=metric.falls, scale=metric.scale, of_texts=True)
        for metric in TEXT_METRICS.values()
    ),
    agreement=Agreement(labels_agree, "tokens agree", "tokens agree on", two_errors, decided_labels_agree),
    predicted_labels=lambda logits: logits.argmax(axis=1),
    shares_base=True,
    prediction=prediction,
    auto_class=GENERATES,
    # one flipped prediction has no fixed effect on a likelihood
    grain=lambda labels: 0.0,
    encode=encode,
    metric_inputs=metric_inputs,
    gates=LOG_LIKELIHOOD,
)
