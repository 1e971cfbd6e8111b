"""Stage `merge`: add every delta to its weight and write the checkpoint that the pipeline produces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from compressor.tasks.task_kind import kind_of
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig
from pipelines.stages.prune.prune_weights import filled_problems, modules_moved


class MergeConfig(StageConfig):
    """No options: merging is exact."""


def check(config: MergeConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.row.merges for entry in earlier):
        yield Problem("E504", "the model is merged already", "Remove the second merge")
    yield from filled_problems("merging", earlier, modules_moved(earlier))


def corrected(_: MergeConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """What an earlier version did otherwise: config.json did not say that each label is predicted by itself."""
    return {"problem_type": 2} if any(kind_of(kind).problem_type for kind in kinds) else {}


STAGE = Stage(
    name="merge",
    summary="fold the deltas into the weights and write the checkpoint",
    config=MergeConfig,
    produces="model",
    needs=("model",),
    packages=("torch", "transformers", "tokenizers"),
    version=4,
    scores_tests=True,
    merges=True,
    outcome="merged",
    corrected=corrected,
    run="pipelines.stages.merge.run:run",
    check=check,
)
