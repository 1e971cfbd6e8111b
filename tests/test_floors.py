"""The architecture as a test: an import only ever points down, and what must start fast loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'onnxruntime', 'plotly'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
