"""The choice of the fast suite's rows."""

import re
from pathlib import Path

from tests.fast_rows import A_THIRD, FAST_ROWS, ONCE_A_FAMILY

TESTS = Path(__file__).parent


def test_every_name_is_that_of_one_test():
    """A test that was renamed would silently have all of its rows in the fast suite, or share the rows of another."""
    texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")]
    found = [name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    named = {*FAST_ROWS, *A_THIRD, *ONCE_A_FAMILY}
    assert {name: found.count(name) for name in named if found.count(name) != 1} == {}
    assert not {*FAST_ROWS} & {*A_THIRD}
