"""The work of stage `merge`: fold every delta into its weight, write the checkpoint and require equal logits of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from compressor.checkpoint import load, save_checkpoint
from compressor.deltas.links import merged_copy
from compressor.pruning.weights import densities, nonzeros, require_zeros_kept
from compressor.tasks.features import torch_forward
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.generated_texts import with_texts
from pipelines.stages.loading import PARITY_ROWS, judge_rows, load_data, load_model, score_tests
from pipelines.stages.merge.config import MergeConfig
from pipelines.stages.parity_checks import compare_modules


def run(config: MergeConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Merge, write the checkpoint, load it again and require bit-equal logits; count its non-zeros. Raises UserError E412."""
    data, previous = load_data(inputs), inputs.nearest("model")
    model = load_model(previous, inputs.base)
    require_zeros_kept(model)
    save_checkpoint(merged_copy(model), workspace.folder, inputs.base.folder)
    reloaded, rows = load(workspace.folder), data.compared(PARITY_ROWS)
    result = compare_modules("deltas -> merged", "merged", model, reloaded, rows, data, workspace)
    metric_inputs = judge_rows(torch_forward(reloaded), data.validation, data, workspace, "validating")
    published = {
        "merged": True,
        "parity": [result.to_json()],
        "kept": previous.metadata["kept"],
        "quality": metric_inputs.quality,
        **score_tests(reloaded, inputs, data, workspace),
        "labels": data.label_names,
        "nonzeros": nonzeros(reloaded),
        "density": [asdict(density) for density in densities(model)],
    }
    return with_texts(published, reloaded, inputs, data, workspace)
