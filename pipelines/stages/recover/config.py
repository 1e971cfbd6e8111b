"""Stage `recover`: train the pruned model, by default with the dense model as teacher."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from compressor.account import Plan
from compressor.methods import NAMES, OPTIONS, On, method
from compressor.tasks import TaskConfig
from pipelines.engine.stage import Entry, Models, NamedInputs, Problem, Stage, entries_after, one_task_only
from pipelines.file import limits
from pipelines.stages.prune.prune_weights import filled_problems
from pipelines.stages.prune.uneven_layers import check_sizes_alike
from pipelines.stages.training_config import (
    TrainingConfig,
    key_problems,
    kind_problems,
    last_training,
    length_problems,
    meaningless,
    merged_problems,
    method_in_words,
    method_of,
    method_problems,
    methods_with,
    on_of,
    rates_of,
    trains_base,
)
from pipelines.stages.training_plan import counted, estimate, planned, require_precision

DENSE = "dense"
"""The word for the teacher that needs no path."""
CONTROL = "control"
"""Folder of the control in the artifact, and of its unfinished training in the stage's work folder."""


class RecoverConfig(TrainingConfig):
    """`same` continues with the existing deltas; another method adds new ones and freezes those."""

    method: Literal["same", *NAMES] = Field(
        default="same", description="same: continue with tune's parameters; another method adds its own and freezes those"
    )
    epochs: float = Field(default=1, gt=0, le=limits.EPOCHS, description="passes over the training rows")
    distill: Literal[False, "logits", "hidden", "both"] = Field(
        default="logits", description="distil from the dense model: logits (true), hidden states, both, or nothing (false)"
    )
    hidden_weight: float | None = Field(
        default=None, gt=0, le=limits.SCALE, description="weight of the distance between hidden states in the loss, default 1"
    )

    texts: Path | None = Field(
        default=None, description="a file of texts without labels, that the model learns from the teacher's outputs"
    )
    augment: int | None = Field(
        default=None,
        ge=1,
        le=limits.VARIANTS,
        description="random variants of every text and training row, learned from the teacher's outputs, too; default none",
    )
    teacher: str | None = Field(
        default=None,
        min_length=1,
        max_length=limits.REFERENCE,
        description="a fine-tuned model for the same labels (as model); default dense: the dense model of this pipeline",
    )
    embeddings: bool | None = Field(
        default=None, description="full: train the token embeddings, too; default yes, but no with texts or augment"
    )
    control: bool = Field(
        default=True, description="also train the unpruned model in the same way, as the baseline of quality in the report"
    )

    @field_validator("distill", mode="before")
    @classmethod
    def _true_is_logits(cls, value: Any) -> Any:
        return "logits" if value is True else value

    @field_validator("teacher")
    @classmethod
    def _dense_is_the_default(cls, value: str | None) -> str | None:
        return None if value == DENSE else value

    @property
    def unlabelled(self) -> bool:
        """Whether the teacher's outputs alone are learned, on texts without labels."""
        return self.texts is not None or self.augment is not None

    @property
    def uses_dropout(self) -> bool:
        return not self.unlabelled if self.dropout is None else self.dropout

    @property
    def trains_embeddings(self) -> bool:
        """Whether full tuning trains the token embeddings: an optimizer step on them takes longer than everything else."""
        return not self.unlabelled if self.embeddings is None else self.embeddings

    @classmethod
    def amend_schema(cls, schema: dict[str, Any]) -> None:
        schema["properties"]["distill"]["enum"].insert(0, True)


def with_tasks(config: RecoverConfig, many: bool, kinds: Sequence[str]) -> Iterable[Problem]:
    yield from one_task_only(config, many, kinds)
    yield from kind_problems(config, kinds)
    yield from key_problems(config, "augment", lambda kind: kind.augments, kinds)


