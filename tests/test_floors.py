"""The architecture as a test: an import only ever points down, and what must start fast loads nothing heavy."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from pipelines.engine.stage import STAGE_NAMES
from tests.fast_rows import A_THIRD, FAST_ROWS, ONCE_A_FAMILY

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("compressor", "export", "serving", "pipelines")
"""Lowest first."""
LIGHT = ("pipelines.cli.commands", "serving.server", "serving.client", "compressor", "export.parity.compare")
HEAVY = {"torch", "transformers", "optimum", "onnxruntime", "plotly"}
"""Libraries that a command loads when it needs them, and not before."""

LONGEST = 400
SAME_NAME = (
    *("pipelines/stages/*/config.py", "pipelines/stages/*/run.py", "serving/backends/*/model.py"),
    "compressor/deltas/kinds/*.py",
)
"""Files that every stage, or every backend, has; and a kind of link, which is called as the method that attaches it."""


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


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    return {module_of(path): path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}


def imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    """Modules of this repository that a file imports: in functions and for type checkers, too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            # a package is no file that is imported where only modules of it are
            names |= inside if inside <= set(known) else {node.module} | inside
    return names & set(known)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules each of which imports each other, over however many steps."""
    reached = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    alike = ({other for other in reached[name] if name in reached[other]} for name in graph if name in reached[name])
    return {frozenset(group) for group in alike if len(group) > 1}


def test_no_files_import_each_other():
    known = modules()
    graph = {name: imported_modules(path, known) - {name} for name, path in known.items()}
    assert circles(graph) == set()


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}) == {frozenset("abc")}


def test_no_file_is_too_long_to_be_read_in_one_sitting():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert {path: count for path, count in lengths.items() if count > LONGEST} == {}


def test_no_two_files_have_one_name():
    """In one room or in two: who says `compare.py` must mean one file."""
    places = defaultdict(list)
    for path in modules().values():
        place = path.relative_to(ROOT)
        if path.name not in ("__init__.py", "__main__.py") and not any(place.match(shape) for shape in SAME_NAME):
            places[path.name].append(str(place))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


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


@pytest.mark.parametrize(
    "module, heavy",
    # `compress check` plans a training and starts none
    [*((name, HEAVY) for name in LIGHT), ("compressor.training.multitask", {"transformers.trainer", "peft"})],
)
def test_importing_loads_nothing_heavy(module, heavy):
    code = f"import {module}, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_rows_of_the_fast_suite_are_of_one_test_each():
    """A test that was renamed would silently have all of its rows there, or share the rows of another."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    found = Counter(name for source in sources for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
    named = {*FAST_ROWS, *ONCE_A_FAMILY, *A_THIRD}
    assert {name: found[name] for name in named if found[name] != 1} == {}
    assert not {*FAST_ROWS} & {*A_THIRD}
