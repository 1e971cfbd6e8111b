"""Where the time of a pass goes: operators by kind of work, in both runtimes; no assertion on a time."""

import importlib.util
import subprocess

import numpy as np
import pytest

from export.latency.measure import LatencyVariant
from export.latency.profiling import OUTSIDE, account, measure_profile
from export.runtimes import onnxruntime_profile, openvino_profile
from export.runtimes.onnxruntime_profile import operators_of
from export.runtimes.openvino import export_openvino
from export.runtimes.openvino_profile import work_of
from export.runtimes.runtime import OperatorTimes, PassProfile, Work
from export.runtimes.runtime_registry import RUNTIMES
from tests.export.conftest import encoding


def node(name, type_, ts, dur):
    return {"cat": "Node", "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {"op_name": type_}}


def test_a_trace_gives_every_operators_times_in_the_last_passes():
    events = [{"cat": "Session", "name": "model_loading_uri", "ts": 0, "dur": 5, "args": {}}]
    for start, duration in ((100, 9000), (20_000, 3000), (30_000, 1000), (40_000, 2000)):
        events += [node("query", "MatMul", start + 1, duration), node("key", "MatMul", start + 2, 500)]
        events += [node("odd", "Novel", start + 3, 100)]
        events += [{"cat": "Session", "name": "model_run", "ts": start, "dur": duration + 700, "args": {}}]
    assert operators_of(events, 3) == [
        OperatorTimes(Work.PRODUCTS_FP32, "MatMul", (3.0, 1.0, 2.0)),
        OperatorTimes(Work.PRODUCTS_FP32, "MatMul", (0.5,) * 3),
        OperatorTimes(Work.OTHER, "Novel", (0.1,) * 3),
    ]


@pytest.mark.parametrize(
    ("type_", "kernel", "joined", "work"),
    [
        ("FullyConnected", "brgemm_avx512_amx_I8", False, Work.PRODUCTS_INT8),
        ("FullyConnectedQuantizedLegacy", "brgemm_avx512_amx_i8", False, Work.PRODUCTS_INT8),
        ("FullyConnected", "gemm_mlas_f32", False, Work.PRODUCTS_FP32),
        ("MatMul", "brgemm_avx512_amx_bf16", False, Work.PRODUCTS_BF16),
        ("Subgraph", "jit_avx512_i8", True, Work.ATTENTION),
        ("Subgraph", "jit_avx512_i8", False, Work.ELEMENTWISE),
        ("MVN", "jit_avx512_f32", False, Work.NORMALIZATION),
        ("Novel", "ref_any_f32", False, Work.OTHER),
    ],
)
def test_the_kind_of_work_of_openvinos_operators(type_, kernel, joined, work):
    assert work_of(type_, kernel, with_softmax=joined) is work


@pytest.mark.parametrize("module", [onnxruntime_profile, openvino_profile])
def test_an_operator_type_is_of_one_kind(module):
    assert len(module.WORK) == sum(len(names) for names in module.TYPES.values())


def test_the_kinds_add_up_to_the_pass_and_a_new_type_is_named():
    """Of three passes, one was delayed in an operator and one outside: neither counts."""
    operators = (
        OperatorTimes(Work.PRODUCTS_INT8, "MatMul", (4.0, 4.0, 90.0)),
        OperatorTimes(Work.OTHER, "Novel", (3.0, 3.0, 3.0)),
        OperatorTimes(Work.PRODUCTS_INT8, "Gemm", (1.0, 1.0, 1.0)),
    )
    entry = account(PassProfile((10.0, 50.0, 96.0), operators))
    assert entry == {
        "ms": 10.0,
        "passes": 3,
        "kinds": [
            {"kind": "matrix products, int8", "ms": 5.0, "share": 0.5, "types": {"MatMul": 4.0, "Gemm": 1.0}},
            {"kind": "other", "ms": 3.0, "share": 0.3, "types": {"Novel": 3.0}},
            {"kind": OUTSIDE, "ms": 2.0, "share": 0.2, "types": {OUTSIDE: 2.0}},
        ],
    }


@pytest.fixture(scope="module")
def files(exported, tmp_path_factory):
    """(runtime, precision) -> file of one tiny model."""
    model = exported("bert-dense")
    found = {("onnxruntime", "fp32"): model.fused, ("onnxruntime", "int8"): model.int8}
    if importlib.util.find_spec("openvino") and importlib.util.find_spec("nncf"):
        folder = tmp_path_factory.mktemp("profiled")
        found["openvino", "fp32"] = export_openvino(model.graph, folder, precisions=("fp32",))["fp32"]
    return found


SEEN = {
    ("onnxruntime", "fp32"): {Work.PRODUCTS_FP32, Work.PROJECTED_ATTENTION, Work.NORMALIZATION, Work.ACTIVATION},
    ("onnxruntime", "int8"): {Work.PRODUCTS_INT8, Work.PROJECTED_ATTENTION, Work.NORMALIZATION, Work.CONVERSION},
    ("openvino", "fp32"): {Work.PRODUCTS_FP32, Work.ATTENTION, Work.NORMALIZATION, Work.GATHER},
}


@pytest.mark.parametrize(("runtime", "precision"), SEEN)
def test_a_models_operators_are_all_of_a_known_kind(files, runtime, precision):
    if (runtime, precision) not in files:
        pytest.skip("the extra openvino is not installed")
    profile = RUNTIMES[runtime].profile(files[runtime, precision], encoding(2, 8), 1, warm=1, passes=2)
    kinds = {operator.work for operator in profile.operators}
    assert SEEN[runtime, precision] <= kinds and Work.OTHER not in kinds
    assert len(profile.ms) == 2 and np.isfinite([operator.ms for operator in profile.operators]).all()


def test_a_profile_is_taken_in_a_process_of_its_own(files):
    file = LatencyVariant("int8", "onnxruntime", files["onnxruntime", "int8"], vocabulary=99)
    profile = measure_profile(file, 2, 8, 1)
    assert (profile["batch"], profile["length"], profile["passes"]) == (2, 8, 10)
    assert sum(kind["share"] for kind in profile["kinds"]) == pytest.approx(1)
    times = [kind["ms"] for kind in profile["kinds"]]
    assert times == sorted(times, reverse=True)


def test_what_cannot_be_profiled_has_none(tmp_path, monkeypatch):
    """A path without a file, a runtime without a profiler, a process that hangs."""
    assert measure_profile(LatencyVariant("broken", "onnxruntime", tmp_path), 1, 8, 1) is None
    assert measure_profile(LatencyVariant("engine", "tensorrt", tmp_path), 1, 8, 1) is None

    waited = []

    def hang(*arguments, timeout, **options):
        waited.append(timeout)
        raise subprocess.TimeoutExpired(arguments, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    for ms in (1.0, 60_000.0):
        assert measure_profile(LatencyVariant("slow", "onnxruntime", tmp_path), 1, 8, 1, ms) is None
    assert waited[0] < 200 and waited[1] > 13 * 60 * 2, "seconds"
