"""Config of the training stages and its faults: shared by select, tune and recover."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from compressor.deltas.burn_in import burn_in_fault, renewal_fault
from compressor.methods import (
    GROUND,
    NAMES,
    OF_TRAINING,
    OPTIONS,
    Child,
    Deselected,
    Masks,
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
from compressor.models.modules import REST, WideModules
from compressor.tasks import KINDS
from compressor.tasks.listing import listed
from compressor.tasks.task_kind import TaskKind, kind_of
from compressor.training.schedule import Precision
from pipelines.engine.stage import CountOrShare, Entry, Problem, StageConfig
from pipelines.file import limits

BUDGETS = "budgets"
"""Folder of the deltas at smaller budgets, named by their number of positions."""

DEFAULT_MODULES = ("query", "value")
"""Default modules, as in the papers, if neither the stage nor a select before it names others."""


class GroundConfig(StageConfig):
    """Keys that determine in which tensors Ω lies: shared by a select and the training after it."""

    on: On | None = Field(
        default=None, description="selective: Ω lies in the weights (default), or in the tensors of a lora or of adapters"
    )
    modules: WideModules | None = Field(
        default=None,
        description="linear layers that are trained, or all; for selective also everything, with embeddings, norms and biases; "
        "default those of the select before it, or query, value",
    )
    rank: int | None = Field(default=None, ge=1, le=limits.RANK, description="rank of the low-rank part, default 16")
    alpha: float | None = Field(
        default=None, gt=0, le=limits.SCALE, description="scale alpha/rank of the low-rank part, default 2 x rank"
    )
    bottleneck: int | None = Field(default=None, ge=1, le=limits.WIDTH, description="inner width of adapters, default 64")
    placement: Placement | None = Field(
        default=None,
        description="adapters behind the FFN (pfeiffer, default), attention too (houlsby), or as AdapterHub has them",
    )

    def ground(self, selected: Options | None = None) -> Options:
        """These keys as options; those not given are taken from `selected`, or the default. That of alpha follows a rank other
        than that of `selected`, whose alpha belongs to it."""
        inherited = selected or Options()
        options = {name: getattr(self, name) for name in ("on", *GROUND) if getattr(self, name) is not None}
        if self.rank and not self.alpha and self.rank != inherited.rank:
            options["alpha"] = 2.0 * self.rank
        return replace(inherited, **options)


class TrainingConfig(GroundConfig):
    """Config shared by tune and recover. `learning_rate` defaults to that of the method."""

    length: int | None = Field(default=None, ge=1, le=limits.TOKENS, description="positions of a prefix, default 64")
    reparametrize: bool | None = Field(
        default=None, description="train a prefix through a network that is dropped afterwards, default no"
    )
    shared: Shared | None = Field(default=None, description="what propetl's prototype is, default adapter")
    share: bool | None = Field(
        default=None, description="propetl: whether all blocks share one prototype (default), or each has tensors of its own"
    )
    masks: Masks | None = Field(default=None, description="propetl: masks are learned (default), or drawn once (random)")
    keep: float | None = Field(default=None, gt=0, le=1, description="share of the prototype in each mask, default 0.5")
    mask_learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=limits.RATE,
        description="of propetl's scores (default 10 x learning_rate) or diff_pruning's gates (0.1)",
    )
    final_learning_rate: float | None = Field(
        default=None, gt=0, le=limits.RATE, description="diff_pruning: behind the projection, default 10 x learning_rate"
    )
    strategy: Strategy | None = Field(
        default=None, description="selective: Ω from select (static), grown (increment), or chosen anew (repeat)"
    )
    budget: CountOrShare | None = Field(
        default=None, description="|Ω| of increment, repeat, diff_pruning and child pruning: a count, or a share of the weights"
    )
    checkpoints: tuple[CountOrShare, ...] | None = Field(
        default=None,
        max_length=limits.LIST,
        description="increment: smaller budgets whose deltas are kept on the way, in the unit of budget",
    )
    schedule: Timing | None = Field(default=None, description="increment and repeat choose at most 32 times, or at every step")
    exp: float | None = Field(
        default=None, ge=-limits.EXPONENT, le=limits.EXPONENT, description="exponent of ID3's |g|/(|θ|+eps)^exp, default 0"
    )
    eps: float | None = Field(default=None, gt=0, le=limits.SCALE, description="eps of ID3's heuristic, default 1")
    deselected: Deselected | None = Field(
        default=None,
        description="repeat: what is no longer chosen gets its pretrained value (reset, default), or keeps its own",
    )
    mixout: float | None = Field(default=None, ge=0, lt=1, description="probability of a pretrained column, default 0.9")
    penalty: float | None = Field(
        default=None, ge=0, le=limits.SCALE, description="diff_pruning: cost of an open gate, default 1.25e-7"
    )
    group_gates: bool | None = Field(default=None, description="diff_pruning: a gate for every matrix, too; default no")
    burn_in: int | None = Field(
        default=None,
        ge=1,
        le=limits.STEPS,
        description="diff_pruning, child pruning: steps after which positions are fixed, default half of the training",
    )
    renew: int | None = Field(
        default=None,
        ge=1,
        le=limits.STEPS,
        description="diff_pruning, child pruning: before that, steps between resets of all but the largest changes",
    )
    top: int | None = Field(default=None, ge=1, le=limits.COUNT, description="full: train only so many of the last blocks")
    child: Child | None = Field(
        default=None,
        description="child_tuning: gradients drawn (f, default), Ω from select (d), or the largest changes (pruning)",
    )
    reserve: float | None = Field(
        default=None, gt=0, le=1, description="child f: probability that a step keeps a gradient element, default 0.3"
    )
    epochs: float = Field(default=2, gt=0, le=limits.EPOCHS, description="passes over the training rows")
    steps: int | None = Field(default=None, ge=1, le=limits.STEPS, description="optimizer steps, instead of epochs")
    learning_rate: float | None = Field(
        default=None, gt=0, le=limits.RATE, description="learning rate of AdamW, default that of the method"
    )
    batch_size: int = Field(
        default=32, ge=1, le=limits.BATCH, description="rows of a batch, of all processes together under torchrun"
    )
    # without a default value, so that results of pipelines without these keys keep their fingerprints
    accumulate: int | None = Field(
        default=None, ge=1, le=limits.BATCHES, description="batches of an optimizer step, their gradients averaged, default 1"
    )
    precision: Precision | None = Field(
        default=None,
        description="of matrix products while training: fp32 (default), or bf16 on a machine that multiplies in it",
    )
    warmup: float | None = Field(
        default=None, ge=0, lt=1, description="share of the steps in which the learning rate rises from 0, default 0.06"
    )
    weight_decay: float | None = Field(
        default=None, ge=0, le=limits.DECAY, description="of AdamW, default 0.01 where all weights are trained, else 0"
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="classification, marked, generation, text2text: share of a label's probability that is spread over all "
        "classes, default 0",
    )
    keep_best: bool | None = Field(
        default=None, description="keep the parameters that are best on the validation rows, not the last ones; default no"
    )
    evaluate_every: int | None = Field(
        default=None, ge=1, le=limits.STEPS, description="keep_best: steps between evaluations, default those of an epoch"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=limits.STEPS,
        description="keep_best: training ends after so many evaluations without improvement",
    )
    dropout: bool | None = Field(
        default=None, description="the model's dropout while it is trained; default yes, but no where a recover has texts"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the paper's values of a method, as if they were written, unless one of them is."""
        if not isinstance(given, dict) or given.get("method") not in NAMES:
            return given
        row = method(given["method"])
        kind = given.get(row.kind_key) or getattr(Options, row.kind_key) if row.kind_key else None
        values = row.defaults.get(kind, {}) if kind is None or isinstance(kind, str) else {}
        return given if any(given.get(key) is not None for key in values) else {**given, **values}

    @property
    def uses_dropout(self) -> bool:
        """Whether the model's dropout is active in this training."""
        return self.dropout is not False

    @property
    def step_size(self) -> int:
        """Rows of an optimizer step."""
        return self.batch_size * (self.accumulate or 1)

    def passes(self, rows: int) -> float:
        """How often a training goes through its `rows`."""
        return self.epochs if self.steps is None else self.steps * self.step_size / rows

    def evaluations(self, passes: float, rows: int) -> int:
        """Most evaluations of the model during `passes` over its training `rows`."""
        if not self.keep_best:
            return 0
        return math.ceil(passes * (1 if self.evaluate_every is None else rows / (self.evaluate_every * self.step_size)))

    def options(self, selected: Options | None, omega: dict | None, group: str) -> Options:
        """The method's options, defaults filled in; `selected` are the options of the select before it.

        A method that does not use Ω inherits only its modules.
        """
        if selected and not method(self.method).takes_places(self):
            selected = Options(modules=selected.modules)
        names = (name for name in OPTIONS if name not in ("on", *GROUND, *OF_TRAINING))
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self.ground(selected), group=group, omega=omega, **options)


