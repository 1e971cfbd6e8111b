"""The closed-form account of a training stage: what tune and recover would train, counted before anything runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from compressor.account import Plan, Trained
from compressor.cost import ModelShape, added_by, share
from compressor.deltas.burn_in import burn_in_fault, renewal_fault
from compressor.errors import UserError
from compressor.methods import (
    Method,
    Options,
    method,
    selective,
)
from pipelines.stages.generating_cost import decided_by_texts, work_of_texts
from pipelines.stages.training_config import TrainingConfig

if TYPE_CHECKING:
    from torch import nn

PASSES_OF_LABELS = 3.0
"""Most passes over the training rows of a control that learns their labels instead of texts: in as many steps as the texts
take it would overfit few rows, and be a weaker baseline."""

FEW = 0.25
"""Largest share of the rows that a teacher computes alone: instead of more it computes all, which serve other seeds, too."""

CHECKPOINTS = 3
"""Most checkpoints of a training at a time: the last two, and the one that is being written."""


def planned(config: TrainingConfig, name: str, plan: Plan) -> tuple[Trained, ModelShape]:
    """What a stage with this config and method would train at this point of the plan, and the resulting shape.

    Raises UserError E104 (a rank above that of every matrix), E302, E407, E408 and E413.
    """
    from compressor.methods import apply

    # which positions will be chosen is not known yet; how many is (`Trained.places`)
    options = config.options(plan.places.ground if plan.places else None, {}, group=str(len(plan.trainable) + 1))
    check_rank(method(name), options, plan.shape)
    check_steps(config, options, plan.train_rows)
    apply(plan.model, name, options)
    check_checkpoints(config, options, plan.shape)
    if method(name).takes_places(options) and options.on == "weights":
        attach_empty(plan.model, options)
    return Trained(name, options, plan.places, plan.shape), plan.shape.with_inserts(added_by(options.group, plan.model))


def attach_empty(model: nn.Module, options: Options) -> None:
    """Add a Sparse link of no entry to every tensor in which Ω may have some: a later stage sees what was trained."""
    from compressor.deltas.kinds.sparse import Sparse
    from compressor.methods.selective import ground

    for matrix in ground(model, options):
        matrix.attach(Sparse.start(matrix.original, matrix.original.new_empty(0), options.group))


def require_precision(config: TrainingConfig) -> None:
    """Raises UserError E904 for a precision that this machine would emulate, more slowly than fp32."""
    from compressor.training.mixed_precision import multiplies_bf16

    if config.precision == "bf16" and not multiplies_bf16():
        what = "precision: bf16 is slower than fp32 here: neither a GPU nor the processor multiplies in bf16"
        raise UserError("E904", what, "Remove the key, or run on a GPU from Ampere on, or a CPU with AMX or AVX-512 BF16")


def check_rank(row: Method, options: Options, shape: ModelShape) -> None:
    """Raises UserError E104 for a rank above the full rank of every matrix of the method's modules."""
    if not ((row.low_rank and row.rank_limited) or options.on == "lora"):
        return
    full = max((min(rows, columns) for _, rows, columns in shape.matrices(options.modules)), default=options.rank)
    if options.rank > full:
        what = f"rank {options.rank:,}, where the matrices have at most {full:,} rows and columns"
        raise UserError("E104", what, f"Use at most {full:,}; 4 to 64 are usual")


