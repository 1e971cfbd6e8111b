"""docs/errors.md and the source list the same codes."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_code_is_documented_and_every_documented_code_exists():
    sources = [path for floor in ("compressor", "pipelines", "export", "serving") for path in (ROOT / floor).rglob("*.py")]
    texts = [path.read_text() for path in sources if path != ROOT / "compressor" / "errors.py"]
    used = {code for text in [*texts, (ROOT / "Makefile").read_text()] for code in re.findall(r"\bE[1-9]\d\d\b", text)}
    documented = re.findall(r"^\| (E\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.M)
    assert sorted(used) == sorted(documented)
