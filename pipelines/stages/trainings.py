"""Running a training: from a config and a model to the state that a stage publishes. Shared by tune and recover."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

from compressor import load
from compressor.compression import compression_of
from compressor.cost import shape_of, share
from compressor.methods import (
    Method,
    Options,
    method,
    trainable_counts,
)
from compressor.models.anatomy import modules_of
from compressor.models.build import build
from compressor.selection.allocation import ALLOCATION
from compressor.storage.delta_file import write
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data
from compressor.tasks.features import metric_inputs_of, torch_forward
from compressor.tasks.predictions import by_row
from compressor.tasks.reading import TaskData
from compressor.tasks.task_kind import kind_of
from compressor.training.distillation import HiddenTeacher
from compressor.training.keep_best import KeepBest
from compressor.training.processes import helping, launched
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from compressor.training.training_rows import TrainingRows
from compressor.training.unfinished import CHANGING, is_complete, newest, seal
from pipelines.engine.stage import Inputs, Progress, Workspace
from pipelines.stages.generated_texts import main_score, with_texts
from pipelines.stages.loading import load_model, publish_model, quality_of, recorded, score_tests
from pipelines.stages.training_config import BUDGETS, TrainingConfig, rates_of
from pipelines.stages.training_verdicts import verdicts

DELTA = "delta.safetensors"
"""In the folder of a smaller budget of an unfinished training."""


def train_and_save(
    model: nn.Module,
    config: TrainingConfig,
    inputs: Inputs,
    workspace: Workspace,
    data: Data,
    *,
    row: Method,
    logits: np.ndarray | None = None,
    teacher: HiddenTeacher | None = None,
) -> dict[str, Any]:
    """Train the trainable parameters, measure quality on the validation rows, write the state; returns its metadata.

    A process that helps another one to train does only that.
    `logits` (predictions, outputs) are a teacher's for every training row; `teacher` is a model in memory.
    """
    trainable, stops, kept = trainable_counts(model), stops_of(config, model), workspace.unfinished / BUDGETS
    growth = getattr(model, "growth", None)

    def keep(places: int) -> None:
        folder = kept / str(places)
        folder.mkdir(parents=True, exist_ok=True)
        write_delta(model, folder / DELTA, inputs, data)
        seal(folder)

    if not helping():
        start_anew_without(kept, stops, workspace.unfinished)
    options = {"row": row, "logits": logits, "teacher": teacher, "on_stop": keep}
    trained = train_model(model, config, inputs, data, workspace, workspace.unfinished, **options)
    if helping():
        return {}
    if growth is not None:
        (workspace.folder / ALLOCATION).write_text(json.dumps(growth.allocation) + "\n", encoding="utf-8")
    published = with_texts(publish_model(model, inputs, data, workspace), model, inputs, data, workspace)
    published |= score_tests(model, inputs, data, workspace)
    constant = data.kind.constant(data.validation.labels.tolist())
    published |= {} if constant is None else {"constant": constant}
    for verdict in verdicts(data.kind, published):
        workspace.say(verdict)
    if stops:
        published["budgets"] = publish_budgets(stops, kept, inputs, data, workspace)
    return {**published, "method": row.name, "trainable": trainable, "formula": row.formula, **trained}


def train_model(
    model: nn.Module,
    config: TrainingConfig,
    inputs: Inputs,
    data: Data,
    workspace: Workspace,
    work: Path,
    *,
    row: Method,
    logits: np.ndarray | None = None,
    teacher: HiddenTeacher | None = None,
    on_stop: Callable[[int], None] = lambda places: None,
    what: str = "",
) -> dict[str, Any]:
    """Train the trainable parameters, in place, with checkpoints in `work`; returns `losses`, the `precision` if it is not fp32
    and, with `keep_best`, the `evaluations` and the `kept_step`. Shows a bar, which says `what` is trained. `on_stop` is called
    at each of the config's checkpoints of a growing Ω."""
    schedule = schedule_of(config, row, inputs.seed)
    taught = None if logits is None else by_row(logits, data.train.labels)
    dataset = rows_of(config, data, taught)
    every = config.evaluate_every or schedule.epoch_steps(len(dataset))
    best = keep_best(inputs, data, every, config.patience) if config.keep_best else None
    title = f"training {what}{trainable_counts(model)['body']:,} parameters{together()}"
    with workspace.progress(title, schedule.steps(len(dataset))) as bar:
        inputs.require_unchanged()
        options = {"stops": stops_of(config, model), "on_stop": on_stop, "teacher": teacher, "best": best}
        losses = train(model, dataset, data.pad_id, schedule, work, stepping(bar), **options)
    trained = {"losses": losses, **rounded_in(config)}
    if best is None:
        return trained
    kept = best.evaluations[best.best]["step"]
    chosen = f"the best of {len(best.evaluations)} evaluations on the validation rows"
    alone = "the last, and the only one that was evaluated (evaluate_every): nothing was chosen"
    workspace.say(f"{what}step {kept:,} kept: {chosen if len(best.evaluations) > 1 else alone}")
    return {**trained, "evaluations": best.evaluations, "kept_step": kept}