def rates_of(config: TrainingConfig, row: Method) -> dict[str, float]:
    """The learning rates of a training by method `row`, by key, defaults filled in."""
    rate = config.learning_rate or row.rate(config)
    return {
        "learning_rate": rate,
        "mask_learning_rate": config.mask_learning_rate or row.mask_learning_rate or 10 * rate,
        "final_learning_rate": config.final_learning_rate or 10 * rate,
    }


def method_of(config: TrainingConfig, before: str) -> Method:
    """The method by which a training trains; `before` is that of the training before, with which `same` continues."""
    return method(before if config.method == "same" else config.method)


def length_problems(config: TrainingConfig) -> Iterable[Problem]:
    """Faults of a training whose length is given twice, in evaluations that there are not, or shorter than its burn-in, or
    of a renewal that never comes."""
    for key in () if config.keep_best else ("evaluate_every", "patience"):
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} is not used without keep_best", "Remove the key, or add keep_best: true", (key,))
    if config.steps is not None and "epochs" in config.model_fields_set:
        yield Problem("E403", "steps and epochs exclude each other", "Keep one of them", ("steps",))
    if config.steps is not None and (fault := burn_in_fault(config.burn_in, config.steps)):
        yield Problem("E413", *fault, ("burn_in",))
    first = config.burn_in or (None if config.steps is None else config.steps // 2)
    if first is not None and (fault := renewal_fault(config.renew, first)):
        yield Problem("E413", *fault, ("renew",))


def kind_problems(config: TrainingConfig, kinds: Iterable[str]) -> Iterable[Problem]:
    """Fault of label smoothing where a task's labels are no classes of its rows."""
    yield from key_problems(config, "label_smoothing", lambda kind: kind.smooths, kinds)


def key_problems(config: TrainingConfig, key: str, able: Callable[[TaskKind], bool], kinds: Iterable[str]) -> Iterable[Problem]:
    """Fault of a key that was given although a task's kind does not use it; `able` tells the kinds that do."""
    unable = [kind for kind in kinds if not able(kind_of(kind))]
    if getattr(config, key) is None or not unable:
        return
    names = listed([name for name in KINDS if able(kind_of(name))])
    yield Problem("E403", f"{key} is not used by a task of kind {unable[0]}", f"Remove the key: it is for {names}", (key,))


def meaningless(config: TrainingConfig, keys: Iterable[str], name: str) -> Iterable[Problem]:
    """A fault for each of `keys` that was given although method `name` does not use it."""
    for key in keys:
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} is not used by method {name}", "Remove the key, or name another method", (key,))


