"""Classification of marked spans: the class of two places of a text, such as whether a pronoun means a name (WSC), or of one.

The spans are marked in the text, the first as [ Mark ], the second as { He }; from there on it is a classification of that
text, and a client sends texts with these marks. A column of spans holds the words themselves, which then occur once in the
text, or [number, words], where number is that of their first word (from 0, words separated by spaces, as in SuperGLUE's WSC).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.features import in_parts, shared_rows
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.kinds.classification import Prediction
from compressor.tasks.kinds.span_marks import MARKS, ends_of_marks, has_read_marks
from compressor.tasks.listing import cell_shown
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import Example, require_text

if TYPE_CHECKING:
    from tokenizers import Encoding

UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u3005-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"  # Japanese, Chinese, Korean
)
"""Characters, within [] of a regular expression, of scripts in which no space has to separate a word from the next letters."""
WORD_START = rf"(?:(?<![^\W{UNSPACED}])|(?=[{UNSPACED}]))"
WORD_END = rf"(?:(?![^\W{UNSPACED}])|(?<=[{UNSPACED}]))"
FIX = 'Write words that occur once in the text, or their first word\'s number and the words, e.g. [7, "He"]'


def marked_text(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> tuple[str]:
    """The text of a row with its spans marked. Raises UserError E206, E225, E226."""
    column, *spans = task.text_columns
    text, where = row[column], f"{path}:{line}"
    require_text(column, text, where)
    if used := next((mark for pair in MARKS for mark in map(str.strip, pair) if mark in text), None):
        raise UserError("E226", f"the text contains '{used}', which marks spans", "Replace it in the text", where)
    places = [(place_of(row[name], text, name, where), marks) for name, marks in zip(spans, MARKS, strict=False)]
    cuts = sorted(places)
    if any(before[0][1] > after[0][0] for before, after in pairwise(cuts)):
        raise UserError("E226", "the spans overlap", "Give two spans with no common word", where)
    for (start, end), (before, behind) in reversed(cuts):
        text = f"{text[:start]}{before}{text[start:end]}{behind}{text[end:]}"
    return (text,)


def place_of(cell: object, text: str, name: str, where: str) -> tuple[int, int]:
    """The characters [start, end) of a span in the text. Raises UserError E225."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # another text is told below
            cell = json.loads(cell)
    number, words = cell if isinstance(cell, list) and len(cell) == 2 else (None, cell)
    if not isinstance(words, str) or not words.strip() or not (number is None or type(number) is int):
        raise UserError("E225", f"column '{name}' holds {cell_shown(cell)}, not a span", FIX, where)
    found = [match.span() for match in re.finditer(f"{WORD_START}{re.escape(words.strip())}{WORD_END}", text)]
    if number is not None:
        starts = [match.start() for match in re.finditer(r"\S+", text)]
        begin, end = (starts[number], [*starts, len(text)][number + 1]) if 0 <= number < len(starts) else (0, 0)
        found = [span for span in found if begin <= span[0] < end]
    if len(found) != 1:
        here = "" if number is None else f" at word {number}"
        what = f"the span {words!r:.60} of column '{name}' occurs {len(found)} times in the text{here}, not once"
        raise UserError("E225", what, FIX, where)
    return found[0]


def example(row: Mapping[str, Any], task: TaskConfig, path: Path, line: int) -> Example:
    """The marked text of a row, and its class. Raises UserError E206, E207, E225, E226."""
    texts = marked_text(row, task, path, line)
    unmarked = task.model_copy(update={"text": task.text_columns[0]})
    return texts, CLASSIFICATION.example(row, unmarked, path, line)[1]


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens, truncated to `task.max_length`, and labels (rows,). Raises UserError E213 where that cuts off a mark."""
    texts = [text for (text,) in split.texts]
    rows, whole, known, marked = [], [], {}, iter(texts)
    for part in in_parts(tokenizer, [texts], truncation=True, max_length=task.max_length, return_offsets_mapping=True):
        # offsets first: zip takes no text beyond them
        whole += [has_read_marks(text, spans) for spans, text in zip(part.pop("offset_mapping"), marked, strict=False)]
        rows += shared_rows(part, known)
    if cut := [row for row, read in enumerate(whole) if not read]:
        longest = max(map(len, tokenizer([texts[row] for row in cut], truncation=False, verbose=False)["input_ids"]))
        what = f"max_length {task.max_length} cuts off a marked span of {len(cut)} of {len(texts)} rows"
        fix = f"Set task.max_length to {longest} where the model has so many positions, or shorten such texts"
        raise UserError("E213", what, fix, f"{path}:{split.lines[cut[0]]}")
    return rows, np.array(split.labels)


def least_tokens(tokenizer, split: Split) -> list[int]:
    """Of each row the `max_length` with which all its marks are read, whichever end of a text the tokenizer cuts off."""
    texts = [text for (text,) in split.texts]
    parts = in_parts(tokenizer, [texts], truncation=False, return_offsets_mapping=True, verbose=False)
    from_left, offsets = tokenizer.truncation_side == "right", (spans for part in parts for spans in part["offset_mapping"])
    return [_least(text, spans, from_left) for text, spans in zip(texts, offsets, strict=True)]


def _least(text: str, offsets: Sequence[tuple[int, int]], from_left: bool) -> int:
    first, last = ends_of_marks(text)
    read = [(start, end) for start, end in offsets if start < end]
    places = [place for place, (start, end) in enumerate(read) if start <= last and end > first]
    kept = places[-1] + 1 if from_left else len(read) - places[0]
    return kept + len(offsets) - len(read)


def prediction(names: Sequence[str], logits: np.ndarray, text: str, encoding: Encoding) -> Prediction:
    """The class of a marked text from logits (classes,). Raises UserError E717 where a mark was cut off."""
    if not has_read_marks(text, encoding.offsets):
        what = f"the marked spans of {text!r:.60} lie behind what the model reads"
        raise UserError("E717", what, "Shorten the text before them")
    return CLASSIFICATION.prediction(names, logits, text, encoding)


KIND = replace(
    CLASSIFICATION,
    name="marked",
    encode=encode,
    least_tokens=least_tokens,
    refuses_tokens=True,
    prediction=prediction,
    example=example,
    texts=marked_text,
    pair=lambda task: False,
    sentences=1,
    augments=False,
    shares_base=False,
)
