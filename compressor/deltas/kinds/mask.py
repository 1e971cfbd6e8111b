"""M ⊙ (W + ΔW), or M ⊙ W + ΔW: masks that keep single weights at zero."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from compressor.deltas.links import Delta, Untrained


class Mask(Delta):
    """M ⊙ (W + ΔW): last in the chain, so training sees exactly what merging keeps. `keep` (out, in) is boolean.

    Masked entries are +0.0, never -0.0, and get no gradient. `pattern` is the kind of mask: unstructured, or n:m.
    """

    kind = "mask"
    masks = True

    def __init__(self, keep: Tensor, pattern: str = "unstructured", group: str = ""):
        super().__init__()
        self.register_buffer("keep", keep)
        self.pattern, self.group = pattern, group

    def change(self, weight: Tensor) -> Tensor:
        # selected, not multiplied: -1 x 0 is -0.0, and infinity x 0 is NaN
        return torch.where(self.keep, weight, 0.0)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Self:
        return type(self)(self.keep[rows][:, columns].clone(), self.pattern, self.group)

    def settings(self) -> dict:
        return {**super().settings(), "pattern": self.pattern}

    def entries(self) -> tuple[Tensor, Tensor]:
        # a mask adds nothing to ΔW; masked entries of ΔW are compared as trained
        return torch.empty(0, dtype=torch.int64), torch.empty(0)

    def suits(self, shape: torch.Size) -> bool:
        return self.keep.shape == shape


class WeightMask(Untrained, Mask):
    """M ⊙ W + ΔW: first in the chain, so that the mask hides the frozen weight alone (DSEE section 3.3).

    ΔW stays dense, and so does the merged matrix: the zeros last as long as base and delta are apart.
    """

    kind = "weight_mask"
    masks, first = False, True
