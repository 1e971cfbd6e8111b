"""What is not finite cannot be ranked: a choice of places by it would hold too few, or any. Refused before every choice."""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import UserError

MEND = "Take a model from before training went wrong, or another score"


def require_finite(values: Tensor, what: str, mend: str = MEND) -> None:
    """Raise UserError E409 where `values`, of any shape, hold NaN or infinity; `what` names them: "the weights of PATH"."""
    if wrong := int((~torch.isfinite(values)).sum()):
        raise UserError(
            "E409", f"{what} hold {wrong:,} of {values.numel():,} values that are not finite (NaN or infinity)", mend
        )


def require_ranks(scores: Tensor, what: str, mend: str = MEND) -> None:
    """Raise UserError E409 where scores, of any shape, hold NaN. Infinity has a rank: PaFi gives it to weights of 0."""
    if wrong := int(torch.isnan(scores).sum()):
        raise UserError("E409", f"{what} hold {wrong:,} of {scores.numel():,} values that are no number (NaN)", mend)
