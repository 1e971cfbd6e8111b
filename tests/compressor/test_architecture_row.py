"""An architecture that is not there, added by the row that docs/architectures.md gives as its example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from compressor.models.architectures import ARCHITECTURES
from compressor.models.discovery.discover import as_code, proven_row

DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"
ADDED = """
import sys
import pytest
from compressor.models import architectures
row = eval(sys.argv[1], vars(architectures))
architectures.ARCHITECTURES[row.model_type] = row
sys.exit(pytest.main(sys.argv[2:]))
"""
"""In a process of its own, since the Auto classes would keep what was registered with them."""
HARNESS = {
    "in part": ("nothing_is_left", "same_bits", "reloads_bit_equal", "flops_equal_the_counter"),
    "all of it": ("test_",),
}
"""Removed is masked, saved and loaded by us and by the Auto classes, counted; and the very command of the docs."""


def run_harness(row: str, model_type: str, names: tuple[str, ...], where: list[str]) -> None:
    options = ["-m", "slow or not slow", "-k", f"{model_type} and ({' or '.join(names)})", "-p", "no:cacheprovider", "-rA"]
    command = [sys.executable, "-c", ADDED, row, *where, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parents[1], timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(re.search(rf"PASSED .*{name}.*{model_type}", done.stdout) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["in part", "all of it"])
def test_the_row_in_the_docs_is_all_that_a_new_architecture_takes(which):
    (row,) = re.findall(r"^    (Architecture\(.*\)),$", DOCS.read_text(), re.MULTILINE)
    assert "camembert" in row and "camembert" not in ARCHITECTURES
    names, files = HARNESS[which], [f"tests/compressor/test_{name}.py" for name in ("pruning", "auto", "cost")]
    run_harness(row, "camembert", names, files if which == "in part" else ["tests/compressor"])


@pytest.mark.slow
def test_a_row_that_was_found_is_all_that_it_takes():
    """Nobody wrote it: proposed, proven, printed, and pasted before the whole harness runs on it."""
    row = as_code(proven_row(AutoConfig.for_model("mistral")))
    assert "mistral" not in ARCHITECTURES
    run_harness(row, "mistral", HARNESS["all of it"], ["tests/compressor"])
