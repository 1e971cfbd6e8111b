"""Formats for readers: three significant digits, thousands separators, factors in words, plain text in Markdown."""

from __future__ import annotations

import math
import re
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

GAIN = 0.03
"""A factor within 3 % of 1 is not a gain: comparing a runtime with itself may differ by as much."""


def is_finite(value: float | None) -> bool:
    """Whether a number of a record is finite; in JSON the others are null."""
    return value is not None and math.isfinite(value)


def significant(value: float | None, digits: int = 3) -> str:
    """Three significant digits: 1234.5 -> '1,230', 0.38123 -> '0.381', 1.43e-6 -> '1.43e-6'; 'not finite' for NaN, None."""
    if not is_finite(value):
        return "not finite"
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def factor(ratio: float, digits: int = 3) -> str:
    """Format a factor: 0.38123 -> '0.381 ×'."""
    return f"{significant(ratio, digits)} ×"


def gain(ratio: float, more: str, less: str, same: str) -> str:
    """A ratio of old to new in words: 2.6 -> '2.60 × MORE', 0.5 -> '2.00 × LESS', within 3 % of 1 -> SAME."""
    if abs(ratio - 1) <= GAIN:
        return same
    return f"{factor(max(ratio, 1 / ratio))} {more if ratio > 1 else less}"


class Speed(NamedTuple):
    """Old latency over new, with its 95 % interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_open(self) -> bool:
        """Whether the rounds show neither which of the two is faster nor that they are as fast: the interval contains 1, or the
        ratio is within 3 % of it, and the interval ends further away."""
        near = self.low <= 1 <= self.high or abs(self.ratio - 1) <= GAIN
        return near and (self.low < 1 - GAIN or self.high > 1 + GAIN)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the factor that `words` says: of old over new, or of new over old where it is slower."""
        return (1 / self.high, 1 / self.low) if self.ratio < 1 - GAIN else (self.low, self.high)

    @property
    def between(self) -> str:
        """`interval` as '(2.50 to 2.70)'."""
        return "({} to {})".format(*map(significant, self.interval))

    def words(self, more: str, less: str, same: str) -> str:
        """As `gain`; if `is_open`, a note with the interval: 'no difference in speed shown (0.862 to 2.47 ×)'."""
        if self.is_open:
            return f"no difference in speed shown ({significant(self.low)} to {factor(self.high)})"
        return gain(self.ratio, more, less, same)


def faster(speed: Speed) -> str:
    """'2.60 × faster', '1.20 × slower', 'no gain' or 'no difference in speed shown (0.862 to 2.47 ×)'."""
    return speed.words("faster", "slower", "no gain")


def faster_between(speed: Speed) -> str:
    """`faster` with the interval behind it: '2.60 × faster (2.50 to 2.70)'."""
    return faster(speed) if speed.is_open else f"{faster(speed)} {speed.between}"


def smaller(before: float, after: float) -> str:
    """Two sizes -> '3.10 × smaller', '1.20 × larger' or 'as large'."""
    return gain(before / after, "smaller", "larger", "as large")


def rounded(value: float, digits: int) -> float:
    """A number with that many decimals, ties away from zero: 86.25 -> 86.3, -0.25 -> -0.3. Twelve digits tell what is a tie, as
    a float's own error may make one of decimals a little less."""
    if not abs(value) < 1e12:
        return value  # no decimals among 12 digits, or not finite
    # plus 0.0: a negative number that becomes 0 has no sign
    return float(Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)) + 0.0


def hundredths(value: float, unit: str = "") -> str:
    """Times 100: 0.8601 -> '86.0', with a unit behind it: '86.0 %'."""
    return scaled(value, 100, unit)


def scaled(value: float, scale: float, unit: str = "") -> str:
    """A metric as it is printed: BLEU 0.6841 -> '68.4' (times 100), NIST 8.623 -> '8.62' (times 1)."""
    digits = 1 if scale > 1 else 2
    return f"{rounded(scale * value, digits):.{digits}f}{unit}"