def method_problems(config: TrainingConfig, row: Method, omega: Entry | None) -> Iterable[Problem]:
    """Faults in a method's keys that can be found without a model: shared by tune and recover."""
    yield from meaningless(config, (key for key in OPTIONS if key not in row.reads), row.name)
    if row.kind_key:
        kind = row.kind(config)
        yield from meaningless(config, row.unread(kind), f"{row.name} with {row.kind_key}: {kind}")
    for key, why in row.unused(config).items():
        yield from meaningless(config, (key,), f"{row.name} with {why}")
    wants, on = row.takes_places(config), on_of(config, row, omega)
    yield from meaningless(config, (key for key in row.reads if key not in row.reads_on(on)), f"{row.name} on {on}")
    if not wants and omega is not None:
        other = f"{row.kind_key}: {row.omega_kinds[0]}" if row.omega_kinds else f"method: {methods_with('uses_omega')}"
        what = f"{method_in_words(config, row)} does not use the positions that '{omega.id}' chooses"
        yield Problem("E404", what, f"Use {other}, or drop the select")
    if row.needs_budget(config) and config.keep_best:
        what = f"{method_in_words(config, row)} has its positions only at the end of the training: keep_best is not used by it"
        yield Problem("E403", what, "Remove the key, or use a method that chooses no positions while it trains", ("keep_best",))
    if row.needs_budget(config) and config.budget is None:
        fix = "Say how many positions, e.g. budget: 0.005"
        yield Problem("E404", f"{method_in_words(config, row)} needs a budget", fix, (row.kind_key or "method",))
    if any(
        type(checkpoint) is not type(config.budget) or checkpoint >= config.budget for checkpoint in config.checkpoints or ()
    ):
        fix = "Give smaller budgets in its unit: counts, or shares"
        yield Problem("E403", f"checkpoints lie below the budget {config.budget}", fix, ("checkpoints",))
    if wants and omega is not None:
        yield from disagreements(config, row, omega)


