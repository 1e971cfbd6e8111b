"""Positions in the matrices of a pruned model, found again in those of the model before pruning."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compressor.compression import Kept
from compressor.models.anatomy import matrices_of
from compressor.models.modules import EVERYTHING
from compressor.pruning.surgery import restore_kept


@torch.no_grad()
def before_pruning(positions: Mapping[str, Tensor], kept: Kept, dense: nn.Module) -> dict[str, Tensor]:
    """The same weights' sorted flat int32 indices in the dense matrices: path of a matrix of the pruned model -> its flat
    indices, to the same before its model was pruned to `kept`.

    `dense` is a model without changes, which is used up: every weight is numbered, and the numbers are pruned as the weights
    were. float64 holds them exactly.
    """
    if not kept:
        return dict(positions)
    ends, paths, end = [], [], 0
    for matrix in matrices_of(dense.double(), EVERYTHING):
        weights = matrix.original
        weights.copy_(torch.arange(end, end + weights.numel()).reshape(weights.shape))
        end += weights.numel()
        ends.append(end)
        paths.append(matrix.path)
    restore_kept(dense, kept)
    bounds, result = torch.tensor([0, *ends]), {}
    for matrix in matrices_of(dense, EVERYTHING):
        if len(places := positions.get(matrix.path, ())):
            numbers = matrix.original.reshape(-1)[places.long()].long()
            number = int(torch.searchsorted(bounds, numbers[0], right=True)) - 1
            result[paths[number]] = (numbers - bounds[number]).sort().values.to(torch.int32)
    return result
