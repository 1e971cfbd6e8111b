"""A task's rows as tokens of a model: both splits, samples of them, batches, and what the metrics are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.digests import kept_by_files
from compressor.errors import UserError, UserErrors
from compressor.models.architectures import row_of
from compressor.models.build import TEXT2TEXT, config_of, end_id
from compressor.models.special_tokens import padding_id, start_id, tokenizer_of
from compressor.tasks import TaskConfig
from compressor.tasks.decoding.prompt_items import PromptItem, check_positions, items_of, prompt_length, prompt_tokens
from compressor.tasks.features import (
    DECODER_IDS,
    batches,
    check_ends,
    length_of,
    model_rows,
    output_length,
    pad,
    with_decoder_inputs,
)
from compressor.tasks.kinds.generation import check_end
from compressor.tasks.predictions import IGNORED, cut, of_tokens
from compressor.tasks.reading import read_task, read_tests
from compressor.tasks.rows import Labels, Split
from compressor.tasks.task_kind import TaskKind, kind_for, kind_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

BATCH = 32
"""Rows of a forward pass."""

MOST_OUTPUTS = 2**24
"""Largest number of logits (64 MiB) of one side of a comparison, or of a forward pass; for outputs over a vocabulary this
limits the rows."""


@dataclass(frozen=True)
class TokenRows:
    """One split as tokens: unpadded rows, and labels (rows, ...) of a kind of task (`compressor.tasks.predictions`);
    `items` are its prompts that are scored by decoding, if any."""

    tokens: list[dict[str, list[int]]]
    labels: np.ndarray
    kind: TaskKind
    items: Sequence[PromptItem] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens of the prompts in `items`."""
        return prompt_tokens(self.tokens, self.labels, self.items)

    @property
    def requests(self) -> list[dict[str, list[int]]]:
        """The rows of the model as they come to a server: of a text to be continued the prompt, and behind an encoder nothing
        but the decoder's start token."""
        if not self.kind.generates:
            return model_rows(self.tokens)
        if not self.kind.continues:
            read = ("input_ids", "attention_mask")
            return [{**{key: row[key] for key in read}, DECODER_IDS: row[DECODER_IDS][:1]} for row in self.tokens]
        ends = map(prompt_length, self.labels)
        return [{key: values[:end] for key, values in row.items()} for row, end in zip(self.tokens, ends, strict=True)]

    def sample(self, count: int) -> TokenRows:
        """`count` rows evenly spread over the lengths, so that both short and long rows are included."""
        return self.at(self.spread(count))

    def spread(self, count: int) -> list[int]:
        """The numbers of these rows, shortest first."""
        order = sorted(range(len(self)), key=lambda row: (length_of(self.tokens[row]), row))
        return [order[place] for place in np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)]

    def draw(self, count: int, seed: int) -> TokenRows:
        """`count` random rows (all, when there are fewer)."""
        return self.at(_drawn(len(self), count, seed))

    def repeated(self, count: int, seed: int) -> TokenRows:
        """`count` rows, pass after pass over all of them, each in another random order: as a training reads them."""
        generator, passes = np.random.default_rng(seed), math.ceil(count / len(self))
        return self.at(np.concatenate([generator.permutation(len(self)) for _ in range(passes)])[:count])

    def followed_by(self, others: TokenRows) -> TokenRows:
        """These rows, then the others."""
        labels = [self.labels, others.labels]
        if self.labels.ndim > 1:
            longest, filler = max(part.shape[1] for part in labels), IGNORED if of_tokens(self.labels) else False
            labels = [np.pad(part, ((0, 0), (0, longest - part.shape[1])), constant_values=filler) for part in labels]
        return TokenRows([*self.tokens, *others.tokens], np.concatenate(labels), self.kind)

    def at(self, chosen: Sequence[int] | np.ndarray) -> TokenRows:
        """The rows of these numbers."""
        return TokenRows([self.tokens[row] for row in chosen], self.labels[chosen], self.kind)

    @property
    def most_predictions(self) -> int:
        """The largest number of predictions in one row."""
        return int((self.labels != IGNORED).sum(axis=1).max()) if of_tokens(self.labels) else 1


def _drawn(rows: int, count: int, seed: int) -> np.ndarray:
    """The numbers of `count` random ones of so many rows, in random order (of all, when there are fewer)."""
    return np.random.default_rng(seed).permutation(rows)[:count]


