"""Stage `tune`: train a small change of the frozen model (DSEE, LoRA), or the whole model as the baseline."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compressor.account import Plan, Trained
from compressor.cost import ModelShape, added_by, share
from compressor.methods import (
    GROUND,
    NAMES,
    OF_TRAINING,
    OPTIONS,
    Child,
    Combine,
    Method,
    On,
    Options,
    Placement,
    Shared,
    Strategy,
    Timing,
    ground_of,
    method,
)
from compressor.modules import Modules
from pipelines.stage import CountOrShare, Entry, Inputs, Problem, Progress, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from torch import nn

    from compressor.distillation import HiddenTeacher
    from compressor.training import Schedule
    from pipelines.loading import Data


DEFAULT_MODULES = ("query", "value")
"""What the papers tune, where neither the stage nor a select before it says otherwise."""


class GroundConfig(StageConfig):
    """What says in which tensors Ω lies: a select and the training after it share these keys."""

    on: On | None = Field(
        default=None, description="selective: Ω lies in the weights (default), or in the tensors of a lora or of adapters"
    )
    modules: Modules | None = None
    rank: int | None = Field(default=None, ge=1, description="rank of the low-rank part, default 16")
    alpha: float | None = Field(default=None, gt=0, description="scale alpha/rank of the low-rank part, default 2 x rank")
    bottleneck: int | None = Field(default=None, ge=1, description="inner width of adapters, default 64")
    placement: Placement | None = Field(
        default=None, description="adapters behind the FFN (pfeiffer, default) or attention too"
    )

    def ground(self, selected: Options | None = None) -> Options:
        """These keys as options; what is not said is as in `selected`, or the default."""
        given = {name: getattr(self, name) for name in ("on", *GROUND) if getattr(self, name) is not None}
        if self.rank and not self.alpha:
            given["alpha"] = 2.0 * self.rank
        return replace(selected or Options(), **given)


class TrainingConfig(GroundConfig):
    """What tune and recover share. `learning_rate` defaults to the method's own."""

    length: int | None = Field(default=None, ge=1, description="positions of a prefix, default 64")
    reparametrize: bool | None = Field(default=None, description="train a prefix through a network and drop that, default no")
    shared: Shared | None = Field(default=None, description="what propetl's prototype is, default adapter")
    keep: float | None = Field(default=None, gt=0, le=1, description="share of the prototype in each mask, default 0.5")
    mask_learning_rate: float | None = Field(
        default=None, gt=0, description="of propetl's scores (default 10 x learning_rate) or diff_pruning's gates (0.1)"
    )
    final_learning_rate: float | None = Field(
        default=None, gt=0, description="diff_pruning: behind the projection, default 10 x learning_rate"
    )
    strategy: Strategy | None = Field(default=None, description="selective: Ω from select (static), grown (increment), or anew")
    budget: CountOrShare | None = Field(
        default=None, description="|Ω| of increment, repeat and diff_pruning: a count, or a share of the weights"
    )
    checkpoints: tuple[CountOrShare, ...] | None = Field(
        default=None, description="increment: smaller budgets whose deltas are kept on the way, in the unit of budget"
    )
    schedule: Timing | None = Field(default=None, description="increment and repeat choose at most 32 times, or at every step")
    exp: float | None = Field(default=None, description="exponent of ID3's |g|/(|θ|+eps)^exp, default 0")
    eps: float | None = Field(default=None, gt=0, description="eps of ID3's heuristic, default 1")
    mixout: float | None = Field(default=None, ge=0, lt=1, description="probability of a pretrained column, default 0.9")
    penalty: float | None = Field(default=None, ge=0, description="diff_pruning: cost of an open gate, default 1.25e-7")
    child: Child | None = Field(default=None, description="child_tuning: gradients drawn (f, default), or Ω from select (d)")
    reserve: float | None = Field(default=None, gt=0, le=1, description="child f: share of the gradients heard, default 0.3")
    epochs: float = Field(default=2, gt=0)
    learning_rate: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=32, ge=1)

    def options(self, selected: Options | None, omega: dict | None, group: str) -> Options:
        """The method's options, defaults filled in; `selected` says where the select before it chose.

        A method that takes no places from it inherits its modules alone.
        """
        if selected and not method(self.method).takes_places(self):
            selected = Options(modules=selected.modules)
        own = (name for name in OPTIONS if name not in ("on", *GROUND, *OF_TRAINING))
        given = {name: getattr(self, name) for name in own if getattr(self, name) is not None}
        return replace(self.ground(selected), group=group, omega=omega, **given)