def sentence(words: str) -> str:
    """Capitalize the start of a sentence: 'accuracy' -> 'Accuracy'; the rest keeps its letters."""
    return words[0].upper() + words[1:]


def percent(share: float) -> str:
    """0.8601 -> '86.0 %'."""
    return hundredths(share, " %")


def points(difference: float, unit: str = " points", digits: int = 1) -> str:
    """-0.0012 -> '−0.1 points', with a real minus sign; never '−0.0'."""
    return f"{signed(100 * difference, digits)}{unit}"


def signed(difference: float, digits: int) -> str:
    """-1.25 -> '−1.3', 0.3 -> '+0.3', -0.01 -> '0.0'."""
    value = rounded(difference, digits)
    sign = "−" if value < 0 else "+" if value > 0 else ""
    return f"{sign}{abs(value):.{digits}f}"


def digits_of(low: float, high: float, least: int = 1) -> int:
    """Digits of a difference with this interval, in the unit that is printed: more than `least` where an end of 0.0 would hide
    that it does not hold 0."""
    shown = (few for few in range(least, least + 3) if low <= 0 <= high or (rounded(low, few) and rounded(high, few)))
    return next(shown, least + 3)


def digits_of_points(low: float, high: float) -> int:
    """`digits_of` a difference that is printed in points."""
    return digits_of(100 * low, 100 * high)


def points_between(low: float, high: float, unit: str = "") -> str:
    """An interval of a difference: (-0.0174, 0.0012) -> '−1.7 to +0.1'."""
    digits = digits_of_points(low, high)
    return f"{points(low, '', digits)} to {points(high, unit, digits)}"


def interval(low: float, high: float, scale: float = 100) -> str:
    """(0.835, 0.884) -> '83.5 to 88.4'. Where all draws are equal, as those of rows that are all right, there is no interval:
    twenty such rows are still possible where 83 % of all are right."""
    if low == high:
        return "no spread in the rows"
    return f"{scaled(low, scale)} to {scaled(high, scale)}"


def verdict(low: float, high: float, than: str = "dense") -> str:
    """Verdict from a paired 95 % interval of metric(compressed) - metric(dense), or than that of another model."""
    if low <= 0 <= high:
        return f"not distinguishable from {than}"
    return f"worse than {than}" if high < 0 else f"better than {than}"


def milliseconds(value: float) -> str:
    """12.345 -> '12.3 ms'."""
    return f"{significant(value)} ms"


def giga(count: float) -> str:
    return f"{significant(count / 1e9)} G"


def human_seconds(seconds: float) -> str:
    """0.42 -> '0.4 s', 78 -> '78 s', 3700 -> '1 h 2 min'."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def limit_share(cell: dict[str, Any]) -> str:
    """Least time over p50: '61.2 %', with '(memory)' where the memory rate decides; '' where the rate is unknown."""
    if "limit_share" not in cell:
        return ""
    return percent(cell["limit_share"]) + (" (memory)" if cell["limit"] == "memory" else "")


def limits_text(limits: dict[str, Any] | None) -> str:
    """'366 GFLOP/s in fp32, 4,100 GFLOP/s in int8 (fastest matrix product); memory 24.6 GB/s (copy, read and written)'."""
    if not limits:
        return ""
    rates = [f"{significant(rate / 1e9)} GFLOP/s in {name}" for name, rate in limits.items() if name not in ("memory", "how")]
    memory = f"memory {significant(limits['memory'] / 1e9)} GB/s (copy, read and written)"
    return f"{', '.join(rates)} (fastest matrix product); {memory}; measured in the same run, with the same threads"


def markdown(text: Any) -> str:
    """Escape plain text for a Markdown line or table cell: no part of it becomes markup."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_~|\[\]])", r"\\\1", " ".join(escaped.split()))
