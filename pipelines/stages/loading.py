"""What several stages read in the same way: the task's rows as tokens, and the model of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.compression import compression_of
from compressor.errors import UserError, UserErrors
from pipelines.engine.stage import Artifact, BaseModelReference, Inputs, Workspace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.tasks import TaskConfig
    from compressor.tasks.features import Forward
    from compressor.tasks.kinds import Kind

PARITY_ROWS = 256
"""Validation rows that a parity check compares: the longest and the shortest are among them."""
BATCH = 32
"""Rows of a forward pass."""
MOST_OUTPUTS = 2**24
"""The most logits (64 MiB) of one side of a comparison, or of a forward pass: where outputs are words, that is fewer rows."""


@dataclass(frozen=True)
class Rows:
    """One split as tokens: unpadded rows and labels (rows,), or (rows, longest) where tokens have labels, of a kind of task."""

    tokens: list[dict[str, list[int]]]
    labels: np.ndarray
    kind: Kind

    def __len__(self) -> int:
        return len(self.tokens)

    def sample(self, count: int) -> Rows:
        """`count` rows evenly spread over the lengths, so that short and long rows are all seen."""
        order = sorted(range(len(self)), key=lambda row: (len(self.tokens[row]["input_ids"]), row))
        return self._of([order[place] for place in np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)])

    def draw(self, count: int, seed: int) -> Rows:
        """`count` rows (all, when there are fewer) at random."""
        return self._of(np.random.default_rng(seed).permutation(len(self))[:count])

    def _of(self, chosen: Sequence[int] | np.ndarray) -> Rows:
        return Rows([self.tokens[row] for row in chosen], self.labels[chosen], self.kind)

    @property
    def most_answers(self) -> int:
        """Of one row."""
        from compressor.tasks.answers import IGNORED

        return 1 if self.labels.ndim == 1 else int((self.labels != IGNORED).sum(axis=1).max())


@dataclass(frozen=True)
class Judged:
    """What the metrics of a kind are made of, for one model on all rows of a split: `Kind.judged`."""

    found: np.ndarray
    known: np.ndarray
    kind: Kind

    @property
    def quality(self) -> dict[str, Any]:
        """The metrics, as they stand in metadata and reports."""
        return self.kind.quality(self.found, self.known)

    def change_from(self, reference: Judged) -> tuple[float, float]:
        """95 % interval of the main metric's change against another model on the same rows."""
        return self.kind.change(self.found, reference.found, self.known)


