"""W + ΔW or b + Δb with a value for every entry: the link of trained biases and of dense deltas."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from compressor.deltas.links import Delta


class Offset(Delta):
    """b + Δb or W + ΔW with a Δ for every entry: for biases (BitFit), where no other form is smaller, and dense deltas."""

    kind = "offset"

    def __init__(self, values: Tensor, group: str = ""):
        super().__init__()
        self.values, self.group = nn.Parameter(values), group

    def change(self, weight: Tensor) -> Tensor:
        return weight + self.values

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Self:
        values = self.values.detach()[rows]
        return type(self)((values if values.dim() == 1 else values[:, columns]).clone(), self.group)

    def entries(self) -> tuple[None, Tensor]:
        return None, self.values.detach().double().flatten()

    def suits(self, shape: torch.Size) -> bool:
        return self.values.shape == shape
