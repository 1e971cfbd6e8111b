"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse


def round_count(text: str) -> int:
    """A number of rounds, for argparse: 2 at least, for fewer have no quartiles. Raises ValueError, ArgumentTypeError."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text} is too few for quartiles: give 2 at least")
    return number
