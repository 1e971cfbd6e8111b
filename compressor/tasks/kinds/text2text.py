"""Text to text: a target for each source, such as its summary or translation, by an encoder and a decoder (T5).

The encoder reads the source, with the task's prefix before it; of several columns each text behind its column's name, as T5
was pretrained (Raffel et al. 2020, appendix D): "question: .. context: ..". The decoder's inputs are the target's tokens behind
the start token, its labels these tokens and the end of sentence. Loss, metrics and what is generated are as in `generation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.models.build import TEXT2TEXT
from compressor.tasks import TaskConfig
from compressor.tasks.features import targets_of, tokenize
from compressor.tasks.kinds import generation
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import Example, text_cells

TIMED = (
    "FLOPs are counted for a source and a target of so many tokens each. Latency is that of the first token: the encoder over "
    "a whole source, and one step of the decoder behind it."
)


def source(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> tuple[str]:
    """The source of a row with the task's prefix. Raises UserError E206."""
    texts = [text.strip() for text in text_cells(row, task, path, line)]
    if len(texts) > 1:
        texts = [f"{name}: {text}" for name, text in zip(task.text_columns, texts, strict=True)]
    return (f"{task.prefix or ''}{' '.join(texts)}",)


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """A source with the task's prefix, and its target. Raises UserError E206, E207."""
    _, target = generation.example(row, task, path, line)
    return source(row, task, path, line), target


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens of the sources, cut to `task.max_length`, and labels (rows, longest): the tokens of the target, cut to
    `task.target_length` with its end token; IGNORED behind it.

    Raises UserError E212 if there is no end-of-sentence token, or a target contains it; E213 for a target without a token.
    """
    end, rows = generation.end_of(tokenizer, path), []
    for row, ids in enumerate(targets_of(tokenizer, split)):
        place = f"{path}:{split.lines[row]}"
        if not ids:
            what = f"the tokenizer produces no token for the target {split.labels[row]!r:.60}"
            raise UserError("E213", what, "Fix or remove the row", place)
        generation.require_no_end(ids, split.labels[row], tokenizer, place)
        rows.append([*ids[: None if task.target_length is None else task.target_length - 1], end])
    keys = ("input_ids", "attention_mask")
    encoded = [{key: row[key] for key in keys} for row in tokenize(tokenizer, split, task)]
    return encoded, generation.label_matrix(rows)


KIND = replace(
    generation.KIND,
    name="text2text",
    truncates=True,
    example=example,
    texts=source,
    metrics=tuple(replace(metric, note=TIMED if metric.note else "") for metric in generation.KIND.metrics),
    auto_class=TEXT2TEXT,
    encode=encode,
)
