"""Rejection of NaN and infinite values before every choice of entries: they cannot be ranked."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import UserError

FIX = "Take a model from before training went wrong, or another score or criterion"


LARGEST_WEIGHT = 1e15
"""Far beyond any real weight. The robust PCA's products overflow float32 from 1e18 on, and LAPACK's QR does not terminate on
infinity."""


def finite_fault(values: Tensor, name: str, most: float | None = None) -> str | None:
    """What is wrong with `values`, of any shape, that contain NaN or infinity, or exceed `most`; None if nothing is. `name`
    names them: "the weights of PATH".
    """
    limit = torch.finfo(values.dtype).max if most is None else most
    wrong = int((~(values.abs() <= limit)).sum())  # a comparison with NaN is false
    if not wrong:
        return None
    beyond = "" if most is None else f" or beyond {most:g}"
    return f"{name} hold {wrong:,} of {values.numel():,} values that are not finite (NaN or infinity){beyond}"


def require_finite(values: Tensor, name: str, fix: str = FIX, most: float | None = None) -> None:
    """Raise UserError E409 where `values` have a `finite_fault`."""
    if fault := finite_fault(values, name, most):
        raise UserError("E409", fault, fix)


def require_ranks(scores: Tensor, name: str) -> None:
    """Raise UserError E409 where scores, of any shape, contain NaN. Infinity has a rank: PaFi gives it to weights of 0."""
    if wrong := int(torch.isnan(scores).sum()):
        raise UserError("E409", f"{name} hold {wrong:,} of {scores.numel():,} values that are not a number (NaN)", FIX)
