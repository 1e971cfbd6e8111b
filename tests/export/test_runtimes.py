"""What every runtime must do, one row each: a new runtime is tested here without a line of its own."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import UserError
from compressor.tasks.features import torch_forward
from export.parity.bounds import BOUNDS
from export.parity.compare import compare, require
from export.runtimes.runtime_registry import (
    CPU_PRECISIONS,
    DEFAULT,
    EXTRAS,
    PRECISIONS,
    RUNNABLE,
    RUNTIMES,
    packages_of,
    runtime_of,
)
from export.runtimes.sessions import parity_session, run, session
from serving.backend_files import BACKENDS
from tests.export.conftest import encoding

ROOT = Path(__file__).parents[2]
ROWS = [encoding(4, length) for length in (5, 9, 17, 40)]
WORD = re.compile(rf"(?<![\w./-])({'|'.join(RUNTIMES)})(?![\w/-])")
OWN = ("export/runtimes/", "serving/backends/", "pipelines/doctor/")
"""Where a runtime may be spelt: its row, its Triton backend, and the list of packages that `compress doctor` looks for."""


@pytest.fixture(params=RUNNABLE)
def runtime(request):
    row = RUNTIMES[request.param]
    try:
        row.require(writing=True)
    except UserError as error:
        pytest.skip(str(error))
    return row


def test_its_files_are_written_opened_compared_and_named(runtime, exported, tmp_path):
    made, batch = exported("bert-unequal"), encoding(3, 12)
    precisions = [name for name in runtime.precisions if runtime.computes(name)]
    reference = torch_forward(made.model)(batch)
    paths = runtime.write(made.graph, tmp_path, precisions=precisions, rows=ROWS, fuse=runtime.can_fuse(made.model))
    assert {name: path.name for name, path in paths.items()} == {name: runtime.file_name(name) for name in precisions}
    for precision, path in paths.items():
        lives = [parity_session(runtime, path, precision), *([runtime.open_plain(path)] if precision == "fp32" else [])]
        answers = [run(live, batch) for live in lives]
        assert all(answer.shape == reference.shape and np.isfinite(answer).all() for answer in answers)
        if BOUNDS[precision].difference:
            require(compare("export", precision, reference, answers[0], reference.argmax(axis=1)))
        assert runtime.stored_bytes(path) == sum(file.stat().st_size for file in runtime.files(path).values())
        runtime.remove(path)
    assert not list(tmp_path.iterdir())


def test_its_inputs_and_outputs_are_known_to_the_server(runtime, exported, tmp_path):
    path = runtime.write(exported("bert-dense").graph, tmp_path, precisions=["fp32"])["fp32"]
    inputs, outputs = runtime.tensors(path)
    assert [(one.name, one.type, one.shape) for one in inputs] == [
        ("input_ids", "int64", [-1, -1]),
        ("attention_mask", "int64", [-1, -1]),
    ]
    assert [(one.name, one.type, one.shape) for one in outputs] == [("logits", "float32", [-1, 3])]
    assert (BACKENDS / runtime.backend / "model.py").is_file()


def test_a_damaged_file_and_a_missing_one_are_refused(runtime, tmp_path):
    path = tmp_path / f"damaged{runtime.suffix}"
    for open_it in (lambda: session(path, runtime=runtime), lambda: parity_session(runtime, path, "fp32")):
        path.write_bytes(b"damaged")
        with pytest.raises(UserError, match=r"E602 .*not a readable"):
            open_it()
        path.unlink()
        with pytest.raises(UserError, match=r"E602 .*no such model file"):
            open_it()


def test_memory_that_is_used_up_is_no_fault_of_a_file(runtime, tmp_path, monkeypatch):
    path = tmp_path / f"sound{runtime.suffix}"
    path.write_bytes(b"")

    def full(*_, **__):
        raise runtime.failures()[0]("Exception during initialization: std::bad_alloc")

    monkeypatch.setattr({"onnxruntime": "onnxruntime.InferenceSession", "openvino": "openvino.Core"}[runtime.key], full)
    for open_it in (lambda: session(path, runtime=runtime), lambda: parity_session(runtime, path, "fp32")):
        with pytest.raises(UserError, match="E908 this machine has no memory left"):
            open_it()


def test_a_missing_package_is_told_with_its_extra(runtime, monkeypatch):
    monkeypatch.setattr("export.runtimes.runtime.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"E901 the runtime {runtime.key} needs .*compress-pipeline\[{runtime.extra}\]"):
        runtime.require()


def test_the_table():
    assert DEFAULT.key == RUNNABLE[0] and set(CPU_PRECISIONS) < set(PRECISIONS)
    assert all(key == row.key and row.title and row.label and row.devices() for key, row in RUNTIMES.items())
    assert runtime_of(Path("a.onnx")) is DEFAULT and runtime_of(Path("a.xml")).key == "openvino"
    assert packages_of(["pytorch", "onnxruntime", "openvino"]) == ("onnxruntime", "openvino")
    assert packages_of(["openvino"], writing=True) == ("openvino", "nncf") and EXTRAS["nncf"] == "openvino"


def test_the_rows_load_nothing():
    heavy = "{'numpy', 'onnx', 'onnxruntime', 'openvino', 'torch'}"
    code = f"import export.runtimes.runtime_registry, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def spelt(source: str) -> list[str]:
    """The strings of a file, but for docstrings, that hold a runtime's word."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts]
    return [node.value for node in constants if isinstance(node.value, str) and WORD.search(node.value)]


def test_what_counts_as_spelling_a_word():
    source = '"""openvino"""\nx = ["openvino", f"the runtime onnxruntime", "onnxruntime-gpu", "--tensorrt"]'
    assert spelt(source) == ["openvino", "the runtime onnxruntime"]


def test_no_other_file_spells_a_runtime():
    files = [path for floor in ("compressor", "export", "serving", "pipelines") for path in (ROOT / floor).rglob("*.py")]
    names = {str(path.relative_to(ROOT)): path for path in files}
    found = {name: spelt(path.read_text()) for name, path in names.items() if not name.startswith(OWN)}
    assert {name: words for name, words in found.items() if words} == {}
