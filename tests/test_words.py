"""Words that only their author understands stay out of code, messages and documents: each has a standard term."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTEAD = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bhollow\b": "weightless (meta) model",
    r"\bHAIR\b|\blest\b": "PRICE_FLOOR, minimum price of a sublayer",
    r"waits for company": "maximum queue delay of dynamic batching",
    r"\bof this house\b": "documented exit codes",
    r"\bhears? (each|every)\b|gradients heard": "each step keeps each gradient element with a probability",
    r"is none to the tokenizer": "the tokenizer produces no token for it",
    r"\bmeans? nothing to\b": "is not used by",
    r"cannot be had": "is out of reach",
    r"\bstrangers?\b": "untrusted",
    r"\bwithout a word\b": "silently",
    r"\bevery other time\b": "about half of the time",
    r"\bby the alphabet\b|order of the alphabet": "alphabetically",
    r"words of a vocabulary": "logits over a vocabulary",
    r"\bknows? no\b": "has no, does not support",
    r"\bburnt into\b": "is a constant of the graph",
    r"comes out as it went in": "is unchanged afterwards",
    r"one behind (the other|another)": "concatenated, one after the other",
    r"\bis no (file|folder|path|url|run|multiple|readable)\b": "is not a",
    r"\bsilenced units\b": "masked units",
    r"\bevery hop\b|\bhops of\b|\bits hop\b": "check, conversion",
    r"\bplaces that\b|\bsparse places\b": "positions",
}
"""A pattern, and what to write in its place."""


@functools.cache
def texts() -> dict[Path, str]:
    """What code and documents say."""
    folders = ("compressor", "export", "serving", "pipelines", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".j2", ".yaml")]
    return {path: path.read_text() for path in (*found, ROOT / "README.md", ROOT / "SECURITY.md")}


@pytest.mark.parametrize("pattern", INSTEAD)
def test_a_word_that_has_a_standard_term_is_not_used(pattern):
    word = re.compile(pattern, re.IGNORECASE if pattern.islower() else 0)
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts().items()
        if word.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if word.search(line)
    ]
    assert lines == [], f"write: {INSTEAD[pattern]}"