def check_steps(config: TrainingConfig, options: Options, rows: int | None) -> None:
    """Raises UserError E413 for a burn-in or a renewal, E408 for checkpoints of a growing Ω, for which a training on `rows`
    is too short."""
    if not (config.burn_in or config.renew or config.checkpoints):
        return
    # how many rows texts and their variants add is known only once they are drawn
    if config.steps is None and (rows is None or getattr(config, "unlabelled", False)):
        return
    from compressor.selection.growth import choice_steps
    from pipelines.stages.trainings import schedule_of

    steps = schedule_of(config, method(config.method), seed=0).steps(rows or 0)
    if fault := burn_in_fault(config.burn_in, steps) or renewal_fault(config.renew, config.burn_in or steps // 2):
        raise UserError("E413", *fault)
    sizes, times = len({*(config.checkpoints or ()), config.budget}), len(choice_steps(steps, options.schedule))
    if config.checkpoints and sizes > times:
        what = f"checkpoints and budget are {sizes} sizes of Ω, which grows in {times:,} of {steps:,} steps"
        raise UserError("E408", what, f"Drop some, or {'train longer' if times == steps else 'use schedule: exact'}")


def check_checkpoints(config: TrainingConfig, options: Options, shape: ModelShape) -> None:
    """Raises UserError E408 for checkpoints of no position, or of as many as the budget."""
    size = sum(selective.sizes(shape, options)) if config.checkpoints else 0
    for checkpoint in config.checkpoints or ():
        places, budget = share(checkpoint, size), share(options.budget, size)
        if not 0 < places < budget:
            what = f"checkpoint {checkpoint} is {places:,} of {size:,} positions, budget {options.budget} is {budget:,}"
            raise UserError("E408", what, "Drop that checkpoint, or give another one, or a larger budget")


def counted(stage: str, trained: Trained, shape: ModelShape) -> tuple[str, int]:
    """A row of the plan: the stage's trainable parameters, and in its name how many are kept, if fewer."""
    count, kept = trained.count(shape), trained.kept(shape)
    return (stage if kept == count else f"{stage}, {kept:,} kept", count)


def estimate(config: TrainingConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """Of a tune or a recover, its teacher, control and validation included: see `pipelines.check.estimate`."""
    shape, trained = plan.shape, plan.trainable[-1][1] + plan.shape.head
    trains_base = method(plan.trained[-1].method).trains_base
    learned, mean = _learned(config, rows)
    sequences = rows.get("sequences", 1)
    taken, backward = learned * config.passes(learned), (3 if trains_base else 2) * sequences
    evaluations, decided = config.evaluations(taken / learned, learned), decided_by_texts(rows)
    evaluated = rows["validation"] * (1 + evaluations) + rows.get("tests", 0)
    flops = backward * shape.flops(mean) * taken + evaluated * shape.flops(rows["mean"])
    texts = [work_of_texts(shape, rows, 1 + evaluations * decided, tests=1)]
    teacher = bool(getattr(config, "distill", False))
    of_teacher = rows.get("teacher", {"flops": plan.dense.flops(mean), "bytes": plan.dense.bytes})
    # its logits are stored for all runs, but not those over a vocabulary; with hidden states it computes each batch again
    stored = teacher and config.distill == "logits" and not plan.generates
    if teacher:
        computed = few_of_teacher(config, learned) or learned if stored else taken
        flops += computed * sequences * of_teacher["flops"]
    length = min(rows["longest"], plan.length)
    # the control, one after the other, is as large as the dense model
    control = plan.tuned if getattr(config, "control", False) and rows.get("control", True) else None
    if control:
        if learned > rows["train"] and "teacher" not in rows:
            taken = min(taken, PASSES_OF_LABELS * rows["train"])
        elif teacher and not stored:
            flops += taken * sequences * of_teacher["flops"]
        flops += backward * control.flops(mean) * taken + evaluated * control.flops(rows["mean"])
        texts.append(work_of_texts(control, rows, (1 + evaluations) * decided, tests=1))
    generating, waiting = map(sum, zip(*texts, strict=True))
    largest, batch = control or shape, config.batch_size * sequences
    return {
        "flops": flops + generating,
        "seconds": 3.0 + waiting,
        "memory": largest.bytes
        + (16 if config.keep_best else 12) * trained
        + batch * (saved_bytes(largest, length) + _logit_bytes(plan, length, teacher and config.distill != "hidden"))
        + teacher * of_teacher["bytes"],
        **_disk(config, shape, trained, trains_base, control),
    }


def _disk(
    config: TrainingConfig, shape: ModelShape, trained: int, trains_base: bool, control: ModelShape | None
) -> dict[str, int]:
    """Bytes that stay on disk, of a control a copy in the cache, too; and those of checkpoints until the stage is done, which
    hold `trained` parameters with both averages of the optimizer, and the best ones."""
    each = CHECKPOINTS * (16 if config.keep_best else 12)
    state = shape.bytes if trains_base else 8 * trained
    if control is None:
        return {"disk": state, "unfinished": each * trained}
    finished = control.bytes if trains_base else state
    of_control = trained + (control.parameters - shape.parameters if trains_base else 0)
    # the control's checkpoints are gone when those of the pruned model are written, beside the finished control
    return {"disk": state + 2 * finished, "unfinished": max(each * of_control, finished + each * trained)}


def _learned(config: TrainingConfig, rows: dict[str, Any]) -> tuple[int, int]:
    """Number of rows of a training, texts without labels and their variants included, and the tokens of a mean one."""
    texts = rows.get("texts", {"rows": 0, "mean": 0})
    most = math.inf if config.steps is None else config.steps * config.step_size
    count, given = min(texts["rows"], most), rows["train"] + texts["rows"]
    made = min(rows.get("augment", {"rows": 0})["rows"], most - count)
    learned = rows["train"] + count + made
    of_given = (rows["train"] * rows["mean"] + texts["rows"] * texts["mean"]) / given
    tokens = rows["train"] * rows["mean"] + count * texts["mean"] + made * of_given
    return learned, max(int(tokens / learned), 1)


def few_of_teacher(config: TrainingConfig, rows: int) -> int | None:
    """How many rows a training takes where they are few (FEW) of a teacher's `rows`, which then computes these alone. None
    where it takes more, and the teacher computes every row. Steps are counted as by `Schedule.steps`."""
    steps = math.ceil(math.ceil(rows / config.step_size) * config.epochs) if config.steps is None else config.steps
    taken = steps * config.step_size
    return taken if taken <= FEW * rows else None


def _logit_bytes(plan: Plan, length: int, distilled: bool) -> int:
    """Bytes of float32 scores of a vocabulary that a step holds for a row of `length` tokens. Measured: of a Llama with 49,152
    tokens it takes the logits 3.7 times, with a teacher's 5.8 times."""
    from compressor.models.normalized import normalized

    return (6 if distilled else 4) * 4 * length * normalized(plan.model.config).vocab_size if plan.generates else 0


def saved_bytes(shape: ModelShape, length: int) -> int:
    """Bytes of float32 activations that a row of `length` tokens keeps for the backward pass: per token about 10 vectors of the
    hidden size and 3 of the FFN's in every layer, and the attention weights twice."""
    layers = shape.layers
    return 4 * length * sum(10 * shape.hidden + 3 * layer.neurons + 2 * layer.heads * length for layer in layers)
