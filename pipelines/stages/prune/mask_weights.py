"""Masking single weights: score them, hide the lowest, and compare with the model in which they are overwritten with zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from compressor.deltas.links import merged_copy
from compressor.models.anatomy import Matrix, layers_of, matrices_of, modules_of
from compressor.pruning.scores import changes_of
from compressor.pruning.weights import hide_all_but, hide_lowest, importance, loss_importance
from compressor.pruning_criteria import LOSS_POWER
from compressor.tasks.data import Data, tensor_batches
from compressor.tasks.features import torch_forward
from export.parity.compare import compare, require
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import PARITY_ROWS, predict_rows
from pipelines.stages.prune.prune_weights import Pool, WeightsItem, pools_of


def carry_out(
    item: WeightsItem, model: nn.Module, base: nn.Module | None, seed: int, data: Data, workspace: Workspace
) -> dict[str, Any]:
    """Score, mask and check one item, in place: masked equals the same weights overwritten with zeros, bit for bit.

    Raises UserError E501, E502, E505 and CheckError E610.
    """
    changes = changes_of(model, base)
    matrices = matrices_of(model, item.modules)
    scores = score(item, model, matrices, changes, seed, data, workspace)
    before, pools = merged_copy(model), []
    if item.nm:
        for matrix in matrices:
            hide_all_but(matrix, scores[matrix.path], item.nm)
    else:
        sizes = [matrix.original.numel() for matrix in matrices]
        adapted = [matrix.path in changes for matrix in matrices]
        pools = pools_of(item, [matrix.path for matrix in matrices], sizes, adapted)
        for pool in pools:
            hide_lowest([matrices[number] for number in pool.members], scores, pool.count)
    overwrite(before, matrices)
    rows = data.compared(PARITY_ROWS)
    reference = predict_rows(torch_forward(before), rows, data, workspace, "weights overwritten")
    candidate = predict_rows(torch_forward(model), rows, data, workspace, "weights masked")
    result = compare("weights overwritten -> masked", "merged", reference, candidate, rows.labels, task=rows.kind)
    require(result)
    requested = {**item.model_dump(), "modules": modules_of(model, item.modules)}
    return {**requested, **account(item, matrices, pools), "parity": result.to_json()}


def score(
    item: WeightsItem,
    model: nn.Module,
    matrices: Sequence[Matrix],
    changes: Mapping[str, Tensor],
    seed: int,
    data: Data,
    workspace: Workspace,
) -> dict[str, Tensor]:
    """A score for every entry of `matrices`, by path."""
    if item.criterion not in LOSS_POWER:
        return importance(matrices, item.criterion, changes, seed)
    rows = data.train.sample(item.rows)
    with workspace.progress(f"scoring weights by {item.criterion}", len(rows)) as bar:
        batches = tensor_batches(rows, data.pad_id, data.batch_size)
        return loss_importance(model, matrices, item.criterion, batches, bar.advance, kind=data.kind)


def overwrite(merged: nn.Module, matrices: Sequence[Matrix]) -> None:
    """Write zeros into a merged copy at the entries that the masks of `matrices` (of the original model) hide."""
    hidden = {matrix.path: ~matrix.mask.keep for matrix in matrices}
    for layer in layers_of(merged):
        for matrix in map(layer.matrix, layer.names):
            if matrix.path in hidden:
                matrix.weight.detach()[hidden[matrix.path]] = 0.0


def account(item: WeightsItem, matrices: Sequence[Matrix], pools: Sequence[Pool]) -> dict[str, Any]:
    """How many weights the item covers and how many of them are masked now, pool by pool for global ones."""
    entries = sum(matrix.original.numel() for matrix in matrices)
    hidden = sum(int((~matrix.mask.keep).sum()) for matrix in matrices)
    shown = [{"pool": pool.name, "entries": pool.entries, "hidden": pool.count} for pool in pools if item.scope != "matrix"]
    return {"matrices": len(matrices), "entries": entries, "hidden": hidden, "pools": shown}
