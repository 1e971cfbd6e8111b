"""Stage `tune`: train a small change of the frozen model (DSEE, LoRA), or the whole model as the baseline."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictFloat, StrictInt

from compressor.cost import Places, Plan, Trained
from compressor.methods import NAMES, OPTIONS, Child, Method, Options, Placement, Shared, Strategy, Timing, method
from compressor.modules import Modules
from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import nn

    from pipelines.loading import Data


def _positive(value: int | float) -> int | float:
    if value <= 0 or (isinstance(value, float) and value >= 1):
        raise ValueError("a share lies in (0, 1); a count is a whole number of at least 1")
    return value


Budget = Annotated[StrictInt | StrictFloat, AfterValidator(_positive)]

DEFAULT_MODULES = ("query", "value")
"""What the papers tune, where neither the stage nor a select before it says otherwise."""


class TrainingConfig(StageConfig):
    """What tune and recover share. `learning_rate` defaults to the method's own."""

    modules: Modules | None = None
    rank: int | None = Field(default=None, ge=1, description="rank of the low-rank part, default 16")
    alpha: float | None = Field(default=None, gt=0, description="scale alpha/rank of the low-rank part, default 2 x rank")
    bottleneck: int | None = Field(default=None, ge=1, description="inner width of adapters, default 64")
    placement: Placement | None = Field(
        default=None, description="adapters behind the FFN (pfeiffer, default) or attention too"
    )
    length: int | None = Field(default=None, ge=1, description="positions of a prefix, default 64")
    shared: Shared | None = Field(default=None, description="what propetl's prototype is, default adapter")
    keep: float | None = Field(default=None, gt=0, le=1, description="share of the prototype in each mask, default 0.5")
    mask_learning_rate: float | None = Field(
        default=None, gt=0, description="of propetl's scores (default 10 x learning_rate) or diff_pruning's gates (0.1)"
    )
    final_learning_rate: float | None = Field(
        default=None, gt=0, description="diff_pruning: behind the projection, default 10 x learning_rate"
    )
    strategy: Strategy | None = Field(default=None, description="selective: Ω from select (static), grown (increment), or anew")
    budget: Budget | None = Field(
        default=None, description="|Ω| of increment, repeat and diff_pruning: a count, or a share of the weights"
    )
    checkpoints: tuple[Budget, ...] | None = Field(
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

    def options(self, modules: tuple[str, ...], omega: dict | None, group: str) -> Options:
        """The method's options, defaults filled in."""
        own = {one.name for one in fields(Options)} - {"modules", "alpha", "group", "omega"}
        given = {name: getattr(self, name) for name in own if getattr(self, name) is not None}
        alpha = self.alpha or 2.0 * (self.rank or Options.rank)
        return Options(modules=modules, alpha=alpha, group=group, omega=omega, **given)


class TuneConfig(TrainingConfig):
    """Train a method's parameters and the task head. `modules` defaults to those of the select before it."""

    method: Literal[NAMES] = "dsee"


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
    wants = row.takes_places(config)
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
    if wants and omega is not None and config.modules is not None:
        missing = [name for name in omega.config.modules if name not in config.modules]
        if missing:
            what = f"select chose places in {', '.join(missing)}, which is not tuned"
            yield Problem("E404", what, "Make the modules agree", ("modules",))


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
    teacher: np.ndarray | None = None,
) -> dict[str, Any]:
    """Train what is trainable, measure quality on the validation rows, write the state; returns its metadata."""
    from compressor.methods import trainable_counts
    from compressor.training import Rows, Schedule, train
    from pipelines.loading import publish_model

    rate = config.learning_rate or row.learning_rate
    schedule = Schedule(
        epochs=config.epochs,
        learning_rate=rate,
        mask_learning_rate=config.mask_learning_rate or row.mask_learning_rate or 10 * rate,
        final_learning_rate=config.final_learning_rate or 10 * rate,
        batch_size=config.batch_size,
        weight_decay=0.01 if row.trains_base else 0.0,
        seed=inputs.seed,
    )
    trainable = trainable_counts(model)
    dataset = Rows(data.train.tokens, data.train.labels.tolist(), teacher)
    with workspace.progress(f"training {trainable['body']:,} parameters", schedule.steps(len(dataset))) as bar:

        def on_step(note: str) -> None:
            bar.note(note)
            bar.advance()

        kept = workspace.unfinished / BUDGETS

        def keep(places: int) -> None:
            kept.mkdir(parents=True, exist_ok=True)
            write_delta(model, kept / f"{places}.safetensors", inputs, data)

        stops = stops_of(config, model)
        losses = train(model, dataset, data.pad_id, schedule, workspace.unfinished, on_step, stops=stops, on_stop=keep)
    published = publish_model(model, inputs, data, workspace)
    if stops:
        published["budgets"] = publish_budgets(stops, kept, inputs, data, workspace)
    return {**published, "method": row.name, "trainable": trainable, "formula": row.formula, "losses": losses}


