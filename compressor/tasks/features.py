"""Rows -> tokens -> padded batches, the same for training, parity, quality and serving (numpy; right padding)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.accelerator import accelerated
from compressor.errors import UserError
from compressor.tasks.listing import cell_shown
from compressor.tasks.predictions import IGNORED, predictions_in
from compressor.tasks.rows import Split

if TYPE_CHECKING:
    from compressor.tasks import TaskConfig

Encoding = dict[str, np.ndarray]
DECODER_IDS = "decoder_input_ids"
"""Key of the inputs of a decoder behind an encoder, where a row has them."""
GroupedRow = dict[str, list[list[int]]]
"""The tokens of a row that is several rows of the model, such as a text with each of its choices."""
Forward = Callable[[Encoding], np.ndarray]
"""Forward pass of any model: padded int64 arrays (batch, length) -> float logits (batch, classes), or (batch, length, classes)
if it predicts at every token."""

PART = 2**20
"""Characters of the texts that are tokenized at once, but for the last row of them."""
LEAST_OF_A_ROW = 32
"""Characters that a row counts as beside those of its texts: an empty one has special tokens, too."""


def is_grouped(row: dict[str, list]) -> bool:
    """Whether a row of a task is several rows of the model."""
    return bool(row["input_ids"]) and isinstance(row["input_ids"][0], list)


def model_rows(rows: Sequence[dict[str, list]]) -> list[dict[str, list[int]]]:
    """The rows of the model that rows of a task are, in order."""
    return [part for row in rows for part in (_parts(row) if is_grouped(row) else (row,))]


def _parts(row: GroupedRow) -> list[dict[str, list[int]]]:
    return [dict(zip(row, lists, strict=True)) for lists in zip(*row.values(), strict=True)]


def length_of(row: dict[str, list]) -> int:
    """Tokens of a row; of the longest part where it is several rows of the model."""
    return max(map(len, row["input_ids"])) if is_grouped(row) else len(row["input_ids"])


def tokenize(tokenizer, split: Split, task: TaskConfig) -> list[dict[str, list[int]]]:
    """One dict of unpadded token lists per row, truncated to `task.max_length`, with the keys that the tokenizer returns.

    Rows share their masks and segments where these are equal: the lists are only read.
    """
    rows, known = [], {}
    for part in in_parts(tokenizer, list(zip(*split.texts, strict=True)), truncation=True, max_length=task.max_length):
        rows += shared_rows(part, known)
    return rows


def in_parts(tokenizer: Callable, columns: Sequence[Sequence[str]], **options) -> Iterator[Mapping[str, list]]:
    """What a tokenizer returns for `columns` of texts, without padding, for a part of the rows at a time, in order: beside the
    tokens it holds each one's place and word, forty times the memory of the text."""
    sizes = np.cumsum([LEAST_OF_A_ROW + sum(map(len, texts)) for texts in zip(*columns, strict=True)])
    ends = np.flatnonzero(np.diff(sizes // PART, append=-1)) + 1
    for start, end in pairwise([0, *ends.tolist()]):
        yield tokenizer(*(list(column[start:end]) for column in columns), padding=False, **options)


def shared_rows(part: Mapping[str, list], known: dict) -> list[dict[str, list[int]]]:
    """The rows of what a tokenizer returns, with the number of a token and the list of all else that is `known` from rows
    before where it is equal."""
    return [
        {
            key: [*map(known.setdefault, values, values)] if key == "input_ids" else known.setdefault(tuple(values), values)
            for key, values in zip(part, lists, strict=True)
        }
        for lists in zip(*part.values(), strict=True)
    ]


def sequences_of(split: Split) -> int:
    """How many rows of the model each row of a split is: one for every choice, else one."""
    return max(len(split.texts[0]) - 1, 1)


def tokens_of(tokenizer, split: Split, with_labels: bool) -> list[int]:
    """Number of tokens of every row before truncation, including a label that is a text to be generated; with choices those
    of the longest pair."""
    if sequences_of(split) > 1:  # a text and its choices
        choices = range(1, len(split.texts[0]))
        pairs = (Split([(row[0], row[place]) for row in split.texts], split.labels) for place in choices)
        return list(map(max, *(tokens_of(tokenizer, each, with_labels) for each in pairs)))
    columns = [
        [text if isinstance(text, str) else " ".join(text) for text in column] for column in zip(*split.texts, strict=True)
    ]
    if with_labels:
        columns = [[f"{prompt} {target}" for prompt, target in zip(columns[0], split.labels, strict=True)]]
    parts = in_parts(tokenizer, columns, truncation=False, verbose=False)
    return [len(ids) for part in parts for ids in part["input_ids"]]


def targets_of(tokenizer, split: Split) -> list[list[int]]:
    """Tokens of the targets that a decoder behind an encoder writes, without the end token."""
    end = tokenizer.eos_token_id
    parts = in_parts(
        lambda texts, **options: tokenizer(text_target=texts, **options), [split.labels], truncation=False, verbose=False
    )
    # some tokenizers append it
    return [ids[:-1] if ids[-1:] == [end] else ids for part in parts for ids in part["input_ids"]]


def encode(tokenizer, split: Split, task: TaskConfig, path: Path) -> tuple[list[dict[str, list[int]]], np.ndarray]:
    """Tokens and labels (rows,) of a split with one label per row; `path` is the file that it was read from."""
    return tokenize(tokenizer, split, task), np.array(split.labels)


def check_ends(tokenizer, rows: list[dict[str, list[int]]], split: Split, end: int, where: Path) -> None:
    """Raise UserError E212 for a row that contains `end` (id of the end-of-sentence token, at the last of which the model's
    output is read) more or less often than the tokenizer adds it to texts."""
    expected = tokenizer(*["a"] * min(len(split.texts[0]), 2))["input_ids"].count(end)
    word = tokenizer.convert_ids_to_tokens(end)
    if not expected:
        what = f"the tokenizer does not end a row with '{word}', the token that the task head reads"
        raise UserError("E212", what, "Use the tokenizer that the model was trained with", str(where))
    fix = "Remove that token from the text: the task head reads the model's state there"
    for row, texts, line in zip(rows, split.texts, split.lines, strict=True):
        for part in model_rows([row]):
            if (count := part["input_ids"].count(end)) != expected:
                what = f"the text {cell_shown(texts[0])} makes {count} tokens '{word}', not {expected}"
                raise UserError("E212", what, fix, f"{where}:{line}")


def pad(rows: list[dict[str, list[int]]], pad_id: int) -> Encoding:
    """Right-padded int64 arrays (batch, longest) of the model's rows; a decoder's inputs have their own length. Ids are padded
    with `pad_id`, all else with 0."""
    rows = model_rows(rows)
    batch = {}
    for key in rows[0]:
        length = max(len(row[key]) for row in rows)
        filler = pad_id if key in ("input_ids", DECODER_IDS) else 0
        batch[key] = np.array([row[key] + [filler] * (length - len(row[key])) for row in rows], dtype=np.int64)
    return batch


def output_length(batch: Encoding) -> int:
    """Number of tokens, with padding, at which outputs are computed: of the decoder's inputs, if there are such."""
    return batch.get(DECODER_IDS, batch["input_ids"]).shape[1]


def with_decoder_inputs(rows: list[dict[str, list[int]]], labels: np.ndarray, start: int) -> list[dict[str, list[int]]]:
    """Rows of an encoder with the inputs of the decoder behind it: the `start` token, then all labels but the last."""
    inputs = [[start, *row[row != IGNORED][:-1].tolist()] for row in labels]
    return [{**row, DECODER_IDS: ids, "decoder_attention_mask": [1] * len(ids)} for row, ids in zip(rows, inputs, strict=True)]


def batches(rows: list[dict[str, list[int]]], batch_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length, longest first, so that there is little padding."""
    order = sorted(range(len(rows)), key=lambda row: (-length_of(rows[row]), row))
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))


def predict(
    forward: Forward,
    rows: list[dict[str, list[int]]],
    pad_id: int,
    *,
    labels: np.ndarray | None = None,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> np.ndarray:
    """Logits (predictions, classes) in the order of `rows`: one prediction per row, or one per token label in `labels`. Raises
    ValueError for no rows."""
    if not len(rows):
        raise ValueError("rows is empty: there is nothing to predict")
    logits: list[np.ndarray | None] = [None] * len(rows)
    with _accelerated(forward):
        for chosen in batches(rows, batch_size):
            for row, values in zip(chosen, predictions_of(forward, rows, chosen, pad_id, labels), strict=True):
                logits[row] = values
            on_batch(len(chosen))
    return np.concatenate(logits)


def metric_inputs_of(
    forward: Forward,
    rows: list[dict[str, list[int]]],
    pad_id: int,
    labels: np.ndarray,
    metric_inputs: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Arrays (rows, ...) that the function `metric_inputs` of a kind computes from outputs and labels, in the order of rows.

    Outputs are held for one batch at a time: logits over a vocabulary for a whole split would not fit into memory.
    """
    predicted: list[np.ndarray | None] = [None] * len(rows)
    expected: list[np.ndarray | None] = [None] * len(rows)
    with _accelerated(forward):
        for chosen in batches(rows, batch_size):
            outputs = np.concatenate(list(predictions_of(forward, rows, chosen, pad_id, labels)))
            for row, *arrays in zip(chosen, *metric_inputs(outputs, labels[chosen]), strict=True):
                predicted[row], expected[row] = arrays
            on_batch(len(chosen))
    return np.stack(predicted), np.stack(expected)


def predictions_of(
    forward: Forward,
    rows: Sequence[dict[str, list[int]]],
    chosen: Sequence[int],
    pad_id: int,
    labels: np.ndarray | None,
) -> Iterator[np.ndarray]:
    """The predictions (predictions, classes) of each of the `chosen` rows in one batch; `labels` as in `predict`."""
    result = forward(pad([rows[row] for row in chosen], pad_id))
    if is_grouped(rows[chosen[0]]):  # one prediction from the outputs of all its parts
        result = result.reshape(len(chosen), -1)
    if len(result) != len(chosen):
        raise ValueError(f"{len(result)} answers for {len(chosen)} rows")
    return (predictions_in(values, 0 if labels is None else labels[row]) for row, values in zip(chosen, result, strict=True))


def torch_forward(model, *, accelerate: bool = True) -> Forward:
    """A torch model in eval mode as a `Forward`, on the device it is on.

    With `accelerate`, many rows are computed on a GPU, if there is one: not for comparisons with what was computed on the CPU,
    as merged weights are, which a GPU adds in another order.
    """
    import torch

    model.eval()

    @torch.inference_mode()
    def forward(encoding: Encoding) -> np.ndarray:
        device = next(model.parameters()).device
        tensors = {key: torch.from_numpy(value).to(device) for key, value in encoding.items()}
        return model(**tensors).logits.float().cpu().numpy()

    if accelerate:
        forward.model = model
    return forward


def _accelerated(forward: Forward) -> AbstractContextManager:
    """Context of many calls: the model of `torch_forward` is on the GPU, if there is one; nothing for another runtime's."""
    model = getattr(forward, "model", None)
    return nullcontext() if model is None else accelerated(model)
