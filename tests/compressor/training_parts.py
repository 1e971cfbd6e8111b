"""What the training tests run in this process and, as a program, in two: `python -m tests.compressor.training_parts OUT`."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from compressor.compression import compression_of
from compressor.methods import apply
from compressor.pruning.surgery import remove
from compressor.tasks.predictions import IGNORED
from compressor.tasks.task_kind import kind_of
from compressor.training.distillation import HiddenTeacher
from compressor.training.keep_best import KeepBest
from compressor.training.multitask import Mixture, join_heads
from compressor.training.schedule import Schedule
from compressor.training.trainer import train, trainer_of
from compressor.training.training_rows import TrainingRows
from compressor.training.unfinished import changing
from tests.compressor.conftest import OPTIONS, PLAN, prepared, tiny

MODULES = ("query", "value", "ffn_out")
MANY = "many-tasks"
"""What is trained beside the cases."""


def rows_of(count: int) -> TrainingRows:
    """Random rows of 4 to 10 tokens; the first tells the label, the last is the end of sentence that T5 wants once in each."""
    generator = torch.Generator().manual_seed(3)
    tokens = [[*torch.randint(4, 99, (3 + i % 7,), generator=generator).tolist(), 3] for i in range(count)]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens]
    return TrainingRows(rows, [ids[0] % 3 for ids in tokens])


def one_process(case: str, work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order, and one of a single row; returns what moved."""
    model = tiny("bert")
    prepared(model, case, MODULES, places=20)
    schedule = Schedule(epochs=1, learning_rate=1e-2, mask_learning_rate=3e-2, batch_size=batch_size, accumulate=accumulate)
    trainer_of(model, rows_of(49), 1, schedule, work, train_sampling_strategy="sequential", use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


CLASSES = {"a": 3, "b": 2}
"""Two tasks."""


def with_classes(architecture: str, classes: int, dtype: torch.dtype):
    """`tiny` with another number of classes; the base is the same, bit for bit."""
    three = tiny(architecture, dtype)
    labels = {number: str(number) for number in range(classes)}
    names = {"id2label": labels, "label2id": {name: number for number, name in labels.items()}}
    model = AutoModelForSequenceClassification.from_config(type(three.config).from_dict({**three.config.to_dict(), **names}))
    model = model.to(dtype).eval()
    model.base_model.load_state_dict(three.base_model.state_dict())
    compression_of(model).head_parameters = compression_of(three).head_parameters
    return model


def many(architecture: str = "bert", dtype: torch.dtype = torch.float64, method: str = "propetl", **kind):
    """A model of both tasks, by default of ProPETL, and its options."""
    model = join_heads((name, with_classes(architecture, count, dtype)) for name, count in CLASSES.items())
    options = replace(OPTIONS, group="1", tasks=len(CLASSES), **kind)
    apply(model, method, options)
    return model, options


def mixture() -> Mixture:
    """60 rows of the first task, 30 of the second."""
    rows = rows_of(90)
    two = [row["input_ids"][0] % 2 for row in rows.rows[60:]]
    return Mixture([TrainingRows(rows.rows[:60], rows.labels[:60]), TrainingRows(rows.rows[60:], two)], temperature=10.0)


def many_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Twelve steps of 16 rows of one task each, in float64; returns what moved."""
    model, _ = many()
    schedule = Schedule(epochs=2, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate, seed=5)
    trainer_of(model, mixture(), 1, schedule, work, use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


TAUGHT = "taught"
"""A recovery with a live teacher, beside the cases."""


def taught_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order: a pruned model learns hidden states and logits; returns what moved."""
    dense = tiny("bert")
    model = copy.deepcopy(dense)
    remove(model, PLAN)
    prepared(model, "lora", MODULES)
    schedule = Schedule(epochs=1, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate)
    teacher, overrides = HiddenTeacher(dense, model, logits=True), {"train_sampling_strategy": "sequential", "use_cpu": True}
    trainer_of(model, rows_of(48), 1, schedule, work, teacher=teacher, **overrides).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


NUMBERS = "numbers"
"""A regression that learns a teacher's outputs, too."""


def numbers_of(count: int) -> TrainingRows:
    """`rows_of` with a number each, and a teacher that says something else."""
    rows = rows_of(count)
    labels = [ids["input_ids"][0] / 20 for ids in rows.rows]
    return TrainingRows(
        rows.rows, labels, np.array([[5.0 - label] for label in labels], dtype=np.float32), kind_of("regression")
    )


def numbers_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order; returns what moved."""
    model = with_classes("bert", 1, torch.float64)
    prepared(model, "lora", MODULES)
    schedule = Schedule(epochs=1, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate)
    trainer_of(model, numbers_of(48), 1, schedule, work, train_sampling_strategy="sequential", use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


SMOOTHED = "smoothed"
"""Classes with smoothed labels, and a teacher's outputs, too."""


def smoothed_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order, with weight decay; returns what moved."""
    model, rows = tiny("bert"), rows_of(48)
    prepared(model, "lora", MODULES)
    taught = np.random.default_rng(4).normal(size=(len(rows), 3)).astype(np.float32)
    dataset = TrainingRows(rows.rows, rows.labels, taught, kind_of("classification").with_smoothing(0.2))
    schedule = Schedule(epochs=1, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate, weight_decay=0.1)
    trainer_of(model, dataset, 1, schedule, work, train_sampling_strategy="sequential", use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


TAGS = "tags"
"""Tags of words that learn a teacher's outputs, too: rows of one to seven labels."""


def tags_of(count: int) -> TrainingRows:
    """`rows_of` with a tag at every other token, as wide as the longest row; a teacher has an answer at each."""
    rows, draw = rows_of(count).rows, np.random.default_rng(4)
    labels = [[ids % 3 if place % 2 == 0 else IGNORED for place, ids in enumerate(row["input_ids"])] for row in rows]
    taught = [draw.normal(size=(len(one) - one.count(IGNORED), 3)).astype(np.float32) for one in labels]
    return TrainingRows(rows, [one + [IGNORED] * (12 - len(one)) for one in labels], taught, kind_of("tokens"))


def tags_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order; returns what moved."""
    model = tiny("bert", auto=AutoModelForTokenClassification)
    prepared(model, "lora", MODULES)
    schedule = Schedule(epochs=1, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate)
    trainer_of(model, tags_of(45), 1, schedule, work, train_sampling_strategy="sequential", use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


TEXTS = "texts"
"""A decoder that says the next token, and a live teacher of those alone: rows of two to six labels."""


def texts_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order; returns what moved."""
    dense, model = (tiny("gpt2", auto=AutoModelForCausalLM, seed=seed) for seed in (1, 0))
    prepared(model, "lora", MODULES)
    rows = rows_of(48).rows
    known = [[IGNORED, *row["input_ids"][2:]] for row in rows]
    labels = [one + [IGNORED] * (12 - len(one)) for one in known]
    schedule = Schedule(epochs=1, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate)
    teacher, overrides = HiddenTeacher(dense, model, weight=0.0, logits=True), {"train_sampling_strategy": "sequential"}
    dataset = TrainingRows(rows, labels, None, kind_of("generation"))
    trainer_of(model, dataset, 1, schedule, work, teacher=teacher, use_cpu=True, **overrides).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


def _next(counted: Iterator[int], note: str) -> None:
    next(counted)


RESUMED = "resumed"
"""A training that stores checkpoints, is interrupted and resumed, and keeps its best parameters; rows by length."""


def resumed_in_one_process(work: Path, batch_size: int, accumulate: int = 1, stop: int = 4) -> dict[str, Tensor]:
    """At most nine steps of 16 rows in float64, the last of each epoch of 13, interrupted after `stop`: by default in the
    second epoch; returns the best."""
    schedule = Schedule(epochs=3, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate)
    values = iter([0.1, 0.2, 0.5, 0.4])  # of the steps before and after the interruption; here this is not what is tested

    for left in (stop, 100):
        model, best = tiny("bert"), KeepBest(lambda model: next(values), every=2, patience=1)
        prepared(model, "lora", MODULES)
        counted = iter(range(left))
        with contextlib.suppress(StopIteration):
            train(model, rows_of(45), 1, schedule, work, partial(_next, counted), save_every=0.0, best=best)
    assert [evaluation["step"] for evaluation in best.evaluations] == [2, 4, 6, 8]
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if tensor.requires_grad}


