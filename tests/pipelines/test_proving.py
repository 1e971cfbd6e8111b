"""What becomes of an exported file that fails: what is shipped is gated, int8 is repaired, and what is left out is told."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compressor.errors import CheckError
from compressor.tasks.data import Data
from export.auto import choose as precision
from export.parity.compare import compare
from export.runtimes.runtime_registry import DEFAULT
from pipelines.engine.stage import Inputs
from pipelines.stages.export import exported as export
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import Exported, export_one
from pipelines.stages.export.generators import _proven
from pipelines.stages.export.proving import COMPRESSED, Prover
from tests.compressor.conftest import tiny
from tests.pipelines.test_precision import LOUD, rows_of


def workspace(folder):
    """Keeps what is said and what is proven."""
    said, proven, bar = [], [], SimpleNamespace(advance=lambda steps=1: None)
    parts = {"say": said.append, "proven": proven.append, "log": logging.getLogger()}
    return SimpleNamespace(folder=folder, progress=lambda *_: nullcontext(bar), said=said, records=proven, **parts)


def loud():
    """A model of which int8 breaks one matrix: an input that is a thousand times the others, and is multiplied by 0."""
    model = tiny("bert", torch.float32)
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.bias[0] = 3000.0
        model.bert.encoder.layer[1].output.dense.weight.mul_(4)[:, 0] = 0.0
    return model


@pytest.fixture(scope="module")
def traced_once():
    """(the loud model, its data, its graph): tracing takes most of the time."""
    model = loud()
    data = Data(rows_of(model, 40), rows_of(model, 60), ["a", "b", "c"], 1)
    return model, data, export.traced(model, data)


@pytest.fixture
def made(tmp_path, monkeypatch, traced_once):
    """Exports the loud model under a name: (what was exported, the workspace)."""
    model, data, graph = traced_once
    monkeypatch.setattr(export, "traced", lambda *_: graph)
    inputs, space = Inputs(None, SimpleNamespace(max_length=64), 0, threads=1), workspace(tmp_path)

    def make(name, **config):
        return export_one(name, model, ExportConfig(**config), data, space, inputs), space

    return make


def test_a_dense_file_beyond_its_bound_is_a_row_that_says_so(made):
    exported, space = made("dense")
    fp32, int8 = exported.parity
    assert fp32["verdict"] == "passed" and not int8["passed"] and int8["verdict"] == "beyond its bound" and not int8["gated"]
    assert exported.failures == [] and list(exported.files["onnxruntime"]) == ["fp32", "int8"]
    assert [one for one in space.said if "is beyond its bound" in one and "not deployed" in one]
    assert [record["hop"] for record in space.records] == [fp32["hop"], int8["hop"]]


def test_a_shipped_file_is_repaired_before_it_is_refused(made):
    exported, space = made(COMPRESSED)
    file = exported.files["onnxruntime"]["int8"]
    assert file["excluded"] == [LOUD] and "a loss is shown" in file["repaired"] and exported.failures == []
    assert [record["passed"] for record in exported.parity] == [True, True]
    assert [record["passed"] for record in space.records] == [True, False, True], (
        "every comparison is told, the refused one too"
    )
    assert space.said[-1] == "compressed: PyTorch -> ONNX int8: passes with 1 matrix in fp32"
    assert (space.folder / file["path"]).is_file()


def test_what_cannot_be_repaired_is_left_out_and_the_rest_goes_on(made, monkeypatch):
    monkeypatch.setattr(precision, "MOST_EXCLUDED", 0.0)
    exported, space = made(COMPRESSED)
    assert list(exported.files["onnxruntime"]) == ["fp32"] and not list(space.folder.rglob("model_int8.onnx"))
    (failure,) = exported.failures
    assert failure["code"] == "E610" and "compressed: PyTorch -> ONNX int8: not the same function" in failure["what"]
    assert "The file is left out, the rest of the run went on" in failure["what"] and failure["fix"]


def test_where_nothing_is_left_to_ship_the_stage_stops(made, monkeypatch):
    monkeypatch.setattr(precision, "MOST_EXCLUDED", 0.0)
    with pytest.raises(CheckError, match="E610 compressed: PyTorch -> ONNX int8: not the same function") as caught:
        made(COMPRESSED, precision="int8")
    assert "No file is left to ship. Add a wider precision" in str(caught.value) and "went on" not in str(caught.value)


def test_fp32_that_fails_stops(made, monkeypatch):
    """Its dense twin does not."""

    def spoiled(graph, *args, **options):
        paths = write_runtime(graph, *args, **options)
        onnx_file = paths["fp32"]
        onnx_file.write_bytes(onnx_file.read_bytes().replace(b"\x00\x00\x80\x3f", b"\x00\x00\x90\x3f"))
        return paths

    write_runtime = export.write_runtime
    monkeypatch.setattr(export, "write_runtime", spoiled)
    exported, _ = made("dense", precision="fp32")
    assert exported.parity[0]["verdict"] == "beyond its bound" and exported.failures == []
    with pytest.raises(CheckError, match="E610 compressed: PyTorch -> ONNX fp32"):
        made(COMPRESSED, precision="fp32")


def test_a_dense_file_that_does_not_run_is_left_out_and_stops_nothing(made, monkeypatch):
    def damaged(*args, **options):
        paths = write_runtime(*args, **options)
        paths["int8"].write_bytes(paths["int8"].read_bytes()[:1000])
        return paths

    write_runtime = export.write_runtime
    monkeypatch.setattr(export, "write_runtime", damaged)
    exported, space = made("dense")
    assert list(exported.files["onnxruntime"]) == ["fp32"] and exported.failures == []
    assert [one for one in space.said if "dense: PyTorch -> ONNX int8: left out" in one]


def test_few_validation_rows_are_joined_by_training_rows(made):
    exported, _ = made("dense")
    assert [record["rows"] for record in exported.parity] == [60, 60] and exported.parity[1]["answers"] == 100


@pytest.mark.parametrize(("generates", "verdict"), [(True, "passed"), (False, "beyond its bound")])
def test_a_dense_file_that_generates_other_tokens_is_beyond_its_bound(tmp_path, generates, verdict):
    """Its logits on rows of the task are right, with an empty cache: it may not be the rival in a report all the same."""
    space, exported, logits = workspace(tmp_path), Exported({"onnxruntime": {}}), np.eye(3)
    rows = compare("dense: PyTorch -> ONNX int8", "fp32", logits, logits, logits.argmax(axis=1))
    said = {"compare": lambda *_: replace(rows, gated=False), "outputs": lambda *_: None, "quality": lambda *_: {}}
    prover = SimpleNamespace(name="dense", gated=False, workspace=space, **said)
    (tmp_path / "model_int8.onnx").write_bytes(b"")
    proof = {"passed": generates, "agreement": 0.5, "bound": "90 %", "batches": {}, "generated": 4, "generated_agreement": 0.5}
    assert _proven(prover, tmp_path / "model_int8.onnx", "int8", proof, exported)
    assert [(record["passed"], record["verdict"]) for record in exported.parity] == [(generates, verdict)]
    assert any("the tokens generated after random prompts differ" in line for line in space.said) is not generates
    assert list(exported.files["onnxruntime"]) == ["int8"] and not exported.failures


def test_no_layer_is_suspected_where_rounding_explains_what_moves(tmp_path):
    """The metric alone refuses: every layer of a sound int8 file is a little off, and the first is as good as the last."""
    model, result = loud(), SimpleNamespace(failed=("metric",), rounding=0.1)
    data = Data(rows_of(model, 8), rows_of(model, 8), ["a", "b", "c"], 1)
    assert Prover(COMPRESSED, model, data, workspace(tmp_path)).suspect(result, DEFAULT, tmp_path / "model_int8.onnx") == ""
