"""Rows -> tokens -> padded batches, the same for training, parity, quality and serving (numpy; right padding)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.reading import Split

Encoding = dict[str, np.ndarray]
Forward = Callable[[Encoding], np.ndarray]
"""A model seen from here: padded int64 arrays (batch, length) -> float logits (batch, classes)."""


def tokenize(tokenizer, split: Split, task: TaskConfig) -> list[dict[str, list[int]]]:
    """One dict of unpadded token lists a row, truncated to `task.max_length`, with the keys the tokenizer's model takes."""
    columns = [list(column) for column in zip(*split.texts, strict=True)]
    encoded = tokenizer(*columns, truncation=True, max_length=task.max_length, padding=False)
    return [{key: encoded[key][row] for key in encoded} for row in range(len(split))]


def check_ends(tokenizer, rows: list[dict[str, list[int]]], split: Split, end: int, where: Path) -> None:
    """Raise UserError E212 for a row that holds `end` (the id of the end of sentence, at the last of which the model reads its
    answer) more or less often than the tokenizer puts it around texts."""
    wanted = tokenizer(*["a"] * len(split.texts[0]))["input_ids"].count(end)
    word = tokenizer.convert_ids_to_tokens(end)
    if not wanted:
        what = f"the tokenizer does not end a row with '{word}', where the model reads its answer"
        raise UserError("E212", what, "Take the tokenizer that the model was trained with", str(where))
    for row, texts in zip(rows, split.texts, strict=True):
        if (count := row["input_ids"].count(end)) != wanted:
            what = f"the text {texts[0]!r:.60} makes {count} tokens '{word}', not {wanted}"
            raise UserError("E212", what, "Take that word out of it: the model reads its answer there", str(where))


def pad(rows: list[dict[str, list[int]]], pad_id: int) -> Encoding:
    """Right-padded int64 arrays (batch, longest). input_ids are padded with `pad_id`, everything else with 0."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for key in rows[0]:
        filler = pad_id if key == "input_ids" else 0
        batch[key] = np.array([row[key] + [filler] * (length - len(row[key])) for row in rows], dtype=np.int64)
    return batch


def batches(rows: list[dict[str, list[int]]], batch_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length, longest first, so that little is spent on padding."""
    order = sorted(range(len(rows)), key=lambda row: (-len(rows[row]["input_ids"]), row))
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def predict(
    forward: Forward,
    rows: list[dict[str, list[int]]],
    pad_id: int,
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> np.ndarray:
    """Logits (rows, classes) in the order of `rows`."""
    logits: list[np.ndarray | None] = [None] * len(rows)
    for chosen in batches(rows, batch_size):
        result = forward(pad([rows[row] for row in chosen], pad_id))
        for row, values in zip(chosen, result, strict=True):
            logits[row] = values
        on_batch(len(chosen))
    return np.stack(logits)


def torch_forward(model) -> Forward:
    """A torch model in eval mode as a `Forward`, on the device it is on."""
    import torch

    model.eval()
    device = next(model.parameters()).device

    @torch.inference_mode()
    def forward(encoding: Encoding) -> np.ndarray:
        tensors = {key: torch.from_numpy(value).to(device) for key, value in encoding.items()}
        return model(**tensors).logits.float().cpu().numpy()

    return forward
