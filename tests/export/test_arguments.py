"""What a program gives to the export library by mistake is refused before anything is written or timed."""

from dataclasses import replace

import numpy as np
import pytest

from compressor.errors import UserError
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.selection.choice import weight_score
from export.generation.greedy import open_generator
from export.latency.measure import LatencyVariant, measure
from export.many.stacked_tasks import stack_files
from export.parity.compare import compare
from export.runtimes.onnxruntime import RUNTIME, write_onnx
from export.runtimes.openvino import export_openvino
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import parity_session, run, session
from tests.export.conftest import encoding
from tests.tiny import write_model


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"precisions": ["foo"]}, "precisions is 'foo'"),
        ({"precisions": "int8"}, "precisions is 'int8': give a list"),
        ({"precisions": []}, "precisions is"),
        ({"weight_bits": 5}, "weight_bits is 5"),
        ({"excluded": ["foo"]}, "excluded has 'foo'"),
    ],
)
def test_onnx_files_are_of_what_is_asked_for(tmp_path, exported, wrong, words):
    with pytest.raises(ValueError, match=words):
        write_onnx(exported("bert-dense").graph, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong", [{"precisions": ["foo"]}, {"precisions": "fp32"}, {"precisions": ["fp32"], "excluded": ["foo"]}]
)
def test_openvino_files_are_of_what_is_asked_for(tmp_path, exported, wrong):
    with pytest.raises(ValueError, match=r"precisions is|excluded has"):
        export_openvino(exported("bert-dense").graph, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_sessions_take_paths_as_text_and_known_devices(exported):
    path = exported("bert-dense").fp32
    rows = encoding(2, 5)
    np.testing.assert_array_equal(run(session(str(path)), rows), run(session(path), rows))
    for wrong, words in (
        ({"device": "foo"}, "device is 'foo'"),
        ({"threads": -1}, "threads is -1"),
        ({"threads": 0}, "threads is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            session(path, **wrong)
    with pytest.raises(ValueError, match="precision is 'foo'"):
        parity_session(RUNTIME, path, "foo")


def test_variants_are_told_apart(exported, tmp_path):
    one = LatencyVariant("a", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)
    for variants, rounds, words in (
        ([], 5, "variants are none"),
        ([one, one], 5, "each with a name of its own"),
        ([one, replace(one, name="b", runtime="foo")], 5, "runtime is 'foo'"),
        ([one], 0, "rounds is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            measure(variants, [(1, 4)], rounds)
    with pytest.raises(ValueError, match="batch is 0"):
        measure([one], [(0, 4)], 5)


def test_other_words_are_told(tmp_path):
    weight = np.zeros((2, 2), np.float32)
    for call, words in (
        (lambda: compare("hop", "foo", weight, weight, np.zeros(2, int)), "kind is 'foo'"),
        (lambda: stack_files([], tmp_path), "paths is empty"),
        (lambda: weight_score(None, "foo", 0), "score is 'foo'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for call in (lambda row: row.write(None, tmp_path, precisions=["fp16"]), lambda row: row.open(tmp_path, "cpu", None, {})):
        with pytest.raises(NotImplementedError, match="TensorRT"):
            call(RUNTIMES["tensorrt"])


def test_folders_that_do_not_exist_are_not_sought_elsewhere(tmp_path):
    with pytest.raises(UserError, match=r"E303 .*no such folder"):
        build(tmp_path / "nothing", ["a", "b"])
    with pytest.raises(UserError, match="E602"):
        open_generator(str(tmp_path))
    base = write_model(tmp_path / "base")
    assert resolve(base).reference == str(base) and build(str(base), ["a", "b"]).config.num_labels == 2