@dataclass(frozen=True)
class TextRows:
    """The rows of a file before they are tokens, and what makes them tokens of the model in `folder`."""

    folder: Path
    split: Split
    config: TaskConfig
    path: Path
    kind: TaskKind

    def __len__(self) -> int:
        return len(self.split)

    @property
    def labels(self) -> Labels:
        """One label per row, as it was read."""
        return self.split.labels

    def tokenized(self) -> TokenRows:
        """All rows as tokens. Raises UserErrors E212, E213."""
        return tokenized(self.folder, self.split, self.config, self.path, self.kind)

    def draw(self, count: int, seed: int) -> TokenRows:
        """The rows that `TokenRows.draw` gives, with no other row tokenized. Raises UserErrors E212, E213 for these."""
        return replace(self, split=self.split.at(_drawn(len(self), count, seed))).tokenized()


@dataclass(frozen=True)
class MetricInputs:
    """The arrays from which a kind computes its metrics, for one model on all rows of a split: `TaskKind.metric_inputs`."""

    predicted: np.ndarray
    labels: np.ndarray
    kind: TaskKind

    @property
    def quality(self) -> dict[str, Any]:
        """The metrics, as recorded in metadata and reports."""
        return self.kind.quality(self.predicted, self.labels)

    def change_from(self, reference: MetricInputs) -> tuple[float, float]:
        """95 % interval of the main metric's change against another model on the same rows."""
        return self.kind.change(self.predicted, reference.predicted, self.labels)


