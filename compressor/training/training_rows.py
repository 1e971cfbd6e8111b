"""What a training reads: the rows of a task, and how some of them become a batch. Apart from the trainer, whose libraries take
seconds to load, for whoever only plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compressor.tasks.features import output_length, pad
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.predictions import cut, spread
from compressor.tasks.rows import Labels
from compressor.tasks.task_kind import TaskKind


class TrainingRows(torch.utils.data.Dataset):
    """Token lists with labels and, for distillation, the teacher's outputs (`tasks.predictions.by_row`), all row by row;
    the loss is that of `kind`. Raises ValueError for no rows, and for others than there are labels or outputs."""

    def __init__(
        self,
        rows: Sequence[dict[str, list[int]]],
        labels: Labels,
        teacher: Sequence[np.ndarray] | None = None,
        kind: TaskKind = CLASSIFICATION,
    ):
        if not len(rows):
            raise ValueError("rows is empty: there is nothing to train on")
        for what, given in (("labels", labels), ("outputs of a teacher", teacher)):
            if given is not None and len(given) != len(rows):
                raise ValueError(f"{len(rows)} rows and {len(given)} {what}")
        self.rows, self.labels, self.teacher, self.kinds = rows, labels, teacher, (kind,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        item = {**self.rows[index], "labels": self.labels[index]}
        return item if self.teacher is None else {**item, "teacher": self.teacher[index]}


@dataclass(frozen=True)
class Collator:
    """Items -> a right-padded batch of tensors.

    Of several `processes`, number `rank` gets every `processes`-th item. Its batch then contains `rows`, the number of all
    items, and `weight`, that of its mean in the mean over the processes: 0 where it has an item only to compute something.
    """

    pad_id: int
    rank: int = 0
    processes: int = 1

    def __call__(self, items: list[dict]) -> dict[str, Any]:
        if self.processes == 1:
            return self._batch(items)
        share = items[self.rank :: self.processes]
        weight = len(share) * self.processes / len(items)
        return {**self._batch(share or items[:1]), "rows": len(items), "weight": weight}

    def _batch(self, items: list[dict]) -> dict[str, Any]:
        extra = ("labels", "teacher", "task")
        batch = pad([{key: value for key, value in item.items() if key not in extra} for item in items], self.pad_id)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        labels = cut(torch.from_numpy(np.array([item["labels"] for item in items])), output_length(batch))
        tensors["labels"] = labels
        if "teacher" in items[0]:
            tensors["teacher"] = torch.from_numpy(spread([item["teacher"] for item in items], labels.numpy()))
        if "task" in items[0]:  # the same in every item
            tensors["task"] = items[0]["task"]
        return tensors