@dataclass(frozen=True)
class Data:
    """Both splits, the label names in the order of the model's outputs, the id that pads input_ids, and the size of the
    vocabulary whose words are the outputs where these have no names."""

    train: Rows
    validation: Rows
    label_names: list[str]
    pad_id: int
    vocabulary: int = 0

    @property
    def kind(self) -> Kind:
        """What sort of task it is."""
        return self.train.kind

    @property
    def batch_size(self) -> int:
        """Rows of a forward pass that trains nothing."""
        longest = max(len(row["input_ids"]) for rows in (self.train, self.validation) for row in rows.tokens)
        return max(1, min(BATCH, MOST_OUTPUTS // (longest * self.vocabulary))) if self.vocabulary else BATCH

    def compared(self, most: int | None = None) -> Rows:
        """Validation rows for a parity check, whose logits are held: `most` of them (all by default), or as many as fit."""
        fitting = max(MOST_OUTPUTS // (self.validation.most_answers * (len(self.label_names) or self.vocabulary)), 2)
        few = min(len(self.validation) if most is None else most, fitting)
        return self.validation if most is None and few == len(self.validation) else self.validation.sample(few)


def load_data(inputs: Inputs, config: TaskConfig | None = None) -> Data:
    """Read and tokenize the files of the task, or of one of the many, with the base model's tokenizer."""
    return read_data(inputs.base.folder, config or inputs.task)


def read_data(folder: Path, config: TaskConfig) -> Data:
    """The files of a task as tokens of the model in `folder`. Raises UserErrors E2xx."""
    from compressor.models.hub import config_of, end_id, padding_id, tokenizer_of
    from compressor.tasks.features import check_ends
    from compressor.tasks.generation import check_end
    from compressor.tasks.kinds import kind_of
    from compressor.tasks.reading import read_task

    tokenizer, end, kind, model = tokenizer_of(folder), end_id(folder), kind_of(config.kind), config_of(folder)
    if kind.generates:
        check_end(tokenizer, model, folder)
    task, splits, faults = read_task(config), [], []
    for split, path in ((task.train, config.train), (task.validation, config.validation)):
        try:
            tokens, labels = kind.encode(tokenizer, split, config, path)
            if end is not None:
                check_ends(tokenizer, tokens, split, end, path)
            splits.append(Rows(tokens, labels, kind))
        except UserError as error:  # both files are looked at before anything is mended
            faults.append(error)
    if faults:
        raise UserErrors(faults)
    return Data(*splits, task.label_names, padding_id(model, folder), 0 if task.label_names else model.vocab_size)


def load_model(artifact: Artifact, base: BaseModelReference, seed: int = 0) -> nn.Module:
    """The model of an artifact with its chains attached: a state on the base, or a merged checkpoint.

    `seed` sets torch's random state, which new deltas are drawn from afterwards.
    """
    from compressor.checkpoint import load, load_state

    return load(artifact.folder) if artifact.metadata["merged"] else load_state(artifact.folder, base.folder, seed=seed)


def predict_rows(
    forward: Forward, rows: Rows, data: Data, workspace: Workspace, description: str, batch_size: int | None = None
) -> np.ndarray:
    """Logits (answers, outputs) of any `Forward`, with a progress bar; batches are those of the data by default."""
    from compressor.tasks.features import predict

    with workspace.progress(description, len(rows)) as bar:
        options = {"labels": rows.labels, "batch_size": batch_size or data.batch_size, "on_batch": bar.advance}
        return predict(forward, rows.tokens, data.pad_id, **options)


def judge_rows(
    forward: Forward,
    rows: Rows,
    data: Data,
    workspace: Workspace,
    description: str,
    judged: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
) -> Judged:
    """What the kind's `judged` (or another) makes of a model's answers to `rows`, with a progress bar; see `judge`."""
    from compressor.tasks.features import judge

    with workspace.progress(description, len(rows)) as bar:
        options = {"batch_size": data.batch_size, "on_batch": bar.advance}
        found = judge(forward, rows.tokens, data.pad_id, rows.labels, judged or rows.kind.judged, **options)
    return Judged(*found, rows.kind)


def tensor_batches(rows: Rows, pad_id: int, batch_size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """(inputs, labels) of rows of similar length, as tensors."""
    import torch

    from compressor.tasks.answers import cut
    from compressor.tasks.features import batches, pad

    for chosen in batches(rows.tokens, batch_size):
        batch = pad([rows.tokens[row] for row in chosen], pad_id)
        labels = torch.from_numpy(cut(rows.labels[chosen], batch["input_ids"].shape[1]))
        yield {key: torch.from_numpy(value) for key, value in batch.items()}, labels


def publish_model(model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> dict:
    """Measure quality on all validation rows and write the model's state; returns the metadata that every state has."""
    from compressor.checkpoint import save_state
    from compressor.pruning.surgery import kept_of
    from compressor.tasks.features import torch_forward

    quality = judge_rows(torch_forward(model), data.validation, data, workspace, "validating").quality
    save_state(
        model,
        workspace.folder,
        base=inputs.base.reference,
        base_sha256=inputs.base.sha256,
        label_names=data.label_names,
    )
    return {
        "merged": False,
        "weights_moved": compression_of(model).weights_moved,
        "quality": quality,
        "kept": kept_of(model),
        "labels": data.label_names,
    }
