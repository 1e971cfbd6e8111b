"""W + ΔW that compensates for removed units: not trained, and no part of what tuning changed."""

from __future__ import annotations

from torch import Tensor

from compressor.deltas.kinds.offset import Offset
from compressor.deltas.links import Untrained


class Refit(Untrained, Offset):
    """W + ΔW or b + Δb from `compressor.pruning.refit`, a value for every entry. It is never trained."""

    kind = "refit"

    def __init__(self, values: Tensor, group: str = ""):
        super().__init__(values, group)
        self.requires_grad_(False)
