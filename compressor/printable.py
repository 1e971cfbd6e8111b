"""Text of data, labels and names as a terminal may show it."""

from __future__ import annotations

import re

OBEYED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but the tab, and those that override or isolate the direction of writing; mere marks of it stay."""


def printable(line: str) -> str:
    """A line with the characters as escapes, such as \\x1b, that a terminal obeys in place of showing them: with them a label
    clears the screen, fills the clipboard, or reads as another."""
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), line)
