"""Stage `merge`: add every delta to its weight and write the checkpoint that the pipeline produces."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.engine.stage import Entry, Problem, Stage, StageConfig
from pipelines.stages.prune.prune_weights import filled_problems, modules_moved


class MergeConfig(StageConfig):
    """No options: merging is exact."""


def check(config: MergeConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.row.merges for entry in earlier):
        yield Problem("E504", "the model is merged already", "Remove the second merge")
    yield from filled_problems("merging", earlier, modules_moved(earlier))


STAGE = Stage(
    name="merge",
    summary="fold the deltas into the weights and write the checkpoint",
    config=MergeConfig,
    produces="model",
    needs=("model",),
    packages=("torch", "transformers", "tokenizers"),
    version=5,
    scores_tests=True,
    merges=True,
    outcome="merged",
    run="pipelines.stages.merge.run:run",
    check=check,
)