class TuneConfig(TrainingConfig):
    """Train a method's parameters and the task head. Where Ω lies is said in the select before it, if there is one."""

    method: Literal[NAMES] = "dsee"
    combine: Combine | None = Field(default=None, description="many tasks: how layer and task masks are joined, default or")
    temperature: float | None = Field(
        default=None, gt=0, description="many tasks: drawn by size^(1/temperature), 1 by size, large evenly; default 10"
    )

    def of_tasks(self, options: Options, count: int) -> Options:
        """The options where so many tasks share what the method adds."""
        return replace(options, tasks=count, combine=self.combine or options.combine)


def with_tasks(config: TuneConfig, many: bool) -> Iterable[Problem]:
    """Only some methods train many tasks together, and only there do some keys mean anything."""
    row = method(config.method)
    if many and not row.many_tasks:
        mend = (
            "Use propetl, or run it once for each task (`task` instead of `tasks`) on this base: `compress delta convert` "
            "makes a small delta file of each result, and compressor.load(base, delta=FILE) switches between them"
        )
        yield Problem("E117", f"method {row.name} trains one task, the pipeline has `tasks`", mend, ("method",))
    for key in () if many else ("combine", "temperature"):
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} means nothing to one task", "Remove the key, or list several under tasks", (key,))


def meaningless(config: TrainingConfig, keys: Iterable[str], name: str) -> Iterable[Problem]:
    """A fault for each of `keys` that was given although the method called `name` does not read it."""
    for key in keys:
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} means nothing to method {name}", "Remove the key, or name another method", (key,))


def method_problems(config: TrainingConfig, row: Method, omega: Entry | None) -> Iterable[Problem]:
    """Faults of a method's keys that need no model: shared by tune and recover."""
    yield from meaningless(config, (key for key in OPTIONS if key not in row.reads), row.name)
    if row.kind_key:
        kind = row.kind(config)
        yield from meaningless(config, row.unread(kind), f"{row.name} with {row.kind_key}: {kind}")
    wants, on = row.takes_places(config), on_of(config, row, omega)
    yield from meaningless(config, (key for key in row.reads if key not in row.reads_on(on)), f"{row.name} on {on}")
    if not wants and omega is not None:
        other = f"{row.kind_key}: {row.omega_kinds[0]}" if row.omega_kinds else "method: dsee or selective"
        what = f"{told(config, row)} does not use the places that '{omega.id}' chooses"
        yield Problem("E404", what, f"Use {other}, or drop the select")
    if row.needs_budget(config) and config.budget is None:
        mend = "Say how many places, e.g. budget: 0.005"
        yield Problem("E404", f"{told(config, row)} needs a budget", mend, (row.kind_key or "method",))
    if any(type(one) is not type(config.budget) or one >= config.budget for one in config.checkpoints or ()):
        mend = "Give smaller budgets in its unit: counts, or shares"
        yield Problem("E403", f"checkpoints lie below the budget {config.budget}", mend, ("checkpoints",))
    if wants and omega is not None:
        yield from disagreements(config, row, omega)


def disagreements(config: TrainingConfig, row: Method, omega: Entry) -> Iterable[Problem]:
    """Where a training stage and the select before it do not speak of the same tensors."""
    chosen = omega.config.ground()
    if "on" not in row.reads and chosen.on != "weights":
        what = f"{row.name} takes places in the weights, '{omega.id}' chooses them on {chosen.on}"
        yield Problem("E404", what, "Use method: selective, or on: weights in the select", ("method",))
        return
    missing = [name for name in chosen.modules if name not in (config.modules or chosen.modules)]
    if chosen.on == "weights" and missing:
        what = f"select chose places in {', '.join(missing)}, which is not tuned"
        yield Problem("E404", what, "Make the modules agree", ("modules",))
    for key in ("on", *(ground_of(chosen.on) if chosen.on != "weights" else ())):
        here, there = getattr(config, key), getattr(chosen, key)
        if here is not None and here != there:
            what = f"{key} is {_shown(here)} here and {_shown(there)} in '{omega.id}'"
            yield Problem("E404", what, "Say it in the select alone: this stage follows it", (key,))


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def on_of(config: TrainingConfig, row: Method, omega: Entry | None) -> On:
    """Whose tensors Ω lies in, for a stage behind the select `omega`."""
    if "on" not in row.reads:
        return "weights"
    return config.on or (omega.config.on if omega is not None and row.takes_places(config) else "weights")


def told(config: TrainingConfig, row: Method) -> str:
    """The method for messages, with its kind where the kinds differ in whether they use the places of a select."""
    return f"{row.name} with {row.kind_key} {row.kind(config)}" if row.omega_kinds else row.name


