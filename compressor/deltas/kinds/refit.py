"""W + ΔW that compensates for removed units: not trained, and no part of what tuning changed."""

from __future__ import annotations

from torch import Tensor

from compressor.deltas.kinds.offset import Offset


class Refit(Offset):
    """W + ΔW or b + Δb from `compressor.pruning.refit`, a value for every entry. It is never trained."""

    kind = "refit"
    tuned = False

    def __init__(self, values: Tensor, group: str = ""):
        super().__init__(values, group)
        self.requires_grad_(False)

    def separable(self, size: int) -> bool:
        # nothing is trained, so the links beside it can still have their gradients by factors
        return True

    def trained(self) -> tuple[Tensor, ...]:
        return ()

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ()
