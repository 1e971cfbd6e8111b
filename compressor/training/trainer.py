"""Tune and recover on Hugging Face's Trainer, with optional distillation: from precomputed logits, or a live teacher.

An interrupted training resumes from its last checkpoint and gives bit-identical results on a CPU; on a GPU some kernels, such
as the backward of attention with a mask, may add in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from compressor.deltas.backward import by_factors
from compressor.deltas.inserts import settle_inserts
from compressor.deltas.kinds.dense import Dense, dense_links, fixed_after, gates_of
from compressor.deltas.links import Change, settle_links
from compressor.deltas.sources import settle_prototypes
from compressor.selection.growth import Grower, ScalarAdamW, grower_of
from compressor.selection.within import thaw
from compressor.tasks.features import length_of
from compressor.training.callbacks import CLIP, DenseLinks, Grow, Report, Save
from compressor.training.distillation import HiddenTeacher
from compressor.training.divergence import Watch, mask_parameters
from compressor.training.keep_best import KeepBest
from compressor.training.mixed_precision import computed, widened
from compressor.training.processes import agreed, divided_cores, helping, launched, rank, wait
from compressor.training.schedule import Precision, Schedule
from compressor.training.training_rows import Collator, TrainingRows
from compressor.training.unfinished import ARRAYS_OF_ANY_NUMPY, keep_newest, load_changing, newest, save_changing, seal


class SeededGroups(LengthGroupedSampler):
    """Rows of similar length together, in an order that depends on the seed and the epoch alone: Trainer's own draws from the
    global random state, which differs in a resumed training.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int):
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)


