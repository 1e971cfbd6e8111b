"""Whether two settings differ by more than their seeds: the paired differences over the same seeds, their mean and interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Share of the compared values below which differences are equal: well above the error of a float, below any row's weight."""


@dataclass(frozen=True)
class PairedDifference:
    """The second setting minus the first, over `pairs` of equal seeds; `low` and `high` are None where no interval exists."""

    pairs: int
    mean: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """In words: 'shown' when the interval does not contain 0.

        Equal differences in every pair (as of a figure without randomness) have no spread to judge them by.
        """
        if self.low is None or self.high is None:
            return "not shown: one pair has no interval"
        if self.low == self.high:
            return "equal in every pair" if self.mean == 0 else "the same difference in every pair"
        return "not shown" if self.low <= 0 <= self.high else "shown"


def paired_difference(first: Sequence[float | None], second: Sequence[float | None]) -> PairedDifference | None:
    """Compare two settings, each with one value for each seed (None: that trial failed). None without a complete pair.

    The interval is Student's t for the mean of the differences, at 95 %.
    """
    pairs = [(before, after) for before, after in zip(first, second, strict=True) if before is not None and after is not None]
    if not pairs:
        return None
    differences = [after - before for before, after in pairs]
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return PairedDifference(count, mean, None, None)
    from scipy.stats import t

    deviation = statistics.stdev(differences)
    # equal differences are rounded as their values are: a small one between large values the most
    rounding = ROUNDING * max(abs(value) for pair in pairs for value in pair)
    if deviation <= rounding:
        deviation, mean = 0.0, mean if abs(mean) > rounding else 0.0
    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation / math.sqrt(count)
    return PairedDifference(count, mean, mean - half, mean + half)
