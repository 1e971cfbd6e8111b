"""Tune and recover on Hugging Face's Trainer, with optional distillation from logits computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainingArguments

from compressor.errors import UserError
from compressor.tasks.features import pad

TEMPERATURE = 2.0
"""Of the distillation loss 0.5 CE + 0.5 T² KL (Hinton et al. 2015)."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: AdamW, linear decay after `warmup` (a share of all steps), gradients clipped to norm 1."""

    epochs: float
    learning_rate: float
    mask_learning_rate: float | None = None
    """Of ProPETL's scores; None: as everything else."""
    batch_size: int = 32
    warmup: float = 0.06
    weight_decay: float = 0.0
    seed: int = 0

    def steps(self, rows: int) -> int:
        """Optimizer steps for a training set of `rows`."""
        return int(np.ceil(-(-rows // self.batch_size) * self.epochs))


class Rows(torch.utils.data.Dataset):
    """Token lists with labels and, for distillation, the teacher's logits (rows, classes)."""

    def __init__(self, rows: Sequence[dict[str, list[int]]], labels: Sequence[int], teacher: np.ndarray | None = None):
        self.rows, self.labels, self.teacher = rows, labels, teacher

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        item = {**self.rows[index], "labels": self.labels[index]}
        return item if self.teacher is None else {**item, "teacher": self.teacher[index]}


@dataclass(frozen=True)
class Collator:
    """Items -> a right-padded batch of tensors."""

    pad_id: int

    def __call__(self, items: list[dict]) -> dict[str, Tensor]:
        extra = ("labels", "teacher")
        batch = pad([{key: value for key, value in item.items() if key not in extra} for item in items], self.pad_id)
        tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
        tensors["labels"] = torch.tensor([item["labels"] for item in items])
        if "teacher" in items[0]:
            tensors["teacher"] = torch.from_numpy(np.stack([item["teacher"] for item in items]))
        return tensors


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """0.5 CE + 0.5 T² KL(teacher ‖ student), both softened by T. Logits are (batch, classes)."""
    soft = functional.kl_div(
        functional.log_softmax(student / TEMPERATURE, dim=-1),
        functional.log_softmax(teacher / TEMPERATURE, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return 0.5 * functional.cross_entropy(student, labels) + 0.5 * TEMPERATURE**2 * soft


class TaskTrainer(Trainer):
    """Trainer whose loss is ours: cross-entropy as a mean over the batch, or distillation where a teacher is given."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        # encoders take **kwargs, from which Trainer concludes that their loss is a token sum: accumulation then doubles it
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, teacher = inputs.pop("labels"), inputs.pop("teacher", None)
        outputs = model(**inputs)
        if teacher is None:
            loss = functional.cross_entropy(outputs.logits, labels)
        else:
            loss = distillation_loss(outputs.logits, teacher, labels)
        return (loss, outputs) if return_outputs else loss


class _Report(TrainerCallback):
    """Tells the caller about every step and every logged loss, and keeps the losses."""

    def __init__(self, on_step: Callable[[str], None]):
        self.on_step, self.losses, self.note = on_step, [], ""

    def on_step_end(self, args, state, control, **kwargs):
        self.on_step(self.note)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append({"step": state.global_step, "loss": round(float(logs["loss"]), 6)})
            self.note = f"loss {float(logs['loss']):.3f}"


def train(
    model: nn.Module,
    dataset: Rows,
    pad_id: int,
    schedule: Schedule,
    work: Path,
    on_step: Callable[[str], None] = lambda note: None,
) -> list[dict]:
    """Train what `requires_grad` says, in place; returns the logged losses ({"step", "loss"}).

    On the GPU where torch finds one. Deterministic for one seed and one thread count. `work` is Trainer's folder; nothing
    is saved there. Raises UserError E406 when a parameter is no longer finite.
    """
    report = _Report(on_step)
    arguments = TrainingArguments(
        output_dir=str(work),
        num_train_epochs=schedule.epochs,
        learning_rate=schedule.learning_rate,
        per_device_train_batch_size=schedule.batch_size,
        weight_decay=schedule.weight_decay,
        warmup_steps=schedule.warmup,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        seed=schedule.seed,
        data_seed=schedule.seed,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = TaskTrainer(
        model=model, args=arguments, train_dataset=dataset, data_collator=Collator(pad_id), callbacks=[report]
    )
    trainer.train()
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters() if parameter.requires_grad):
        raise UserError(
            "E406", f"training diverged at learning_rate {schedule.learning_rate:g}", "Lower it, e.g. to a third of that"
        )
    # Trainer leaves the model on the GPU where there is one; everything after it compares and stores on the CPU
    model.cpu().eval()
    return report.losses
