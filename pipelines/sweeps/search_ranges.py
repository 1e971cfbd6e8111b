"""Ranges of numbers in which a search chooses: KEY=LOW..HIGH, of `--over` or of a grid file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from compressor.errors import UserError
from pipelines.file.yaml_source import scalar

TEXT = re.compile(r"\s*(?P<low>[^\s,][^,]*?)\.\.(?P<high>[^,:]+?)\s*(?::\s*(?P<scale>[^,]*?)\s*)?")
"""LOW..HIGH, LOW..HIGH:log or LOW..HIGH:linear."""
LOGARITHMIC = ("learning_rate",)
"""Keys whose ranges are logarithmic where nothing else is said."""
STEPS = 3
"""A value is rounded to about a thousandth of its range (10^-STEPS): it must be readable in a table and in a command."""
NARROWEST = 1e-9
"""Least width of a range of fractions, relative to its ends: values of a narrower one would differ by rounding errors."""


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included: integers if both are. In a `log` range equal factors are as likely."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' if self.log else ''}"

    @property
    def whole(self) -> bool:
        """Whether its values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def count(self) -> int | None:
        """How many values it has; None for fractions, of which there are 1,000 at least."""
        return int(self.high) - int(self.low) + 1 if self.whole else None

    def rounded(self, value: float) -> float:
        """The value as it is tried: with the decimals (in a log range: the digits) that tell a thousandth of the range."""
        if self.whole:
            return int(value)
        if self.log:
            digits = STEPS + 1 + max(0, -math.floor(math.log10(math.log(self.high / self.low))))
            value = float(f"{value:.{digits}g}")
        else:
            value = round(value, STEPS - math.floor(math.log10(self.high - self.low)))
        return float(min(max(value, self.low), self.high))

    def holds(self, value: Any) -> bool:
        """Whether a value is of the range."""
        kind = int if self.whole else float
        return isinstance(value, kind) and not isinstance(value, bool) and self.low <= value <= self.high


def read_range(key: str, text: str, mark: str) -> Range | None:
    """The range that is the value of a key; None for a text of another form. `mark` says where it is written.

    Raises UserError E123.
    """
    parts = TEXT.fullmatch(text)
    if parts is None:
        return None
    ends = parts["low"].strip(), parts["high"].strip()
    low, high = map(_number, ends)
    if low is None or high is None:
        wrong = ends[0] if low is None else ends[1]
        raise _fault(f"'{wrong:.40}' is not a number", "Write KEY=LOW..HIGH, e.g. tune.rank=4..64; or values: KEY=a,b", mark)
    if not low < high:
        fix = "Write the smaller number first; a single value belongs to --set"
        raise _fault(f"the end of the range, {ends[1]:.40}, is not greater than its start, {ends[0]:.40}", fix, mark)
    found = Range(low, high, _log(key, parts["scale"], mark))
    if found.log and low <= 0:
        fix = f"Start above 0, or write {text.partition(':')[0].strip():.60}:linear"
        raise _fault(f"a logarithmic range cannot start at {ends[0]:.40}", fix, mark)
    width = float(high) / float(low) if found.log else float(high) - float(low)
    if not math.isfinite(width):
        raise _fault("the range is wider than floating point numbers are", "Write a narrower one", mark)
    if not found.whole and not high - low > NARROWEST * max(abs(low), abs(high)):
        raise _fault("the ends of the range are almost equal", "Write a wider one", mark)
    return found


def _number(text: str) -> int | float | None:
    try:
        value = scalar(text)
        # an integer beyond the range of floats has no logarithm, and no use
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return None
    return value if fits else None


def _log(key: str, scale: str | None, mark: str) -> bool:
    if scale is None:
        return key.rpartition(".")[2] in LOGARITHMIC
    if scale not in ("log", "linear"):
        raise _fault(f"a range cannot be ':{scale:.40}'", "Write LOW..HIGH:log or LOW..HIGH:linear", mark)
    return scale == "log"


def _fault(what: str, fix: str, mark: str) -> UserError:
    return UserError("E123", what, fix, mark)