def rounded_in(config: TrainingConfig) -> dict[str, Any]:
    """The precision of a training's matrix products for its metadata, where it is not fp32."""
    return {"precision": config.precision} if config.precision not in (None, "fp32") else {}


def together() -> str:
    """' in 2 processes', '' in one."""
    return f" in {launched()} processes" if launched() > 1 else ""


def keep_best(inputs: Inputs, data: Data, every: int, patience: int | None) -> KeepBest:
    """The keeper of the parameters that are best by the main metric on the validation rows, in its own direction."""
    metric = data.kind.metric
    measure = main_score(inputs, data) if metric.of_texts else quality_on_validation(data)
    return KeepBest(measure, every, patience, falls=metric.falls)


def quality_on_validation(data: Data) -> Callable[[nn.Module], float]:
    """The measure of a model, in training or not: its main metric, of outputs, on the validation rows."""
    rows = data.validation

    def measure(model: nn.Module) -> float:
        options = {"batch_size": data.batch_size}
        arrays = metric_inputs_of(
            torch_forward(model), rows.tokens, data.pad_id, rows.labels, rows.kind.finite_inputs, **options
        )
        return rows.kind.metric.value(*arrays)

    return measure


def rows_of(config: TrainingConfig, data: Data, teacher: Sequence[np.ndarray] | None = None) -> TrainingRows:
    """The training rows with the loss of their kind, and the teacher's outputs for each."""
    kind = data.kind.with_smoothing(config.label_smoothing) if config.label_smoothing else data.kind
    # as an array: a list of lists takes five times the memory, and labels of texts are as wide as the longest
    return TrainingRows(data.train.tokens, data.train.labels, teacher, kind)


def schedule_of(config: TrainingConfig, row: Method, seed: int) -> Schedule:
    """Training length and learning rate of this stage, defaults filled in."""
    decay = 0.01 if row.trains_base else 0.0
    return Schedule(
        epochs=config.epochs,
        **rates_of(config, row),
        batch_size=config.batch_size,
        accumulate=config.accumulate or 1,
        warmup=Schedule.warmup if config.warmup is None else config.warmup,
        weight_decay=decay if config.weight_decay is None else config.weight_decay,
        seed=seed,
        max_steps=config.steps,
        dropout=config.uses_dropout,
        precision=config.precision or "fp32",
    )


def stepping(bar: Progress) -> Callable[[str], None]:
    """The callback of a training after every step."""

    def on_step(note: str) -> None:
        bar.note(note)
        bar.advance()

    return on_step


def stops_of(config: TrainingConfig, model: nn.Module) -> list[int]:
    """The checkpoints as numbers of entries of the matrices that Ω grows in."""
    if not config.checkpoints:
        return []
    size = sum(matrix.original.numel() for matrix in model.growth.matrices)
    return [share(budget, size) for budget in config.checkpoints]


