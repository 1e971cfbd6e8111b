"""What becomes of an exported file that fails: what is shipped is gated, int8 is repaired, and what is left out is told."""

import logging
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch

from compressor.errors import CheckError, UserError
from compressor.tasks.data import Data
from export.auto import choose as precision
from export.graph.trace import stamp
from export.parity.compare import compare, require
from export.runtimes.runtime_registry import DEFAULT
from export.runtimes.sessions import failures, session
from pipelines.engine.stage import Inputs
from pipelines.stages.export import exported as export
from pipelines.stages.export import generators
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import Exported, export_one
from pipelines.stages.export.generators import _proven
from pipelines.stages.export.precision import PrecisionSearch
from pipelines.stages.export.proving import COMPRESSED, Prover
from tests.compressor.conftest import tiny
from tests.loud import LOUD, loud_graph, loud_model
from tests.pipelines.test_precision import rows_of


def workspace(folder):
    """Keeps what is said and what is proven."""
    said, proven, bar = [], [], SimpleNamespace(advance=lambda steps=1: None)
    parts = {"say": said.append, "proven": proven.append, "log": logging.getLogger()}
    return SimpleNamespace(folder=folder, progress=lambda *_: nullcontext(bar), said=said, records=proven, **parts)


@pytest.fixture(scope="module")
def traced_once(tmp_path_factory):
    """(the loud model, its data, its graph): tracing takes most of the time."""
    model = loud_model()
    data = Data(rows_of(model, 40), rows_of(model, 60), ["a", "b", "c"], 1)
    return model, data, stamp(loud_graph(tmp_path_factory.getbasetemp()), model)


@pytest.fixture
def made(tmp_path, monkeypatch, traced_once):
    """Exports the loud model under a name: (what was exported, the workspace)."""
    model, data, graph = traced_once
    monkeypatch.setattr(export, "traced", lambda *_: graph)
    inputs, space = Inputs(None, SimpleNamespace(max_length=64), 0, threads=1), workspace(tmp_path)

    def make(name, **config):
        return export_one(name, model, ExportConfig(**config), data, space, inputs), space

    return make


@pytest.mark.parametrize("config", [{}, {"runtime": ["openvino"], "precision": ["fp32"]}, {"precision": "auto"}])
def test_training_rows_are_tokenized_only_for_what_is_calibrated(config):
    class Unread(Data):
        @property
        def train(self):
            raise AssertionError("tokenized for nothing")

    assert export.calibration(ExportConfig(**config), Unread(None, None, [], 0), 0) == []


def test_a_dense_file_is_repaired_as_one_that_is_shipped_would_be(made):
    """Without its int8 the whole speed of int8 would pass for that of compression."""
    exported, space = made("dense")
    file = exported.files["onnxruntime"]["int8"]
    assert file["excluded"] == [LOUD] and "a loss is shown" in file["repaired"] and exported.failures == []
    assert [(record["passed"], record["gated"]) for record in exported.parity] == [(True, False)] * 2
    assert space.said[0].startswith("dense: PyTorch -> ONNX int8: beyond its bound (") and "in fp32" in space.said[0]
    assert space.said[-1] == "dense: PyTorch -> ONNX int8: passes with 1 matrix in fp32"


def test_a_dense_file_beyond_its_bound_is_a_row_that_says_so(made, monkeypatch):
    monkeypatch.setattr(precision, "MOST_EXCLUDED", 0.0)
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
    assert exported.parity[1]["told"] and exported.parity[1]["told"] in space.said, "60 rows show no point"
    assert space.said[-1] == "compressed: PyTorch -> ONNX int8: passes with 1 matrix in fp32"
    assert (space.folder / file["path"]).is_file()


def test_what_cannot_be_repaired_is_left_out_and_the_rest_goes_on(made, monkeypatch):
    monkeypatch.setattr(precision, "MOST_EXCLUDED", 0.0)
    exported, space = made(COMPRESSED)
    assert list(exported.files["onnxruntime"]) == ["fp32"] and not list(space.folder.rglob("model_int8.onnx"))
    (failure,) = exported.failures
    assert failure["code"] == "E610" and "compressed: PyTorch -> ONNX int8: not the same function" in failure["what"]
    assert "The file is left out, the rest of the run went on" in failure["what"] and failure["fix"]