class TaskTrainer(Trainer):
    """Trainer with the loss of the task's kind (as a mean over the batch, or distillation), separate parameter groups, deltas
    trained by the gradients of their factors, and checkpoints of the trained tensors instead of the whole model.

    `watch` checks that all stays finite. `grower` is given where Ω grows while training; gradients are then clipped after it
    has chosen. `dense` are the links that may add to the loss, `share` is the learning rate at a step (from 0) relative to its
    peak, if it is not one linear decay; `teacher` is a model in memory; without `dropout`, only changes of weights are in
    training mode; `precision` is that of matrix products; `best` is stored in checkpoints.
    """

    def __init__(
        self,
        *,
        watch: Watch,
        mask_learning_rate: float | None,
        grower: Grower | None,
        dense: Sequence[Dense],
        share: Callable[[int], float] | None,
        teacher: HiddenTeacher | None,
        dropout: bool,
        precision: Precision,
        best: KeepBest | None,
        **arguments,
    ):
        super().__init__(**arguments)
        self.watch, self.teacher, self.dropout, self.best, self.precision = watch, teacher, dropout, best, precision
        self.mean_rows: float | None = None
        """Rows of a mean batch of the current step, if it has several."""
        self.mask_learning_rate, self.grower, self.dense, self.share = mask_learning_rate, grower, dense, share
        # encoders take **kwargs, from which Trainer concludes that their loss is a sum over tokens: accumulation would double
        # it
        self.model_accepts_loss_kwargs = False

    def train(self, *arguments, **options):
        with by_factors(self.model):
            return super().train(*arguments, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, teacher_logits = inputs.pop("labels"), inputs.pop("teacher", None)
        rows, weight = inputs.pop("rows", len(labels)), inputs.pop("weight", 1.0)
        kind = self.train_dataset.kinds[inputs.get("task", 0)]
        if not self.dropout:
            without_dropout(model)
        if self.teacher is not None:
            outputs, loss = self.teacher.loss(model, inputs, labels, kind, self.precision)
        else:
            outputs = computed(model, inputs, self.precision)
            logits = widened(outputs.logits)
            loss = kind.loss(logits, labels) if teacher_logits is None else kind.distillation(logits, teacher_logits, labels)
        loss = loss + sum(link.penalty() for link in self.dense)
        if self.mean_rows is not None:
            weight *= rows / self.mean_rows
        if weight != 1.0:
            loss = loss * weight
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of a step. Trainer averages their losses; the last of an epoch may have fewer rows, and counts less."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        rows = [batch.get("rows", len(batch["labels"])) for batch in batches]
        self.mean_rows = sum(rows) / len(rows) if len(rows) > 1 else None
        return batches, items

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        loader = super().get_train_dataloader()
        if self.args.world_size > 1:
            # every process reads whole batches, of which its collator takes a share: accelerate's equal shares repeat rows
            shard = loader.batch_sampler
            shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
            # a resumed epoch wraps the shard once more: accelerate then tells the epoch to a sampler of the shard alone
            shard.sampler = shard.batch_sampler.sampler
        return loader

    def _get_train_sampler(self, train_dataset: TrainingRows | None = None) -> torch.utils.data.Sampler:
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        if hasattr(self.train_dataset, "sampler"):  # many tasks: all batches of a step are from one task
            return self.train_dataset.sampler(size, self.args.data_seed)
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        lengths = [length_of(row) for row in self.train_dataset.rows]
        return SeededGroups(size, lengths, self.args.data_seed)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As Trainer; the matrices of an adapter that is inserted at a norm, too, as they are none of the norm's own."""
        inserted = [name for name, _ in model.named_parameters() if ".inserts." in name]
        matrices = [name for name in inserted if "bias" not in name.partition(".inserts.")[2]]
        return [*super().get_decay_parameter_names(model), *matrices]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW: decay as in Trainer, for scores and gates another rate and no decay, a step count a scalar of a growing Ω."""
        if self.optimizer is not None:
            return self.optimizer
        decayed = set(self.get_decay_parameter_names(self.model))
        masks = {id(parameter) for parameter in self.watch.masks}
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                groups.setdefault((id(parameter) in masks, name in decayed), []).append(parameter)
        rates = {True: self.mask_learning_rate or self.args.learning_rate, False: self.args.learning_rate}
        weight_decay = self.args.weight_decay
        described = [
            {"params": group, "lr": rates[of_masks], "weight_decay": weight_decay if decays and not of_masks else 0.0}
            for (of_masks, decays), group in groups.items()
        ]
        kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if self.grower is None:
            self.optimizer = kind(described, **settings)
        else:
            self.optimizer = ScalarAdamW(described, self.grower.growth, **settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None) -> torch.optim.lr_scheduler.LRScheduler:
        if self.share is not None and self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.share)
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.watch.clip(self.state.global_step + 1, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.watch.gradient_norm(self.state.global_step + 1) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        save_changing(self.accelerator.unwrap_model(self.model), Path(output_dir))
        if self.best is not None:
            self.best.save(Path(output_dir))

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self.watch.require_trained(self.state.global_step)
        super()._save_checkpoint(model, trial)
        wait()  # every process writes its random state
        if not helping():
            seal(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")
            keep_newest(Path(self.args.output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with torch.serialization.safe_globals(ARRAYS_OF_ANY_NUMPY):
            super()._load_rng_state(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_changing(self.accelerator.unwrap_model(model or self.model), Path(resume_from_checkpoint))
        if self.best is not None:
            self.best.load(Path(resume_from_checkpoint))


def without_dropout(model: nn.Module) -> None:
    """Set a model in training mode to eval mode, but for the changes of its weights."""
    model.eval()
    for module in model.modules():
        if isinstance(module, Change):
            module.train()


def train(
    model: nn.Module,
    dataset: TrainingRows,
    pad_id: int,
    schedule: Schedule,
    work: Path,
    on_step: Callable[[str], None] = lambda note: None,
    *,
    save_every: float | None = None,
    stops: Collection[int] = (),
    on_stop: Callable[[int], None] = lambda places: None,
    teacher: HiddenTeacher | None = None,
    best: KeepBest | None = None,
) -> list[dict]:
    """Train the parameters with `requires_grad`, in place; returns the logged losses ({"step", "loss"}).

    Uses the GPU if torch finds one. Deterministic on a CPU for one seed, thread count and number of processes. With several
    processes (torchrun) all call this with the same arguments; each computes its share of every batch, and all end with the
    same model.
    Every `save_every` seconds a checkpoint is written to `work`; a call that finds one there resumes from it. If Ω grows,
    `on_stop` is called with each of `stops` while exactly that many positions are chosen. With `best` (only where Ω does not
    grow and nothing is projected) the model gets the best parameters instead of the last.

    Raises UserError E406 when a gradient or a parameter is no longer finite, ValueError where nothing is trainable.
    """
    callbacks, work = [Report(on_step), Save(save_every)], Path(work)
    with divided_cores():
        told = _ignore if helping() else on_stop
        trainer = trainer_of(model, dataset, pad_id, schedule, work, callbacks, stops, told, teacher, best)
        if helping():  # for other rows, other masks of dropout
            torch.manual_seed(int(np.random.SeedSequence((schedule.seed, rank())).generate_state(1)[0]))
        checkpoint = agreed(lambda: str(newest(work) or ""))
        trainer.train(resume_from_checkpoint=checkpoint or None)
    trainer.watch.require_trained(trainer.state.global_step)
    # Trainer leaves the model on the GPU where there is one; everything after it compares and stores on the CPU
    model.cpu().eval()
    if best is not None:
        best.restore(model)
    settle(model)
    if trainer.grower is not None:
        del model.growth
    return _means([record["loss"] for record in trainer.state.log_history if "loss" in record])


def _ignore(places: int) -> None:
    """Instead of `on_stop` in a process that only helps."""


def settle(model: nn.Module) -> None:
    """Convert every change to its stored form, in place, dropping what only training needs."""
    settle_links(model)
    thaw(model)
    settle_inserts(model)
    settle_prototypes(model)


STEPS_OF_MEAN = 10
"""Steps whose losses are reported by one mean."""


def _means(losses: list[float]) -> list[dict]:
    """Mean loss of every STEPS_OF_MEAN steps. Trainer's own means restart after a resume; these do not."""
    blocks = ((start, losses[start : start + STEPS_OF_MEAN]) for start in range(0, len(losses), STEPS_OF_MEAN))
    return [{"step": start + len(block), "loss": round(float(np.mean(block)), 6)} for start, block in blocks]


def trainer_of(
    model: nn.Module,
    dataset: TrainingRows,
    pad_id: int,
    schedule: Schedule,
    work: Path,
    callbacks: Sequence[TrainerCallback] = (),
    stops: Collection[int] = (),
    on_stop: Callable[[int], None] = lambda places: None,
    teacher: HiddenTeacher | None = None,
    best: KeepBest | None = None,
    **overrides,
) -> TaskTrainer:
    """The Trainer of one training; `overrides` replace its TrainingArguments. Raises ValueError where nothing is trainable."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter has requires_grad: see compressor.methods.apply")
    steps, growing = schedule.steps(len(dataset)), hasattr(model, "growth")
    settings = _settings(schedule, work, steps, growing, overrides)
    grower, dense = grower_of(model, steps, stops, on_stop) if growing else None, dense_links(model)
    first, watch = fixed_after(dense, steps), Watch(model, schedule, steps, mask_parameters(model))
    method_callbacks = [Grow(grower, watch)] if grower else [DenseLinks(dense, watch, first)] if dense else []
    trainer = TaskTrainer(
        model=model,
        args=settings,
        train_dataset=dataset,
        data_collator=Collator(pad_id, rank(), launched()),
        callbacks=[*callbacks, *method_callbacks, *([best] if best is not None else [])],
        watch=watch,
        mask_learning_rate=schedule.mask_learning_rate,
        grower=grower,
        dense=dense,
        share=schedule.halves(first, steps) if gates_of(dense) else None,
        teacher=teacher,
        dropout=schedule.dropout,
        precision=schedule.precision,
        best=best,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _settings(schedule: Schedule, work: Path, steps: int, growing: bool, overrides: Mapping[str, Any]) -> TrainingArguments:
    """Trainer's arguments for a schedule of so many steps; where Ω grows, it does not clip."""
    arguments = {
        "output_dir": str(work),
        "num_train_epochs": schedule.epochs,
        "max_steps": -1 if schedule.max_steps is None else schedule.max_steps,
        "learning_rate": schedule.learning_rate,
        "per_device_train_batch_size": schedule.batch_size,
        "gradient_accumulation_steps": schedule.accumulate,
        "weight_decay": schedule.weight_decay,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0 if growing else CLIP,
        "seed": schedule.seed,
        "data_seed": schedule.seed,
        "train_sampling_strategy": "group_by_length",
        "save_strategy": "no",
        "save_total_limit": None,  # Trainer deletes by file times, by which the one just written may be the oldest
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "use_cpu": not torch.cuda.is_available(),
        "ddp_broadcast_buffers": False,  # every process computes the same
    }
    settings = TrainingArguments(**{**arguments, **overrides})
    settings.mixed_precision = "no"  # ACCELERATE_MIXED_PRECISION would change it; bf16 is the schedule's own
    # several GPUs take a process each (torchrun): Trainer's DataParallel would give each of them a whole batch
    settings._n_gpu = min(settings.n_gpu, 1)
    settings.warmup_steps = schedule.rising(steps)
    return settings
