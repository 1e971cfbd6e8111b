"""Names of the selection scores and options in a pipeline file, without torch."""

from __future__ import annotations

from typing import Literal

WeightScore = Literal["rpca", "magnitude", "pafi", "random"]
DataScore = Literal["fish", "sam", "d3"]
Scope = Literal["matrix", "layer", "global"]

SCORES: tuple[str, ...] = (*WeightScore.__args__, *DataScore.__args__)
SCOPES: tuple[str, ...] = Scope.__args__
DATA_SCORES: tuple[str, ...] = DataScore.__args__
"""Scores computed from the task's gradients; the others use only the weights."""
