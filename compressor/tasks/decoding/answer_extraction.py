"""The answer in a text: its last number, or the last match of a regular expression."""

from __future__ import annotations

import re
from decimal import Decimal

from compressor.tasks.decoding.decode_config import NUMBER

_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)")
"""A number, perhaps with commas between thousands, or without a digit before its point (.5); a minus behind a word or a bracket
is a subtraction, a point behind a word no part of a number."""


def answer_of(text: str, pattern: str) -> str | None:
    """The answer in `text`, None if there is none. Numbers are normalized: '1,250.0' and '1250' give '1250'."""
    if pattern == NUMBER:
        numbers = _NUMBER.findall(text.replace("−", "-"))
        return _plain(numbers[-1]) if numbers else None
    matches = [match.group(match.re.groups) for match in re.finditer(pattern, text)]
    return (matches[-1] or "").strip() or None if matches else None


def _plain(number: str) -> str:
    """The shortest way to write a decimal number, without exponent."""
    value = Decimal(number.replace(",", ""))
    text = f"{value:f}" if value else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text
