"""Names and types of the pruning options. Outside `compressor.pruning`: pipeline files are checked without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from compressor.models.modules import STRUCTURES

Unit = Literal[*STRUCTURES, "layers"]
Structure = Literal[Unit, "weights"]
Magnitude = Literal["change", "weight", "sum"]
"""Of what a criterion takes absolute values: ΔW, W, or their sum (their values: `compressor.pruning.scores.VALUES`)."""


@dataclass(frozen=True)
class CriterionTraits:
    """How a criterion scores units or single weights; the lowest scores are removed first.

    - `of`: what a score is made from: a `Magnitude`, the `loss` of training rows, or their hidden `states`, or `chance`;
    - `units`, `weights`: whether it scores units, and single weights;
    - `two_pools`: a matrix without a ΔW is scored by |W|, and the matrices with and without one are ranked apart;
    - `power`: of the effect on the loss (of a row; of a batch for single weights) that is summed;
    - `passes`: forward passes that its scores of one structure, or of the weights, take for each training row (0: it reads no
      rows), and `passes_of_layers` those of whole layers;
    - `held`: bytes for each weight of the model while single weights are scored.
    """

    of: Literal[Magnitude, "loss", "states", "chance"]
    units: bool = True
    weights: bool = True
    two_pools: bool = False
    power: int = 0
    passes: int = 0
    passes_of_layers: int = 0
    held: int = 4

    @property
    def by_change(self) -> bool:
        """Whether it scores by |ΔW|, which may be 0 nearly everywhere."""
        return self.of == "change"

    @property
    def needs_change(self) -> bool:
        """Whether there is nothing to score by where nothing was tuned."""
        return self.by_change and not self.two_pools


# passes with gradients take as long as three; states go through two blocks for each, with the products of these states
CRITERIA = {
    "delta": CriterionTraits("change", held=12),  # ΔW, and a second score
    "weight": CriterionTraits("weight"),
    "weight_plus_delta": CriterionTraits("sum"),
    "taylor": CriterionTraits("loss", power=1, passes=3, passes_of_layers=3, held=8),  # the sums over batches
    "fisher": CriterionTraits("loss", power=2, passes=3, passes_of_layers=3, held=8),
    "random": CriterionTraits("chance"),
    "reconstruction": CriterionTraits("states", weights=False, passes=4, passes_of_layers=1),
    "delta_or_weight": CriterionTraits("change", units=False, two_pools=True, held=12),
}
"""The pruning criteria by name: one row each. What a score computes is in `compressor.pruning.scores` and `.weights`.

`reconstruction` is the error of the hidden states without a unit; `delta_or_weight` is DSEE's.
"""

Criterion = Literal[tuple(name for name, row in CRITERIA.items() if row.units)]
WeightCriterion = Literal[tuple(name for name, row in CRITERIA.items() if row.weights)]

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

SUMS = tuple(name for name, row in CRITERIA.items() if row.units and row.of in get_args(Magnitude))
"""Criteria of units that sum absolute values over the matrices of a structure."""

LOSS_POWER = {name: row.power for name, row in CRITERIA.items() if row.of == "loss"}
"""Criteria computed from the loss, and the power of the effect that they sum."""

BY_ROWS = tuple(name for name, row in CRITERIA.items() if row.passes)
"""Criteria that are computed on training rows."""


def require_rows_used(given: Collection[str], criteria: Iterable[str], able: Iterable[str] = BY_ROWS) -> None:
    """Raises ValueError where `rows` is among the `given` keys, and none of the `criteria` is among those `able` to use it."""
    if "rows" in given and not set(criteria) & set(able):
        used = " and ".join(dict.fromkeys(criteria))
        raise ValueError(f"rows is not used by criterion {used}: it goes with {', '.join(able)}")
