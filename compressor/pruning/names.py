"""The words of pruning. Torch-free: pipeline files are checked without it."""

from __future__ import annotations

from typing import Literal

Structure = Literal["heads", "cross_heads", "neurons", "layers"]
Criterion = Literal["delta", "weight", "weight_plus_delta", "taylor", "fisher", "random"]

LOSS_POWER = {"taylor": 1, "fisher": 2}
"""The criteria that look at the loss, and the power of a row's effect that they sum."""