MANY_RESUMED = "many-tasks-resumed"
"""A training of both tasks that is interrupted in its second epoch and resumed."""


def many_resumed_in_one_process(work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Twelve steps of 16 rows of one task each, in float64, interrupted after eight; returns what moved."""
    schedule = Schedule(epochs=2, learning_rate=1e-2, batch_size=batch_size, accumulate=accumulate, seed=5)
    for left in (8, 100):
        model, _ = many()
        counted = iter(range(left))
        with contextlib.suppress(StopIteration):
            train(model, mixture(), 1, schedule, work, partial(_next, counted), save_every=0.0)
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters() if tensor.requires_grad}


OTHERS = {
    RESUMED: resumed_in_one_process,
    MANY_RESUMED: many_resumed_in_one_process,
    MANY: many_in_one_process,
    TAUGHT: taught_in_one_process,
    NUMBERS: numbers_in_one_process,
    SMOOTHED: smoothed_in_one_process,
    TAGS: tags_in_one_process,
    TEXTS: texts_in_one_process,
}


def main(out: Path, cases: list[str]) -> None:
    gc.freeze()  # Trainer collects garbage at every start
    for case in cases:
        work = out / "work" / case
        moved = OTHERS[case](work, batch_size=16) if case in OTHERS else one_process(case, work, batch_size=16)
        if torch.distributed.get_rank() == 0:
            save_file(moved, out / f"{case}.safetensors")
    torch.distributed.destroy_process_group()  # or gloo's threads abort the process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
