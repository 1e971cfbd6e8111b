"""Stage `tune`: train a small change of the frozen model (DSEE, LoRA), or the whole model as the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from compressor.account import Plan
from compressor.compression import compression_of
from compressor.methods import (
    NAMES,
    Combine,
    Options,
    method,
)
from pipelines.engine.stage import Entry, Problem, Stage
from pipelines.file import limits
from pipelines.stages.training_config import (
    TrainingConfig,
    kind_problems,
    length_problems,
    meaningless,
    method_in_words,
    method_problems,
    methods_with,
)
from pipelines.stages.training_plan import counted, estimate, planned, require_precision


class TuneConfig(TrainingConfig):
    """Train a method's parameters and the task head. The select before it, if any, determines where Ω lies."""

    method: Literal[NAMES] = Field(default="dsee", description="what is trained; compress list methods tells them apart")
    combine: Combine | None = Field(default=None, description="many tasks: how layer and task masks are joined, default or")
    temperature: float | None = Field(
        default=None,
        gt=0,
        le=limits.SCALE,
        description="many tasks: drawn by size^(1/temperature), 1 by size, large evenly; default 10",
    )

    def of_tasks(self, options: Options, count: int) -> Options:
        """The options for `count` tasks that share what the method adds."""
        return replace(options, tasks=count, combine=self.combine or options.combine)


def with_tasks(config: TuneConfig, many: bool, kinds: Sequence[str]) -> Iterable[Problem]:
    """Faults of the tasks: only some methods train many together, and some keys are for these, or for some kinds, only."""
    yield from kind_problems(config, kinds)
    row = method(config.method)
    if many and not row.many_tasks:
        fix = (
            f"Use {methods_with('many_tasks')}, or run it once for each task (`task` instead of `tasks`) on this base: "
            "`compress delta convert` makes a small delta file of each result, and compressor.load(base, delta=FILE) switches "
            "between them"
        )
        yield Problem("E117", f"method {row.name} trains one task, the pipeline has `tasks`", fix, ("method",))
    if many and config.keep_best:
        yield Problem("E403", "keep_best is not used with several tasks, each with its metric", "Remove it", ("keep_best",))
    if many and row.many_tasks and not row.task_masks:
        yield from meaningless(config, ("combine",), row.name)
    elif many and config.keep == 1:
        yield from meaningless(config, ("combine",), f"{row.name} with keep: 1")
    for key in () if many else ("combine", "temperature"):
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} is not used with one task", "Remove the key, or list several under tasks", (key,))


def check(config: TuneConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.row.trains or entry.row.removes for entry in earlier):
        yield Problem("E405", "tune must appear once, before any other training or pruning", "Use recover to keep training")
    row, omega = method(config.method), next((entry for entry in reversed(earlier) if entry.row.chooses_places), None)
    if row.takes_places(config) and omega is None:
        what = f"{method_in_words(config, row)} needs positions for its sparse part"
        yield Problem("E404", what, "Put a select before it, or use method: lora")
    yield from length_problems(config)
    yield from method_problems(config, row, omega)


def plan(config: TuneConfig, plan: Plan) -> Plan:
    require_precision(config)
    trained, shape = planned(config, config.method, plan)
    if tasks := compression_of(plan.model).tasks:
        trained = replace(trained, options=config.of_tasks(trained.options, len(tasks.names)))
    trainable = (*plan.trainable, counted("tune", trained, shape))
    return replace(plan, shape=shape, trained=(trained,), trainable=trainable)


STAGE = Stage(
    name="tune",
    summary="train a small change of the frozen model (see list methods), or everything (full)",
    config=TuneConfig,
    produces="model",
    accepts=("omega",),
    packages=("torch", "transformers", "accelerate", "tokenizers"),
    version=6,
    scores_tests=True,
    trains=True,
    outcome="tuned",
    run="pipelines.stages.tune.run:run",
    check=check,
    plan=plan,
    estimate=estimate,
    with_tasks=with_tasks,
)
