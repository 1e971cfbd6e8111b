"""Stage `merge`: fold every delta into its weight and write the checkpoint that leaves the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pipelines.engine.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace


class MergeConfig(StageConfig):
    """Nothing to choose: merging is exact."""


def check(config: MergeConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.name == "merge" for entry in earlier):
        yield Problem("E504", "the model is merged already", "Remove the second merge")


def run(config: MergeConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Merge, write the checkpoint, load it again and require equal logits, bit for bit; count what is not zero in it."""
    from compressor.checkpoint import load, save_checkpoint
    from compressor.deltas.links import merged_copy
    from compressor.pruning.weights import densities, nonzeros
    from compressor.tasks.features import torch_forward
    from pipelines.stages.hops import compare_modules
    from pipelines.stages.loading import PARITY_ROWS, judge_rows, load_data, load_model

    data, previous = load_data(inputs), inputs.nearest("model")
    model = load_model(previous, inputs.base)
    save_checkpoint(merged_copy(model), workspace.folder, inputs.base.folder)
    reloaded, rows = load(workspace.folder), data.compared(PARITY_ROWS)
    result = compare_modules("deltas -> merged", "merged", model, reloaded, rows, data, workspace)
    found = judge_rows(torch_forward(reloaded), data.validation, data, workspace, "validating")
    return {
        "merged": True,
        "parity": [result.to_json()],
        "kept": previous.metadata["kept"],
        "quality": found.quality,
        "labels": data.label_names,
        "nonzeros": nonzeros(reloaded),
        "density": [asdict(one) for one in densities(model)],
    }


STAGE = Stage(
    name="merge",
    summary="fold the deltas into the weights and write the checkpoint",
    config=MergeConfig,
    produces="model",
    needs=("model",),
    packages=("torch", "transformers", "tokenizers"),
    version=3,
    run=run,
    check=check,
)
