"""The prompts that are scored by decoding: rows with an equal prompt are one item with several references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compressor.errors import UserError
from compressor.tasks.decoding.answer_extraction import answer_of
from compressor.tasks.decoding.decode_config import NUMBER, DecodeConfig
from compressor.tasks.decoding.text_metrics import require_packages
from compressor.tasks.features import DECODER_IDS
from compressor.tasks.predictions import IGNORED
from compressor.tasks.rows import Split


@dataclass(frozen=True)
class PromptItem:
    """A prompt, all targets that the file has for it, and the number of its first row in the split."""

    prompt: str
    references: tuple[str, ...]
    row: int


def items_of(split: Split, config: DecodeConfig) -> list[PromptItem]:
    """One item per distinct prompt, in the order of the file; `config.rows` of them, evenly spread, if that is fewer."""
    rows: dict[str, list[int]] = {}
    for row, (prompt,) in enumerate(split.texts):
        rows.setdefault(prompt, []).append(row)
    items = [PromptItem(prompt, tuple(split.labels[row] for row in of), of[0]) for prompt, of in rows.items()]
    chosen = np.linspace(0, len(items) - 1, min(config.rows or len(items), len(items))).astype(int)
    return [items[place] for place in chosen]


def check_references(split: Split, config: DecodeConfig, path: Path) -> None:
    """Raises UserError E901 if a package is missing, E240 for targets in which no answer is found, with their rows."""
    require_packages(config.metrics)
    if config.answer is None:
        return
    unread = [row for row, target in enumerate(split.labels) if answer_of(target, config.answer) is None]
    if unread:
        lines = ", ".join(str(split.lines[row]) for row in unread[:10]) + ", ..." * (len(unread) > 10)
        searched = "number" if config.answer == NUMBER else f"match of {config.answer!r:.60}"
        what = f"the target {split.labels[unread[0]]!r:.60} has no {searched}; such rows: {len(unread)} (lines {lines})"
        raise UserError("E240", what, "Correct task.decode.answer, or these targets", f"{path}:{split.lines[unread[0]]}")


def prompt_tokens(tokens: Sequence[dict[str, list[int]]], labels: np.ndarray, items: Sequence[PromptItem]) -> list[list[int]]:
    """The tokens of each item's prompt, as in training: what an encoder reads, or those up to the first that has a label."""
    rows = [item.row for item in items]
    if tokens and DECODER_IDS in tokens[0]:
        return [tokens[row]["input_ids"] for row in rows]
    return [tokens[row]["input_ids"][: prompt_length(labels[row])] for row in rows]


def prompt_length(labels: np.ndarray) -> int:
    """Tokens of the prompt of a row with these labels (length,): those up to the first that has a label."""
    return int(np.argmax(labels != IGNORED)) + 1


def check_positions(prompts: Sequence[list[int]], config: DecodeConfig, most: int | None, path: Path) -> None:
    """Raises UserError E241 if a prompt and its generated text need more than `most` positions."""
    longest = max(len(prompt) for prompt in prompts)
    if most is not None and longest + config.max_new_tokens > most:
        what = f"a prompt of {longest} tokens and {config.max_new_tokens} new ones exceed the model's {most} positions"
        room = most - longest
        fix = f"Set task.decode.max_new_tokens to at most {room}" if room > 0 else "Shorten or drop such prompts"
        raise UserError("E241", what, fix, str(path))
