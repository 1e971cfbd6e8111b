"""The answer in a text: its last number, or the last match of a regular expression."""

from __future__ import annotations

import re
from decimal import Decimal

from compressor.tasks.decoding.decode_config import NUMBER

_NUMBER = re.compile(
    r"""(?:(?<![\w)])-)?
    (?:
        (?:[0-9]{1,3}(?P<separator>[, \u00a0\u2009\u202f])[0-9]{3}(?![0-9])  # 1 250, and not 3 40 or 1,2345
            (?:(?P=separator)[0-9]{3}(?![0-9]))*
            (?!,[0-9]{3}(?![0-9]))  # 5 100,000 is two numbers
        |[0-9]+)
        (?:\.[0-9]+)?
    |(?<![\w.])\.[0-9]+)
    (?:[eE][+-]?[0-9]{1,3}(?![0-9]))?""",
    re.VERBOSE,
)
"""A number, perhaps with commas or spaces between thousands (one to three digits, then groups of exactly three), without a
digit before its point (.5), or with an exponent (1e5) of up to three digits: written out, one of more could take gigabytes. A
minus behind a word or a bracket is a subtraction, a point behind a word no part of a number."""
READING = 2
"""Version of how numbers are read, part of the fingerprint of scores: increase it when other numbers are found."""


def answer_of(text: str, pattern: str) -> str | None:
    """The answer in `text`, None if there is none. Numbers are normalized: '1,250.0', '1 250' and '1.25e3' give '1250'."""
    if pattern == NUMBER:
        numbers = [match.group() for match in _NUMBER.finditer(text.replace("−", "-"))]
        return _plain(numbers[-1]) if numbers else None
    matches = [match.group(match.re.groups) for match in re.finditer(pattern, text)]
    return (matches[-1] or "").strip() or None if matches else None


def _plain(number: str) -> str:
    """The shortest way to write a decimal number, without exponent."""
    value = Decimal(re.sub(r"[,\s]", "", number))
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text
