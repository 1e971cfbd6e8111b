"""docs/errors.md, the source and the tests list the same codes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"\bE[1-9]\d\d\b")
ERRORS = ("CompressError", "UserError", "UserErrors", "CheckError", "Problem")


def documented() -> list[str]:
    return re.findall(r"^\| (E\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.M)


def test_every_code_is_documented_and_every_documented_code_exists():
    sources = [path for floor in ("compressor", "pipelines", "export", "serving") for path in (ROOT / floor).rglob("*.py")]
    texts = [path.read_text() for path in sources if path != ROOT / "compressor" / "errors.py"]
    used = {code for text in [*texts, (ROOT / "Makefile").read_text()] for code in CODE.findall(text)}
    assert sorted(used) == documented(), "each once, in order"


def test_every_row_tells_cause_and_fix():
    rows = [line for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if line.startswith("| E")]
    for row in rows:
        _, code, cause, fix, end = re.split(r"(?<!\\)\|", row)
        assert CODE.fullmatch(code.strip()) and not end and cause.strip() and fix.strip(), row


def test_the_page_tells_every_exit_code_but_2():
    """The class of an error decides its exit code."""
    made = {}
    for floor in ("compressor", "pipelines", "export", "serving"):
        for path in (ROOT / floor).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
            for call in calls:
                if isinstance(call.args[0], ast.Constant) and CODE.fullmatch(str(call.args[0].value)):
                    made.setdefault(ast.unparse(call.func), set()).add(call.args[0].value)
    told = re.findall(r"^\| (E\d{3}) \| Exit code (\d)\. ", (ROOT / "docs" / "errors.md").read_text(), flags=re.M)
    assert {code for code, number in told if number == "3"} == made["CheckError"]
    assert {code for code, number in told if number == "1"} == made["CompressError"]


class Expected(ast.NodeVisitor):
    """The codes in the strings with which tests compare: patterns of `pytest.raises`, asserted lines, tables of mistakes.

    Not in docstrings, which say anything; not in the errors that a test makes itself; not in tests that a machine may skip.
    """

    def __init__(self) -> None:
        self.codes: set[str] = set()

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.codes |= set(CODE.findall(node.value))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        made = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if made not in ERRORS:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any(re.search(r"\bskip|\bneeds_", ast.unparse(mark)) for mark in node.decorator_list):
            self.generic_visit(node)


def expected(source: str) -> set[str]:
    found = Expected()
    found.visit(ast.parse(source))
    return found.codes


@pytest.mark.parametrize(
    ("source", "codes"),
    [
        ("def test_a():\n    with raises(UserError, match=r'E101 .*x'): pass", {"E101"}),
        ("def test_a():\n    assert f'E102 {x}' in error and code == 'E103'", {"E102", "E103"}),
        ("TABLE = [Mistake('a key', ('a', 'b'), 'E104 {file}')]", {"E104"}),
        ("def test_a():\n    '''E105 is raised.'''\n    # E105\n    raise UserError('E105', 'what', 'fix')", set()),
        ("@needs_tensorrt\ndef test_a():\n    assert code == 'E106'", set()),
        ("@pytest.mark.skipif(True, reason='')\ndef test_a():\n    assert code == 'E106'", set()),
        ("RGB = 'FFE107'", set()),
    ],
)
def test_what_counts_as_expected(source, codes):
    assert expected(source) == codes


def test_every_code_is_raised_by_a_test():
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    shown = set().union(*(expected(path.read_text()) for path in tests))
    assert [code for code in documented() if code not in shown] == []
