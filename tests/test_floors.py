"""The architecture as a test: an import only ever points down, and what must start fast loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.engine.stage import STAGE_NAMES

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("compressor", "export", "serving", "pipelines")
"""Lowest first."""
LIGHT = ("pipelines.cli.commands", "serving.server", "serving.client", "compressor", "export.parity.compare")


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("floor", FLOORS)
def test_no_floor_imports_a_higher_one(floor):
    higher = set(FLOORS[FLOORS.index(floor) + 1 :])
    files = [path for path in (ROOT / floor).rglob("*.py")]
    assert files
    assert {str(path.relative_to(ROOT)) for path in files if imported(path) & higher} == set()


def compared(path: Path) -> set[str]:
    """Names of stages that a file compares something with, but for kinds of artifacts, one of which is called as its stage."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and not ast.unparse(node.left).endswith("kind"):
            constants = [one.value for side in node.comparators for one in ast.walk(side) if isinstance(one, ast.Constant)]
            names |= set(STAGE_NAMES) & {one for one in constants if isinstance(one, str)}
    return names


def test_nobody_asks_for_a_stage_by_its_name():
    """A row of the stage table says by its traits what the stage does: a new stage must not be unknown anywhere."""
    found = {str(path.relative_to(ROOT)): compared(path) for path in (ROOT / "pipelines").rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'onnxruntime', 'plotly'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