def check(config: RecoverConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if config.hidden_weight is not None and config.distill not in ("hidden", "both"):
        fix = "Remove the key, or say distill: hidden (or both)"
        yield Problem("E403", "hidden_weight is not used where no hidden states are distilled", fix, ("hidden_weight",))
    yield from length_problems(config)
    yield from teacher_problems(config)
    if config.label_smoothing is not None and config.unlabelled:
        what = "label_smoothing is not used with texts or augment: no label is learned"
        yield Problem("E403", what, "Remove the key, or those", ("label_smoothing",))
    if config.embeddings is not None and not trains_everything(config, earlier):
        says = f"method {config.method}" if config.top is None else f"top: {config.top}"
        what = f"embeddings is not used by {says}, which trains none"
        yield Problem("E403", what, "Remove the key, or say method: full, without top", ("embeddings",))
    if not any(entry.row.trains for entry in earlier):
        yield Problem("E503", "nothing is tuned yet", "Put a tune before recover")
        return
    yield from merged_problems("recover", earlier)
    if trains_base(config):
        yield from filled_problems("training every weight", earlier, None)
    moved = next((entry for entry in earlier if entry.row.trains and trains_base(entry.config)), None)
    if config.checkpoints and moved is not None:
        what = f"a checkpoint is kept as a change of the base, whose own weights '{moved.id}' trained"
        yield Problem("E312", what, "Remove the key, or use another method there", ("checkpoints",))
    fresh = fresh_places(earlier)
    if config.method == "same":
        yield from same_problems(config, earlier, fresh)
        return
    row = method(config.method)
    takes = row.takes_places(config)
    if takes and fresh is None:
        fix = "Put a select between prune and recover, or use method: lora or same"
        yield Problem(
            "E404", f"{method_in_words(config, row)} needs positions that are chosen in the pruned matrices", fix, ("method",)
        )
        return
    yield from method_problems(config, row, fresh if takes else untaken(fresh, earlier))


def trains_everything(config: RecoverConfig, earlier: tuple[Entry, ...]) -> bool:
    """Whether every weight is trained: by `full`, or by `same` after it, and not of the last blocks alone."""
    trainings = [config, *(entry.config for entry in reversed(earlier) if entry.row.trains)]
    named = next((training for training in trainings if training.method != "same"), config)
    return trains_base(named) and named.top is None


def teacher_problems(config: RecoverConfig) -> Iterable[Problem]:
    """Faults of keys that need another kind of distillation."""
    if config.distill is False:
        unused = (
            ("texts", "texts without labels teach nothing"),
            ("augment", "variants of texts teach nothing"),
            ("teacher", "a teacher is not used"),
        )
        for key, what in unused:
            if getattr(config, key) is not None:
                yield Problem("E403", f"{what} where nothing is distilled", "Remove the key, or say distill: logits", (key,))
    elif config.distill != "logits" and config.teacher is not None:
        what = f"distill: {config.distill} compares hidden states, which are those of the dense model only"
        yield Problem("E403", what, "Use distill: logits, or teacher: dense", ("teacher",))


# the functions that read files are imported when they are called: stages are listed without them


def file_problems(config: RecoverConfig, task: TaskConfig, models: Models) -> Iterable[Problem]:
    from pipelines.stages.recover import teacher_checks

    keys = [key for key in ("texts", "teacher") if getattr(config, key) is not None]
    return teacher_checks.file_problems(config.texts, keys, task)


def require_tokens(config: RecoverConfig, task: TaskConfig, base: Path, models: Models) -> None:
    if config.texts is not None or models:
        from pipelines.stages.recover import teacher_checks

        teacher_checks.require_tokens(config.texts, task, base, models)


def file_facts(config: RecoverConfig, task: TaskConfig, base: Path, models: Models) -> dict[str, dict[str, Any]]:
    if not config.unlabelled and not models:
        return {}
    from pipelines.stages.recover import teacher_checks

    return teacher_checks.file_facts(config.texts, config.augment, task, base, models)


def fresh_places(earlier: tuple[Entry, ...]) -> Entry | None:
    """The last select whose positions are valid in the current matrices: after every prune, or after the first training."""
    cuts = [number for number, entry in enumerate(earlier) if entry.row.removes]
    trainings = [number for number, entry in enumerate(earlier) if entry.row.trains]
    since = cuts[-1] if cuts else trainings[0]
    return next((entry for entry in reversed(earlier[since:]) if entry.row.chooses_places), None)


def untaken(fresh: Entry | None, earlier: tuple[Entry, ...]) -> Entry | None:
    """The select `fresh`, unless a training behind it took its positions: a later one need not."""
    trainings = [entry.config for entry in (entries_after(fresh, earlier) if fresh else ()) if entry.row.trains]
    taken = any(config.method != "same" and method(config.method).takes_places(config) for config in trainings)
    return None if taken else fresh


def same_problems(config: RecoverConfig, earlier: tuple[Entry, ...], fresh: Entry | None) -> Iterable[Problem]:
    """Faults of `same`, which continues with the existing deltas: it accepts neither options nor a new Ω."""
    yield from meaningless(config, OPTIONS, "same")
    for number, entry in enumerate(earlier):
        on = trained_on(entry, earlier[:number])
        if on != "weights":
            what = f"same would train the whole {on} in which '{entry.id}' trained chosen positions"
            yield Problem("E404", what, "Name a method, e.g. lora, or selective and where its positions come from", ("method",))
            return
    last = last_training(earlier)
    if last is not None and last.config.top is not None:
        what = f"same would train the whole model, '{last.id}' trained its last {last.config.top} blocks"
        yield Problem("E404", what, f"Say method: full, top: {last.config.top}, or another method", ("method",))
        return
    if (unused := untaken(fresh, earlier)) is not None:
        fix = f"Use method: {methods_with('uses_omega')}, or drop the select"
        yield Problem("E404", f"same does not use the positions that '{unused.id}' chooses", fix)


def trained_on(entry: Entry, earlier: tuple[Entry, ...]) -> On:
    """The kind of tensors that a stage's Ω lies in, from its config and that of the select before it."""
    if not entry.row.trains or entry.config.method == "same":
        return "weights"
    omega = next((previous for previous in reversed(earlier) if previous.row.chooses_places), None)
    return on_of(entry.config, method(entry.config.method), omega)


def plan(config: RecoverConfig, plan: Plan) -> Plan:
    """Plan: `same` trains all existing deltas. Its count is an upper bound where pruning has removed entries of Ω, only the run
    decides what each block keeps, or the network of a reparametrized prefix is dropped, and a lower one with
    `deselected: freeze`: all that ever moved goes on."""
    require_precision(config)
    everything = method_of(config, plan.trained[-1].method).trains_base
    frozen = 0
    if everything:
        from compressor.deltas.links import chains, detach

        # the run merges them; on a weightless model some cannot be computed
        for _, owner, name in list(chains(plan.model)):
            detach(owner, name)
    if everything and not config.trains_embeddings and config.top is None:
        frozen = plan.model.get_input_embeddings().weight.numel()
    if config.method == "same":
        # deltas on a fully tuned model are trained without its weights, and before it they were merged
        bases = [number for number, trained in enumerate(plan.trained) if method(trained.method).trains_base]
        since = plan.trained[bases[-1] + 1 :] if bases else plan.trained
        continued = [plan.trained[number] for number in bases] if everything else since
        count = sum(trained.continued(plan.shape, plan.steps) for trained in continued) - frozen
        return replace(plan, trainable=(*plan.trainable, ("recover", count)))
    added, shape = planned(config, config.method, plan)
    check_sizes_alike(added, plan)
    name, count = counted("recover", added, shape)
    # after all weights were trained every matrix differs from the base; after the last blocks, those trained before do, too
    before = () if everything and config.top is None else plan.trained
    return replace(plan, shape=shape, trained=(*before, added), trainable=(*plan.trainable, (name, count - frozen)))


RATES = ("learning_rate", "mask_learning_rate", "final_learning_rate")
"""Keys of the learning rates."""


def rates_of_labels(config: RecoverConfig, before: str) -> dict[str, float]:
    """Default learning rates where labels are learned, by key; `before` is the method of the training before."""
    usual = config.model_copy(update=dict.fromkeys(RATES))
    return rates_of(usual, method_of(config, before))


STAGE = Stage(
    name="recover",
    summary="train what is left after pruning, distilled from the dense model",
    config=RecoverConfig,
    produces="model",
    needs=("model",),
    accepts=("omega",),
    uses_dense=True,
    packages=("torch", "transformers", "accelerate", "tokenizers"),
    version=9,
    beside=NamedInputs(("texts",), ("teacher",), file_problems, require_tokens, file_facts),
    scores_tests=True,
    trains=True,
    outcome="recovered",
    run="pipelines.stages.recover.run:run",
    check=check,
    plan=plan,
    estimate=estimate,
    with_tasks=with_tasks,
)
