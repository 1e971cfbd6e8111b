"""Stage `merge`: fold every delta into its weight and write the checkpoint that leaves the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace


class MergeConfig(StageConfig):
    """Nothing to choose: merging is exact."""


def check(config: MergeConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if any(entry.name == "merge" for entry in earlier):
        yield Problem("E504", "the model is merged already", "Remove the second merge")


def run(config: MergeConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Merge, write the checkpoint, load it again and require equal logits, bit for bit."""
    from compressor.checkpoint import load, save_checkpoint
    from compressor.deltas import merge_all
    from compressor.tasks.features import torch_forward
    from export.parity import compare, require
    from pipelines.loading import PARITY_ROWS, load_data, load_model, predict_rows, quality

    data, previous = load_data(inputs), inputs.nearest("model")
    model, rows = load_model(previous, inputs.base), data.validation.sample(PARITY_ROWS)
    reference = predict_rows(torch_forward(model), rows, data, workspace, "with deltas")
    save_checkpoint(merge_all(model), workspace.folder, inputs.base.folder)
    reloaded = load(workspace.folder)
    candidate = predict_rows(torch_forward(reloaded), rows, data, workspace, "merged and reloaded")
    result = compare("deltas -> merged", "merged", reference, candidate, rows.labels)
    require(result)
    logits = predict_rows(torch_forward(reloaded), data.validation, data, workspace, "validating")
    return {
        "merged": True,
        "parity": [result.to_json()],
        "kept": previous.metadata["kept"],
        "quality": quality(logits, data.validation.labels),
        "labels": data.label_names,
    }


STAGE = Stage(
    name="merge",
    summary="fold the deltas into the weights and write the checkpoint",
    config=MergeConfig,
    produces="model",
    needs=("model",),
    packages=("torch", "transformers", "torch-pruning", "tokenizers"),
    version=2,
    run=run,
    check=check,
)
