"""Masking single weights: score them, hide the lowest, and compare with the model in which they are overwritten with zeros."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressor.accelerator import accelerated, batches_on
from compressor.deltas.links import merged_copy
from compressor.models.anatomy import Matrix, layers_of, matrices_of, modules_of
from compressor.pruning.scores import Changes, changes_of
from compressor.pruning.weights import hide, hide_all_but, hide_lowest, importance, loss_importance, mask_of
from compressor.pruning_criteria import CRITERIA, LOSS_POWER, Hides
from compressor.tasks.data import Data, tensor_batches
from compressor.tasks.features import torch_forward
from export.parity.compare import compare, require
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import PARITY_ROWS, predict_rows
from pipelines.stages.prune.prune_weights import Pool, WeightsItem, pools_of


def carry_out(
    item: WeightsItem,
    model: nn.Module,
    base: nn.Module | None,
    seed: int,
    data: Data,
    workspace: Workspace,
    tuned: Collection[str] = (),
) -> dict[str, Any]:
    """Score, mask and check one item, in place: masked equals the same weights overwritten with zeros, bit for bit.

    `base` (same shapes), given after full tuning, gets the same masks. `tuned` modules are adapted in every block. Raises
    UserError E501, E502, E505 and CheckError E610.
    """
    matrices = matrices_of(model, item.modules)
    changes = adapted_changes(matrices, changes_of(model, base), tuned)
    scores = score(item, model, matrices, changes, seed, data, workspace)
    before, hides = merged_copy(model), item.hides or "both"
    pools = hide_by(item, matrices, scores, changes, hides)
    if base is not None:
        hide_alike(matrices_of(base, item.modules), matrices, hides)
    if hides == "both":
        overwrite(before, matrices)
    else:
        before = without_weights(model, matrices)
    rows = data.compared(PARITY_ROWS)
    reference = predict_rows(torch_forward(before, accelerate=False), rows, data, workspace, "weights overwritten")
    candidate = predict_rows(torch_forward(model, accelerate=False), rows, data, workspace, "weights masked")
    result = compare("weights overwritten -> masked", "merged", reference, candidate, rows.labels, task=rows.kind)
    require(result)
    # a key that was not given must not change what later stages are made from
    left_out = {"hides"} if item.hides is None else set()
    requested = {**item.model_dump(exclude=left_out), "modules": modules_of(model, item.modules)}
    return {**requested, **account(item, matrices, pools), "parity": result.to_json()}


def adapted_changes(matrices: Sequence[Matrix], changes: Changes, tuned: Collection[str]) -> dict[str, Tensor]:
    """`changes` with a ΔW of zeros for each other matrix of a tuned module: positions that are chosen in the whole model may
    leave one without any, and what is adapted must not depend on that."""
    bare = [matrix for matrix in matrices if matrix.name in tuned and matrix.path not in changes]
    return {**changes, **{matrix.path: torch.zeros_like(matrix.original) for matrix in bare}}


def hide_by(
    item: WeightsItem, matrices: Sequence[Matrix], scores: Mapping[str, Tensor], changes: Changes, hides: Hides
) -> list[Pool]:
    """Mask what the item's share or pattern says, by `scores` (out, in, by path); returns the pools of an unstructured item.

    Of equal |ΔW| the smaller |W + ΔW| goes first: after a sparse tune most of them are 0, and do not rank the weights.
    """
    second = importance(matrices, "weight_plus_delta", changes, 0) if CRITERIA[item.criterion].by_change else {}
    if item.nm:
        for matrix in matrices:
            hide_all_but(matrix, scores[matrix.path], item.nm, hides, second=second.get(matrix.path))
        return []
    sizes = [matrix.original.numel() for matrix in matrices]
    adapted = [matrix.path in changes for matrix in matrices]
    pools = pools_of(item, [matrix.path for matrix in matrices], sizes, adapted)
    for pool in pools:
        hide_lowest([matrices[number] for number in pool.members], scores, pool.count, hides, second=second)
    return pools


def score(
    item: WeightsItem,
    model: nn.Module,
    matrices: Sequence[Matrix],
    changes: Changes,
    seed: int,
    data: Data,
    workspace: Workspace,
) -> dict[str, Tensor]:
    """A score for every entry of `matrices`, by path."""
    if item.criterion not in LOSS_POWER:
        return importance(matrices, item.criterion, changes, seed)
    rows = data.train.sample(item.rows)
    with workspace.progress(f"scoring weights by {item.criterion}", len(rows)) as bar, accelerated(model) as device:
        batches = batches_on(device, tensor_batches(rows, data.pad_id, data.batch_size))
        scores = loss_importance(model, matrices, item.criterion, batches, bar.advance, kind=data.kind)
    return {path: values.cpu() for path, values in scores.items()}


def hide_alike(of_base: Sequence[Matrix], matrices: Sequence[Matrix], hides: Hides) -> None:
    """Hide in the base what masks of `matrices` hide: hidden in the model alone, it would be a change to the next item."""
    for other, matrix in zip(of_base, matrices, strict=True):
        mask = mask_of(matrix, hides)
        hide(other, mask.keep.clone(), mask.pattern, hides)


def overwrite(merged: nn.Module, matrices: Sequence[Matrix]) -> None:
    """Write zeros into a merged copy at the entries that the masks of `matrices` (of the original model) hide."""
    hidden = {matrix.path: ~matrix.mask.keep for matrix in matrices}
    for layer in layers_of(merged):
        for matrix in map(layer.matrix, layer.names):
            if matrix.path in hidden:
                matrix.weight.detach()[hidden[matrix.path]] = 0.0


@torch.no_grad()
def without_weights(model: nn.Module, matrices: Sequence[Matrix]) -> nn.Module:
    """A merged copy in which W itself is overwritten with zeros where a mask hides it, and ΔW is added to that."""
    stored = []
    for matrix in matrices:
        mask, weight = matrix.weight_mask, matrix.original
        stored.append((mask, mask.keep, weight, weight.clone()))
        weight[~mask.keep] = 0.0
        mask.keep = torch.ones_like(mask.keep)
    merged = merged_copy(model)
    for mask, keep, weight, value in stored:
        mask.keep = keep
        weight.copy_(value)
    return merged


def account(item: WeightsItem, matrices: Sequence[Matrix], pools: Sequence[Pool]) -> dict[str, Any]:
    """How many weights the item covers and how many of them are masked now, pool by pool for global ones."""
    entries = sum(matrix.original.numel() for matrix in matrices)
    hidden = sum(int((~mask_of(matrix, item.hides or "both").keep).sum()) for matrix in matrices)
    shown = [{"pool": pool.name, "entries": pool.entries, "hidden": pool.count} for pool in pools if item.scope != "matrix"]
    return {"matrices": len(matrices), "entries": entries, "hidden": hidden, "pools": shown}
