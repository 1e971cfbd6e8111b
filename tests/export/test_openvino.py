"""OpenVINO's fp32 against PyTorch over many shapes and architectures, and its static int8, calibrated on padded rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compressor.errors import UserError
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.features import torch_forward
from export.onnx import trace
from export.openvino import export_openvino
from export.parity import compare
from export.sessions import run, session
from tests.compressor.conftest import TRIED, tiny
from tests.export.conftest import MODELS, encoding

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

ROOT = Path(__file__).parents[2]
SHAPES = [(1, 1), (1, 7), (3, 33), (8, 60), (2, 2)]
ROWS = [encoding(4, length) for length in (5, 9, 17, 40)]


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory):
    """name -> the files of both precisions, made on first use."""
    found = {}

    def make(name):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = export_openvino(exported(name).graph, folder, precisions=("fp32", "int8"), rows=ROWS)
        return found[name]

    return make


def assert_equal(model, live):
    forward = torch_forward(model)
    for shape in SHAPES:
        batch = encoding(*shape)
        reference = forward(batch)
        result = compare("export", "onnx", reference, run(live, batch), reference.argmax(axis=1))
        assert result.passed, (shape, result)


@pytest.mark.parametrize("name", ["bert-unequal", "mpnet-dense", pytest.param("mpnet-unequal", marks=pytest.mark.slow)])
def test_fp32_equals_pytorch(name, exported, made):
    live = session(made(name)["fp32"], runtime="openvino")
    assert [(value.name, value.shape) for value in live.get_inputs()] == [
        ("input_ids", [None, None]),
        ("attention_mask", [None, None]),
    ]
    assert [(value.name, value.shape) for value in live.get_outputs()] == [("logits", [None, 3])]
    assert_equal(exported(name).model, live)


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["bert-unequal", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)])
def test_static_int8_is_close_and_small(name, exported, made):
    batch, paths = encoding(8, 20), made(name)
    reference = torch_forward(exported(name).model)(batch)
    answer = run(session(paths["int8"], runtime="openvino"), batch)
    # calibrated activations are coarser than those that dynamic int8 scales anew for each batch
    assert np.abs(answer - reference).max() < 0.15 * np.abs(reference).max()
    assert paths["int8"].with_suffix(".bin").stat().st_size < 0.5 * paths["fp32"].with_suffix(".bin").stat().st_size


def test_a_second_export_is_equal_byte_for_byte_holds_no_paths_and_prints_nothing(tmp_path, exported, made, capfd):
    export_openvino(exported("bert-unequal").graph, tmp_path, precisions=("fp32", "int8"), rows=ROWS)
    assert capfd.readouterr().out == ""
    first, second = files_in(made("bert-unequal")["fp32"].parent), files_in(tmp_path)
    assert first == second
    assert sorted(second) == ["model.bin", "model.xml", "model_int8.bin", "model_int8.xml"]
    assert not any(b"/tmp" in content or b"site-packages" in content for content in second.values())


def test_nobody_is_told():
    """Neither by OpenVINO nor by NNCF, whoever imports them first: transformers' exporters do."""
    script = (
        "import sys, export.onnx, transformers.exporters.quantizers.quantizer_nncf as q; print(q.nncf.telemetry.telemetry, "
    )
    script += "sys.modules['openvino'] and sys.modules['openvino_telemetry'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "MagicMock" in done.stdout and done.stdout.split()[-1] == "None"