def disagreements(config: TrainingConfig, row: Method, omega: Entry) -> Iterable[Problem]:
    """Faults where a training stage and the select before it refer to different tensors."""
    chosen = omega.config.ground()
    if "on" not in row.reads and chosen.on != "weights":
        what = f"{row.name} takes positions in the weights, '{omega.id}' chooses them on {chosen.on}"
        yield Problem("E404", what, "Use method: selective, or on: weights in the select", ("method",))
        return
    missing = [name for name in chosen.modules if name not in (config.modules or chosen.modules)]
    if chosen.on == "weights" and missing:
        what = f"select chose positions in {'everything' if REST in missing else ', '.join(missing)}, which is not tuned"
        yield Problem("E404", what, "Use the same modules in both", ("modules",))
    for key in ("on", *(ground_of(chosen.on) if chosen.on != "weights" else ())):
        value, selected = getattr(config, key), getattr(chosen, key)
        if value is not None and value != selected:
            what = f"{key} is {_shown(value)} here and {_shown(selected)} in '{omega.id}'"
            yield Problem("E404", what, "Set it in the select only: this stage takes it from there", (key,))


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def methods_with(trait: str) -> str:
    """The methods with this trait of their rows, in words: 'dsee or selective or child_tuning'."""
    return " or ".join(name for name in NAMES if getattr(method(name), trait))


def last_training(earlier: tuple[Entry, ...]) -> Entry | None:
    """The last training that has a method of its own: not one that goes on with `same`."""
    return next((entry for entry in reversed(earlier) if entry.row.trains and entry.config.method != "same"), None)


def trains_base(config: TrainingConfig) -> bool:
    """Whether a training's own method trains the base's weights; `same` has none."""
    return config.method != "same" and method(config.method).trains_base


def on_of(config: TrainingConfig, row: Method, omega: Entry | None) -> On:
    """The kind of tensors in which Ω lies, for a stage after the select `omega`."""
    if "on" not in row.reads:
        return "weights"
    return config.on or (omega.config.on if omega is not None and row.takes_places(config) else "weights")


def method_in_words(config: TrainingConfig, row: Method) -> str:
    """The method's name for messages, with its variant if the variants differ in whether they use a select's Ω."""
    return f"{row.name} with {row.kind_key} {row.kind(config)}" if row.omega_kinds else row.name


def merged_problems(name: str, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    """Fault for a stage after merge: no deltas are left to select by, train or prune."""
    if any(entry.row.merges for entry in earlier):
        yield Problem("E504", "the model is merged already", f"Put {name} before merge")