def merged_problems(name: str, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    """A merged checkpoint has no deltas left to choose by, to train or to cut."""
    if any(entry.name == "merge" for entry in earlier):
        yield Problem("E504", "the model is merged already", f"Put {name} before merge")


def check(config: TuneConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.name in ("tune", "prune", "recover") for entry in earlier):
        yield Problem("E405", "a pipeline tunes once, first", "Use recover to keep training")
    row, omega = method(config.method), next((entry for entry in reversed(earlier) if entry.name == "select"), None)
    if row.takes_places(config) and omega is None:
        what = f"{told(config, row)} needs places for its sparse part"
        yield Problem("E404", what, "Put a select before it, or use method: lora")
    yield from method_problems(config, row, omega)


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
    """Train what is trainable, measure quality on the validation rows, write the state; returns its metadata.

    `logits` (rows, classes) are a teacher's, of every training row; `teacher` is a live one.
    """
    from compressor.methods import trainable_counts
    from compressor.training import Rows, train
    from pipelines.loading import publish_model

    schedule = schedule_of(config, row, inputs.seed)
    trainable = trainable_counts(model)
    dataset = Rows(data.train.tokens, data.train.labels.tolist(), logits)
    with workspace.progress(f"training {trainable['body']:,} parameters", schedule.steps(len(dataset))) as bar:
        kept = workspace.unfinished / BUDGETS

        def keep(places: int) -> None:
            kept.mkdir(parents=True, exist_ok=True)
            write_delta(model, kept / f"{places}.safetensors", inputs, data)

        stops, work, teaching = stops_of(config, model), workspace.unfinished, {"teacher": teacher}
        losses = train(model, dataset, data.pad_id, schedule, work, stepping(bar), stops=stops, on_stop=keep, **teaching)
    published = publish_model(model, inputs, data, workspace)
    if stops:
        published["budgets"] = publish_budgets(stops, kept, inputs, data, workspace)
    return {**published, "method": row.name, "trainable": trainable, "formula": row.formula, "losses": losses}


def schedule_of(config: TrainingConfig, row: Method, seed: int) -> Schedule:
    """How long and how fast this stage trains, defaults filled in."""
    from compressor.training import Schedule

    rate = config.learning_rate or row.rate(config)
    return Schedule(
        epochs=config.epochs,
        learning_rate=rate,
        mask_learning_rate=config.mask_learning_rate or row.mask_learning_rate or 10 * rate,
        final_learning_rate=config.final_learning_rate or 10 * rate,
        batch_size=config.batch_size,
        weight_decay=0.01 if row.trains_base else 0.0,
        seed=seed,
    )


def stepping(bar: Progress) -> Callable[[str], None]:
    """What a training calls after every step."""

    def on_step(note: str) -> None:
        bar.note(note)
        bar.advance()

    return on_step


BUDGETS = "budgets"
"""Folder of the deltas at smaller budgets, named by their places."""


def stops_of(config: TrainingConfig, model: nn.Module) -> list[int]:
    """The checkpoints as numbers of places in the matrices that Ω grows in."""
    if not config.checkpoints:
        return []
    size = sum(matrix.original.numel() for matrix in model.growth.matrices)
    return [share(budget, size) for budget in config.checkpoints]


def write_delta(model: nn.Module, path: Path, inputs: Inputs, data: Data) -> None:
    """The model's changes and head as one delta file on the pipeline's base."""
    from compressor.storage.delta_file import write

    write(model, path, base=inputs.base.reference, base_sha256=inputs.base.sha256, label_names=data.label_names)


def publish_budgets(stops: list[int], kept: Path, inputs: Inputs, data: Data, workspace: Workspace) -> list[dict[str, Any]]:
    """Copy the deltas of the smaller budgets into the artifact and measure each (ID3: one run, budget against quality)."""
    from compressor import load
    from compressor.tasks.features import torch_forward
    from pipelines.loading import predict_rows, quality

    (workspace.folder / BUDGETS).mkdir()
    rows = []
    for places in sorted(stops):
        file = f"{BUDGETS}/{places}.safetensors"
        shutil.copyfile(kept / f"{places}.safetensors", workspace.folder / file)
        model = load(base=inputs.base.folder, delta=workspace.folder / file)
        logits = predict_rows(torch_forward(model), data.validation, data, workspace, f"validating {places:,} places")
        rows.append({"places": places, "file": file, "quality": quality(logits, data.validation.labels)})
    return rows


def settings_of(row: Method, options: Options, model: nn.Module) -> dict[str, Any]:
    """What a method was given, and the closed form of what it trains in this model, for an artifact's metadata.

    `modules`, `rank` and `places` say what the unmerged delta computes: values on Ω of a LoRA are part of its A and B.
    """
    from compressor.cost import shape_of

    shape = shape_of(model)
    places = sum(len(omega) for omega in (options.omega or {}).values()) if row.uses_omega else 0
    kept, reads = row.kept(shape, options) if row.kept else 0, row.reads_on(options.on)
    sizes = Counter((max(size), min(size)) for _, *size in shape.matrices(options.modules) if row.low_rank)
    return {
        **{key: getattr(options, key) for key in reads if hasattr(options, key)},
        **({"formula": f"{row.formula} = {kept:,}"} if kept else {}),
        "modules": list(options.modules) if "modules" in reads else [],
        "matrices": [[number, *size] for size, number in sizes.items()],
        "rank": options.rank if row.low_rank or options.on == "lora" else 0,
        "places": places or kept if options.on == "weights" else 0,
        "closed_form": row.count(shape, options, places),
    }


def load_options(config: TrainingConfig, inputs: Inputs, group: str) -> Options:
    """The options of a stage's method, with Ω of the nearest select (path -> int32 indices) where it takes its places."""
    from safetensors.torch import load_file

    artifact = inputs.nearest("omega")
    if artifact is None:
        return config.options(None, None, group)
    ground = artifact.metadata["ground"]
    selected = Options(**{**ground, "modules": tuple(ground["modules"])})
    wanted = method(config.method).takes_places(config)
    return config.options(selected, load_file(artifact.folder / "omega.safetensors") if wanted else None, group)


def found_model(inputs: Inputs, label_names: list[str]) -> nn.Module:
    """The model as a training stage finds it, a select before it too: the base with a fresh head, or tuned so far.

    What is drawn next follows from the seed: new changes start with equal bits wherever they are made on this model.
    """
    from compressor.models import build
    from pipelines.loading import load_model

    earlier = inputs.nearest("model")
    if earlier is None:
        return build(inputs.base.folder, label_names, inputs.seed)
    return load_model(earlier, inputs.base, inputs.seed)


def run(config: TuneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Build the model with its task head, attach the method's deltas, train, and write the state (of many: their files)."""
    from compressor.methods import apply
    from compressor.models import HEAD_ORIGINS
    from pipelines.loading import load_data

    if inputs.tasks:
        from pipelines.many_tasks import tune_tasks

        return tune_tasks(config, inputs, workspace)
    data = load_data(inputs)
    model = found_model(inputs, data.label_names)
    if model.head_origin != "fresh":
        workspace.say(HEAD_ORIGINS[model.head_origin])
    options = load_options(config, inputs, group="1")
    row = method(config.method)
    apply(model, row.name, options)
    metadata = train_and_save(model, config, inputs, workspace, data, row=row)
    return {**metadata, **settings_of(row, options, model), "head": model.head_origin}


def planned(config: TrainingConfig, name: str, plan: Plan) -> tuple[Trained, ModelShape]:
    """What a stage with this config and method would train at this point of the plan, and the shape it leaves.

    Raises UserError E302 and E407.
    """
    from compressor.methods import apply

    options = config.options(plan.places.ground if plan.places else None, None, group=str(len(plan.trainable) + 1))
    apply(plan.model, name, options)
    return Trained(name, options, plan.places), plan.shape.with_inserts(added_by(options.group, plan.model))


def plan(config: TuneConfig, plan: Plan) -> Plan:
    own, shape = planned(config, config.method, plan)
    if hasattr(plan.model, "tasks"):
        own = replace(own, options=config.of_tasks(own.options, len(plan.model.tasks.names)))
    return replace(plan, shape=shape, trained=(own,), trainable=(*plan.trainable, counted("tune", own, shape)))


def counted(stage: str, own: Trained, shape: ModelShape) -> tuple[str, int]:
    """A row of the plan: what the stage trains, and in its name how much of that is left, where that is less."""
    count, kept = own.count(shape), own.kept(shape)
    return (stage if kept == count else f"{stage}, {kept:,} kept", count)


STAGE = Stage(
    name="tune",
    summary="train a small change of the frozen model (see list methods), or everything (full)",
    config=TuneConfig,
    produces="model",
    accepts=("omega",),
    packages=("torch", "transformers", "accelerate", "tokenizers"),
    version=3,
    run=run,
    check=check,
    plan=plan,
    with_tasks=with_tasks,
)