@dataclass(frozen=True)
class Data:
    """Both splits, the label names in the order of the model's outputs, the id that pads input_ids, and the vocabulary's size
    if its tokens are the outputs, which then have no names. `training` are the rows of `train`, as tokens or as texts.

    Stages after each other are given the same one (`read_data`), so nothing in it may be changed."""

    training: TokenRows | TextRows
    validation: TokenRows
    label_names: list[str]
    pad_id: int
    vocabulary: int = 0

    @property
    def train(self) -> TokenRows:
        """The training rows, tokenized at first use: most stages behind a training need none."""
        if isinstance(self.training, TextRows):  # the texts make room for the tokens
            object.__setattr__(self, "training", self.training.tokenized())
        return self.training

    def draw(self, count: int, seed: int) -> TokenRows:
        """The training rows of `train.draw`; where these are few, no other row is tokenized for them."""
        return (self.training if count < len(self.training) else self.train).draw(count, seed)

    @property
    def kind(self) -> TaskKind:
        """The kind of task."""
        return (self.validation if isinstance(self.training, TextRows) else self.training).kind

    @property
    def traced(self) -> dict[str, np.ndarray]:
        """Two padded validation rows, as a sample to trace a model with; the only one of a file twice, and a lone token of
        both, too: an axis of size 1 would be fixed in the graph."""
        tokens = self.validation.sample(2).tokens
        batch = pad(tokens * 2 if len(tokens) == 1 else tokens, self.pad_id)
        return {name: np.repeat(values, 2, axis=1) if values.shape[1] == 1 else values for name, values in batch.items()}

    @cached_property
    def batch_size(self) -> int:
        """Batch size of forward passes without training."""
        if not self.vocabulary:
            return BATCH
        rows = (*self.train.tokens, *self.validation.tokens)
        longest = max(len(row.get(DECODER_IDS, row["input_ids"])) for row in rows)
        return max(1, min(BATCH, MOST_OUTPUTS // (longest * self.vocabulary)))

    def compared(self, most: int | None = None) -> TokenRows:
        """Validation rows for a parity check that keeps logits: `most` of them (default: all), or as many as fit in memory."""
        places = self.compared_places(most)
        return self.validation if most is None and len(places) == len(self.validation) else self.validation.at(places)

    def compared_places(self, most: int | None = None) -> list[int]:
        """The numbers of those rows, shortest first."""
        fitting = max(MOST_OUTPUTS // (self.validation.most_predictions * (len(self.label_names) or self.vocabulary)), 2)
        return self.validation.spread(min(len(self.validation) if most is None else most, fitting))


def read_data(folder: Path, config: TaskConfig, *, later: bool = False) -> Data:
    """The files of a task as tokens of the model in `folder`; `later`: those of the training rows at their first use. What a
    process read last is held, and given again while these files and the model's are unchanged. Raises UserErrors E2xx."""
    data = _read(folder, config, later=later)
    # what is held may be of a call that left them for later
    return data if later else replace(data, training=data.train)


def _files_read(folder: Path, config: TaskConfig) -> list[Path]:
    """The files that decide what `read_data` gives."""
    return [config.train, config.validation, *sorted(folder.glob("*"))]


@kept_by_files(_files_read, most=1)  # two would be two large copies
def _read(folder: Path, config: TaskConfig, *, later: bool) -> Data:
    kind, model = kind_of(config.kind), config_of(folder)
    tokenizer = task_tokenizer(folder, kind)
    if kind.generates:
        check_end(tokenizer, model, folder)
    task = read_task(config)
    kind, splits = kind_for(config, task.label_names), ((task.train, config.train), (task.validation, config.validation))
    *train, validation = _all_tokenized(tokenizer, folder, splits[later:], config, kind)
    training = TextRows(folder, task.train, config, config.train, kind) if later else train[0]
    pad_id = padding_id(model, folder)
    if config.decode is not None:
        validation = _with_items(validation, task.validation, config, config.validation, model)
    return Data(training, validation, task.label_names, pad_id, 0 if task.label_names else model.vocab_size)


def _with_items(rows: TokenRows, split: Split, config: TaskConfig, path: Path, model: PretrainedConfig) -> TokenRows:
    """The rows of a file with the prompts that `config.decode` scores. Raises UserError E241."""
    decoded = replace(rows, items=items_of(split, config.decode))
    most = row_of(model.model_type).most_tokens(model.to_dict())
    check_positions(decoded.prompts, config.decode, most, path)
    return decoded


def read_test_rows(folder: Path, config: TaskConfig, names: list[str]) -> dict[str, TokenRows]:
    """The files that are only scored, by name, as tokens of the model in `folder`; `names` are the labels of its outputs. Their
    prompts are scored where the main metric is of generated texts. Raises UserErrors E2xx."""
    if not config.tests:
        return {}
    tests, kind = read_tests(config, names), kind_for(config, names)
    splits = [(split, config.tests[name]) for name, split in tests.items()]
    rows = _all_tokenized(task_tokenizer(folder, kind), folder, splits, config, kind)
    if kind.metric.of_texts:
        files = zip(rows, splits, strict=True)
        rows = [_with_items(of, split, config, path, config_of(folder)) for of, (split, path) in files]
    return dict(zip(tests, rows, strict=True))


def tokenized(folder: Path, split: Split, config: TaskConfig, path: Path, kind: TaskKind | None = None) -> TokenRows:
    """The rows of a file as tokens of the model in `folder`, of a `kind` if that is not the task's as it is without a chosen
    metric. Raises UserErrors E212, E213."""
    kind = kind or kind_of(config.kind)
    return _all_tokenized(task_tokenizer(folder, kind), folder, [(split, path)], config, kind)[0]


def _all_tokenized(
    tokenizer, folder: Path, splits: Iterable[tuple[Split, Path]], config: TaskConfig, kind: TaskKind
) -> list[TokenRows]:
    """Each split, of a file, as tokens. Faults of all files are collected before they are raised as UserErrors."""
    rows, faults = [], []
    for split, path in splits:
        try:
            rows.append(_token_rows(tokenizer, folder, split, config, path, kind))
        except UserError as error:
            faults.append(error)
    if faults:
        raise UserErrors(faults)
    return rows


def task_tokenizer(folder: Path, kind: TaskKind):
    """The tokenizer of the model in `folder` for the texts of a kind of task.

    A special token spelt in a text, such as [SEP], is text, as on the server; only a prompt of a generating model may hold it.
    """
    tokenizer = tokenizer_of(folder)
    tokenizer.split_special_tokens = not kind.generates
    return tokenizer


def _token_rows(tokenizer, folder: Path, split: Split, config: TaskConfig, path: Path, kind: TaskKind) -> TokenRows:
    tokens, labels = kind.encode(tokenizer, split, config, path)
    if kind.auto_class == TEXT2TEXT:
        model = config_of(folder)
        tokens = with_decoder_inputs(tokens, labels, start_id(model, padding_id(model, folder)))
    elif (end := end_id(folder)) is not None:
        check_ends(tokenizer, tokens, split, end, path)
    labels.flags.writeable = False  # stages share them
    return TokenRows(tokens, labels, kind.with_texts(kind, tokenizer, split))


def tensor_batches(
    rows: TokenRows, pad_id: int, batch_size: int, *, in_order: bool = False
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """(inputs, labels) of rows of similar length, or of the rows `in_order`, as tensors."""
    import torch  # imported here: `compress check` reads data without torch

    order = np.arange(len(rows))
    chunks = (order[start : start + batch_size] for start in range(0, len(rows), batch_size))
    for chosen in chunks if in_order else batches(rows.tokens, batch_size):
        batch = pad([rows.tokens[row] for row in chosen], pad_id)
        labels = torch.from_numpy(cut(rows.labels[chosen], output_length(batch)))
        yield {key: torch.from_numpy(value) for key, value in batch.items()}, labels