@pytest.mark.parametrize("name", ["dense", COMPRESSED])
def test_a_repair_that_does_not_run_stops_nothing(made, monkeypatch, name):
    """A dense file is then the one that failed, written again; a shipped one is left out."""

    def damaged(*args):
        paths = write_runtime(*args)
        if args[-1] == (LOUD,):
            paths["int8"].write_bytes(paths["int8"].read_bytes()[:1000])
        return paths

    write_runtime = export.write_runtime
    monkeypatch.setattr(export, "write_runtime", damaged)
    exported, space = made(name)
    assert [failure["code"] for failure in exported.failures] == ["E610"] * (name == COMPRESSED)
    assert list(exported.files["onnxruntime"]) == ["fp32", "int8"][: 2 - (name == COMPRESSED)]
    if name == "dense":
        file, kept = exported.files["onnxruntime"]["int8"], exported.parity[1]
        assert kept["verdict"] == "beyond its bound" and "excluded" not in file
        assert session(space.folder / file["path"], runtime=DEFAULT, threads=1) is not None


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


@pytest.fixture
def without_memory(monkeypatch):
    """Lets a method of ONNX Runtime's sessions of int8 files fail for want of memory, from its call of a number on."""

    def fail(method, number=1):
        class Full(onnxruntime.InferenceSession):
            def __init__(self, path, *args, **options):
                self.path = path
                full(self, "__init__")
                super().__init__(path, *args, **options)

            def run(self, *args, **options):
                full(self, "run")
                return super().run(*args, **options)

        calls = Counter()

        def full(live, name):
            calls[name] += str(live.path).endswith("model_int8.onnx")
            if name == method and calls[name] >= number:
                raise failures()[0]("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad allocation")

        monkeypatch.setattr(onnxruntime, "InferenceSession", Full)

    return fail


@pytest.mark.parametrize("name", ["dense", COMPRESSED])
@pytest.mark.parametrize(("method", "number"), [("run", 1), ("__init__", 1), ("__init__", 2)])
def test_memory_that_is_used_up_ends_the_stage(made, without_memory, name, method, number):
    """While a file runs, is opened, or is opened once repaired: a file that was left out would stay so with memory again."""
    without_memory(method, number)
    with pytest.raises(UserError, match=r"E908 .*no memory left\. .*, or leave a precision or runtime out of export"):
        made(name)


def test_memory_that_is_used_up_ends_the_search_of_a_precision(tmp_path, without_memory, traced_once):
    model, data, graph = traced_once
    inputs = Inputs(None, SimpleNamespace(max_length=64), 0, threads=1)
    search = PrecisionSearch(model, ExportConfig(precision="auto"), data, workspace(tmp_path), inputs, tmp_path)
    vars(search).update(graph=graph, rows=[])
    without_memory("__init__")
    with pytest.raises(UserError, match="E908 this machine has no memory left"):
        search.narrow()


def test_few_validation_rows_are_joined_by_training_rows(made):
    exported, _ = made("dense")
    assert [record["rows"] for record in exported.parity] == [60, 60] and exported.parity[1]["answers"] == 100


@pytest.mark.parametrize(("generates", "verdict"), [(True, "passed"), (False, "beyond its bound")])
def test_a_dense_file_that_generates_other_tokens_is_beyond_its_bound(tmp_path, monkeypatch, generates, verdict):
    """Its logits on rows of the task are right, with an empty cache: it may not be the rival in a report all the same."""
    space, exported, logits = workspace(tmp_path), Exported(), np.eye(3)
    rows = compare("dense: PyTorch -> ONNX int8", "fp32", logits, logits, logits.argmax(axis=1))
    said = {"compare": lambda *_: replace(rows, gated=False), "outputs": lambda *_: None, "quality": lambda *_: {}}
    prover = SimpleNamespace(name="dense", gated=False, workspace=space, **said)
    (tmp_path / "model_int8.onnx").write_bytes(b"")
    proof = {"passed": generates, "agreement": 0.5, "bound": "90 %", "batches": {}, "generated": 4, "generated_agreement": 0.5}
    monkeypatch.setattr(generators, "prove_generator", lambda *_, **__: proof)
    assert _proven(prover, None, "int8", [tmp_path / "model_int8.onnx"], exported) == proof
    assert [(record["passed"], record["verdict"]) for record in exported.parity] == [(generates, verdict)]
    assert any("the tokens generated after random prompts differ" in line for line in space.said) is not generates
    assert list(exported.files["onnxruntime"]) == ["int8"] and not exported.failures