def write_delta(model: nn.Module, path: Path, inputs: Inputs, data: Data) -> None:
    """Write the model's changes and head as one delta file on the pipeline's base."""
    write(model, path, **recorded(inputs, data))


def start_anew_without(kept: Path, stops: list[int], work: Path) -> None:
    """Remove the checkpoints of an unfinished training whose delta of a smaller budget is gone or damaged in `kept`: it is
    written before Ω grows beyond that, and not again."""
    checkpoint = newest(work) if stops else None
    if checkpoint is None:
        return
    chosen = load_file(checkpoint / CHANGING)["growth.count"]
    if not all(is_complete(kept / str(places)) for places in stops if places < chosen):
        shutil.rmtree(work)


def publish_budgets(stops: list[int], kept: Path, inputs: Inputs, data: Data, workspace: Workspace) -> list[dict[str, Any]]:
    """Copy the deltas of the smaller budgets into the artifact and measure each (ID3: one run, budget against quality)."""
    (workspace.folder / BUDGETS).mkdir()
    rows = []
    for places in sorted(stops):
        file = f"{BUDGETS}/{places}.safetensors"
        shutil.copyfile(kept / str(places) / DELTA, workspace.folder / file)
        model = load(base=inputs.base.folder, delta=workspace.folder / file)
        quality = quality_of(model, data.validation, inputs, data, workspace, f"validating {places:,} places")
        rows.append({"places": places, "file": file, "quality": quality})
    return rows


def settings_of(row: Method, options: Options, model: nn.Module) -> dict[str, Any]:
    """The options of a method, and the closed form of its trainable parameters in this model, for an artifact's metadata.

    `modules`, `rank` and `places` describe the unmerged delta's computation: values on Ω of a LoRA are part of its A and B.
    """
    shape = shape_of(model)
    places = sum(len(omega) for omega in (options.omega or {}).values()) if row.uses_omega else 0
    kept, reads = row.kept(shape, options) if row.kept else 0, row.reads_of(options, options.on)
    sizes = Counter((max(size), min(size)) for _, *size in shape.matrices(options.modules) if row.low_rank)
    return {
        **{key: getattr(options, key) for key in reads if hasattr(options, key)},
        **({"formula": f"{row.formula} = {kept:,}"} if kept else {}),
        "modules": modules_of(model, options.modules) if "modules" in reads else [],
        "matrices": [[number, *size] for size, number in sizes.items()],
        "rank": options.rank if row.low_rank or "lora" in (options.on, row.kind(options)) else 0,
        "places": places or kept if options.on == "weights" else 0,
        "closed_form": row.count(shape, options, places),
    }


def load_options(config: TrainingConfig, inputs: Inputs, group: str) -> Options:
    """The options of a stage's method, with Ω of the nearest select (path -> int32 indices) if it uses one."""
    artifact = inputs.nearest("omega")
    if artifact is None:
        return config.options(None, None, group)
    ground = artifact.metadata["ground"]
    selected = Options(**{**ground, "modules": tuple(ground["modules"])})
    takes_places = method(config.method).takes_places(config)
    return config.options(selected, load_file(artifact.folder / "omega.safetensors") if takes_places else None, group)


def starting_model(inputs: Inputs, data: Data | TaskData) -> nn.Module:
    """The model at the start of a training stage or of a select before it: the base with a new head, or tuned so far.

    Random numbers then follow from the seed: new changes start with equal bits in every stage.
    """
    earlier = inputs.nearest("model")
    if earlier is None:
        auto_class = kind_of(inputs.task.kind).auto_class
        return with_start(build(inputs.base.folder, data.label_names, inputs.seed, auto_class), inputs.task, data)
    return load_model(earlier, inputs.base, inputs.seed)


def with_start(model: nn.Module, task: TaskConfig, data: Data | TaskData) -> nn.Module:
    """The model with its head initialized for the task's kind, unless the base came with a head for this task."""
    if compression_of(model).head_origin != "kept":
        # a select tokenizes only the rows that it draws
        kind_of(task.kind).start(model, (data.training if isinstance(data, Data) else data.train).labels)
    return model