BUDGETS = "budgets"
"""Folder of the deltas at smaller budgets, named by their places."""


def stops_of(config: TrainingConfig, model: nn.Module) -> list[int]:
    """The checkpoints as numbers of places in the matrices that Ω grows in."""
    if not config.checkpoints:
        return []
    matrices = model.growth.plan[0]
    size = sum(matrix.original.numel() for matrix in matrices)
    return [Places.of_budget((), budget).of(size) for budget in config.checkpoints]


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
    """What a method was given, and the closed form of what it trains in this model, for an artifact's metadata."""
    from compressor.cost import shape_of

    shape = shape_of(model)
    places = sum(len(omega) for omega in (options.omega or {}).values()) if row.uses_omega else 0
    kept = row.kept(shape, options) if row.kept else 0
    given = {key: getattr(options, key) for key in row.reads if hasattr(options, key)}
    return {
        **given,
        **({"formula": f"{row.formula} = {kept:,}"} if kept else {}),
        "modules": list(options.modules) if "modules" in row.reads else [],
        "rank": options.rank if row.low_rank else 0,
        "places": places or kept,
        "closed_form": row.count(shape, options, places),
    }


def modules_of(config: TrainingConfig, inputs: Inputs) -> tuple[str, ...]:
    """The config's own modules, or those of the nearest select, or the papers' query and value."""
    selected = inputs.nearest("omega")
    return config.modules or (tuple(selected.metadata["modules"]) if selected else DEFAULT_MODULES)


def load_omega(inputs: Inputs) -> dict | None:
    """Ω of the nearest select, path -> int32 indices; None without one."""
    from safetensors.torch import load_file

    artifact = inputs.nearest("omega")
    return None if artifact is None else load_file(artifact.folder / "omega.safetensors")


def run(config: TuneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Build the model with a fresh task head, attach the method's deltas, train, and write the state."""
    from compressor.methods import apply
    from compressor.models import build
    from pipelines.loading import load_data

    data = load_data(inputs)
    model = build(inputs.base.folder, data.label_names, inputs.seed)
    row = method(config.method)
    options = config.options(modules_of(config, inputs), load_omega(inputs), group="1")
    apply(model, row.name, options)
    metadata = train_and_save(model, config, inputs, workspace, data, row=row)
    return {**metadata, **settings_of(row, options, model)}


def planned(config: TrainingConfig, name: str, plan: Plan) -> Trained:
    """What a stage with this config and method would train at this point of the plan. Raises UserError E302 and E407."""
    from compressor.methods import apply

    modules = config.modules or (plan.places.modules if plan.places else DEFAULT_MODULES)
    options = config.options(modules, None, "plan")
    apply(plan.model, name, options)
    return Trained(name, options, plan.places)


def plan(config: TuneConfig, plan: Plan) -> Plan:
    own = planned(config, config.method, plan)
    return replace(plan, trained=(own,), trainable=(*plan.trainable, counted("tune", own, plan)))


def counted(stage: str, own: Trained, plan: Plan) -> tuple[str, int]:
    """A row of the plan: what the stage trains, and in its name how much of that is left, where that is less."""
    count, kept = own.count(plan.shape), own.kept(plan.shape)
    return (stage if kept == count else f"{stage}, {kept:,} kept", count)


STAGE = Stage(
    name="tune",
    summary="train a small change of the frozen model (see list methods), or everything (full)",
    config=TuneConfig,
    produces="model",
    accepts=("omega",),
    packages=("torch", "transformers", "accelerate", "tokenizers"),
    version=2,
    run=run,
    check=check,
    plan=plan,
)