@pytest.mark.parametrize("name", ["dense", COMPRESSED])
def test_memory_that_is_used_up_is_no_fault_of_a_generator(tmp_path, monkeypatch, name):
    path, exported = tmp_path / "model_int8.onnx", Exported()
    path.write_bytes(b"")

    def full(*_, **__):
        raise failures()[0]("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad allocation")

    monkeypatch.setattr("export.generation.generator_files.compare_generated", full)
    prover = SimpleNamespace(name=name, gated=name == COMPRESSED, workspace=workspace(tmp_path))
    with pytest.raises(UserError, match="E908 this machine has no memory left"):
        _proven(prover, None, "int8", [path], exported)
    assert not exported.failures


@pytest.mark.parametrize(("precision", "failed"), [("fp32", False), ("int8", True)])
@pytest.mark.parametrize("opens", [False, True])
def test_a_generator_that_does_not_run_is_left_out(tmp_path, monkeypatch, precision, failed, opens):
    """A dense one, whatever its precision; of what is shipped fp32 stops the run, and any other is a failure."""
    space, path = workspace(tmp_path), tmp_path / "model.onnx"

    def broken(*_, **__):
        raise failures()[0]("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Invalid dimensions")

    if opens:
        monkeypatch.setattr("export.generation.generator_files.compare_generated", broken)
    for name in ("dense", COMPRESSED):
        exported = Exported()
        prover = SimpleNamespace(name=name, gated=name == COMPRESSED, workspace=space)
        path.write_bytes(b"")
        stops = pytest.raises(CheckError if opens else UserError, match="E611" if opens else "E602")
        with nullcontext() if name == "dense" or failed else stops:
            assert _proven(prover, None, precision, [path], exported) is None and not path.exists()
        assert len(exported.failures) == (failed and name == COMPRESSED) and not exported.files
        assert str(tmp_path) not in str(exported.failures), "the folder is gone when it is read"
    assert [line.split(" (")[0] for line in space.said][:1] == [f"dense: PyTorch -> ONNX {precision}: left out"]


@pytest.mark.parametrize(
    ("name", "precision", "ends"), [(COMPRESSED, "fp32", True), (COMPRESSED, "int8", False), ("dense", "fp32", False)]
)
def test_a_generator_that_differs_is_refused_with_what_helps_in_a_run(tmp_path, monkeypatch, name, precision, ends):
    """`compress export` has --no-fuse, a run has not."""
    refusals, logits = [], np.eye(3)

    def compared(loaded, precision, paths, refuse):
        refusals.append(refuse)
        return compare("PyTorch -> file", "fp32", logits, logits, logits.argmax(axis=1)), [True]

    monkeypatch.setattr("export.generation.generator_files.compare_generated", compared)
    said = {"compare": lambda *_: None, "outputs": lambda *_: None, "quality": lambda *_: {}}
    prover = SimpleNamespace(name=name, gated=name == COMPRESSED, workspace=workspace(tmp_path), **said)
    with suppress(Exception):  # what follows is of other tests
        _proven(prover, None, precision, [tmp_path / "model.onnx"], Exported())
    assert refusals == [require if ends else None]


def test_a_model_that_cannot_be_traced_is_the_users_error(monkeypatch):
    """Whatever the exporter raises."""
    model = tiny("bert", torch.float32)
    data, base = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1), SimpleNamespace(reference="org/name")
    monkeypatch.setattr(export, "trace", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"E622 org/name: this model cannot be traced \(ZeroDivisionError: division by zero\)"):
        export.traced(model, data, base)


def test_no_layer_is_suspected_where_rounding_explains_what_moves(tmp_path):
    """The metric alone refuses: every layer of a sound int8 file is a little off, and the first is as good as the last."""
    model, result = loud_model(), SimpleNamespace(failed=("metric",), rounding=0.1)
    data = Data(rows_of(model, 8), rows_of(model, 8), ["a", "b", "c"], 1)
    assert Prover(COMPRESSED, model, data, workspace(tmp_path)).suspect(result, DEFAULT, tmp_path / "model_int8.onnx") == ""
