"""Names and types of the pruning options. Outside `compressor.pruning`: pipeline files are checked without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

Unit = Literal["heads", "cross_heads", "neurons", "layers"]
Structure = Literal[Unit, "weights"]
AnyCriterion = Literal["delta", "weight", "weight_plus_delta", "taylor", "fisher", "random"]
"""Criteria of units and of single weights."""

Criterion = Literal[AnyCriterion, "reconstruction"]
"""Criteria of units: `reconstruction` is the error of the hidden states without a unit."""

WeightCriterion = Literal[AnyCriterion, "delta_or_weight"]
"""`delta_or_weight` is DSEE's: |ΔW| for matrices that have one, |W| for the others, each kind ranked separately."""

UNSTRUCTURED = "unstructured"

Hides = Literal["both", "weight"]
"""What a mask over single weights hides: W + ΔW, or W alone (DSEE section 3.3)."""


@dataclass(frozen=True)
class NofM:
    """An n:m pattern: at most `keep` non-zeros in every run of `run` consecutive input columns of a matrix (out, in)."""

    keep: int
    run: int

    @classmethod
    def parse(cls, pattern: str) -> NofM | None:
        """Parse a pattern: '2:4' -> 2 of 4; None for 'unstructured'. Raises ValueError for anything else."""
        if pattern == UNSTRUCTURED:
            return None
        keep, _, run = pattern.partition(":")
        if not (keep.isdecimal() and run.isdecimal() and 0 < int(keep) < int(run)):
            raise ValueError("a pattern is unstructured, or n:m with n below m, as 2:4")
        return cls(int(keep), int(run))


def _pattern(value: str) -> str:
    NofM.parse(value)
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
"""Config type of `unstructured`, `2:4`, `1:4`, any n:m."""

SUMS = ("delta", "weight", "weight_plus_delta")
"""Criteria of units that sum absolute values over the matrices of a structure."""

LOSS_POWER = {"taylor": 1, "fisher": 2}
"""Criteria computed from the loss, and the power of the effect (of a row; of a batch for single weights) that they sum."""

BY_ROWS = (*LOSS_POWER, "reconstruction")
"""Criteria that are computed on training rows."""


def require_rows_used(given: Collection[str], criteria: Iterable[str], able: Iterable[str] = BY_ROWS) -> None:
    """Raises ValueError where `rows` is among the `given` keys, and none of the `criteria` is among those `able` to use it."""
    if "rows" in given and not set(criteria) & set(able):
        used = " and ".join(dict.fromkeys(criteria))
        raise ValueError(f"rows is not used by criterion {used}: it goes with {', '.join(able)}")
