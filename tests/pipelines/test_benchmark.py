"""What the benchmark stage does on a real tuned model; its ONNX files are graphs of two nodes, so that nothing is traced."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import GraphOptimizationLevel
from transformers import LlamaConfig, LlamaForCausalLM

import export.runtimes.sessions
from compressor.account import Plan
from compressor.cost import LayerShape, ModelShape
from compressor.deltas.factored import delta_macs
from compressor.deltas.links import merge_all
from compressor.methods import Options, apply
from compressor.models.anatomy import matrices_of
from compressor.models.modules import MODULES
from compressor.models.reference import Reference
from compressor.processor import INSTRUCTIONS
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.tasks.data import MetricInputs
from compressor.tasks.task_kind import kind_of
from export.latency.machine_limits import Limits
from export.latency.measure import LatencyVariant, summarize
from pipelines.engine import environment
from pipelines.engine.environment import package_versions
from pipelines.engine.runner import prepare, run_pipeline
from pipelines.engine.stage import Artifact, Inputs
from pipelines.engine.stage_inputs import fingerprint_of
from pipelines.file.config import load_pipeline
from pipelines.stages.benchmark import costs, timings
from pipelines.stages.benchmark import run as benchmark
from pipelines.stages.benchmark.config import FEWEST_ROUNDS, STAGE, BenchmarkConfig
from pipelines.stages.benchmark.measured_files import Candidate
from pipelines.stages.loading import load_data
from tests.compressor.conftest import tiny
from tests.tiny import write_pipeline

LIMITS = Limits({"fp32": 1e9}, 1e12, {"fp32": "torch.mm"})
STAGES = [{"tune": {"method": "lora", "rank": 2, "modules": ["query"], "epochs": 0.2}}, {"merge": None}]


def write_onnx(path: Path) -> None:
    """A classifier without layers: the mean over (batch, length) of an embedding a token -> logits (batch, 2)."""
    table = numpy_helper.from_array(np.random.default_rng(0).normal(size=(99, 2)).astype(np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["logits"], keepdims=0),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])
    axes = numpy_helper.from_array(np.array([1]), "axes")
    graph = helper.make_graph(nodes, "tiny", [ids], [logits], [table, axes])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """The stage's inputs, with three threads: a tuned and a merged tiny model, and the same ONNX file for both."""
    folder = tmp_path_factory.mktemp("project")
    pipeline = load_pipeline(write_pipeline(folder, stages=STAGES, rows=24))
    made = run_pipeline(pipeline, folder / "runs").artifacts
    write_onnx(folder / "tiny.onnx")
    file = {"path": "tiny.onnx", "bytes": 1}
    files = {name: {"onnxruntime": {"fp32": file, "fp16": file}} for name in ("dense", "compressed")}
    exported = Artifact(folder, "export-0", "onnx", "export", "export", {}, {"files": files})
    base = Reference("./model", folder / "model", "")
    return Inputs(base, pipeline.task, 0, (made["merge"], exported), dense=made["tune"], threads=3)


@pytest.fixture(scope="module")
def measured(ready, tmp_path_factory):
    """(measurements.json, the threads of every session and every latency run as they came)."""
    session, threads = export.runtimes.sessions.session, []

    def watched_session(*arguments, **options):
        live = session(*arguments, **options)
        options = live.get_session_options()
        threads.append(options.intra_op_num_threads)
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert options.graph_optimization_level == GraphOptimizationLevel.ORT_ENABLE_ALL
        return live

    def watched(measure):
        def measured(*arguments, **options):
            threads.append(options.get("threads"))
            return measure(*arguments, **options)

        return measured

    folder = tmp_path_factory.mktemp("measured")
    bar = SimpleNamespace(advance=lambda steps=1: None)
    workspace = SimpleNamespace(folder=folder, progress=lambda description, total: nullcontext(bar), say=lambda text: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.runtimes.sessions, "session", watched_session)
        for name in ("measure", "measure_passes"):
            patch.setattr(timings, name, watched(getattr(timings, name)))
        patch.setattr(timings, "measure_limits", lambda count: threads.append(count) or LIMITS)
        benchmark.run(BenchmarkConfig(batch=[1, 4], length=[8], rounds=6, profile=True), ready, workspace)
    return json.loads((folder / "measurements.json").read_text()), threads


@pytest.mark.slow
def test_the_pipelines_threads_reach_the_sessions_and_the_latency_workers(measured):
    assert measured[1] == [3, 3, 3, 3, 3]


@pytest.mark.slow
def test_the_measurements_name_their_machine(measured):
    machine = measured[0]["machine"]
    assert machine["threads"] == 3 and machine["cpu"] and machine["cores"] >= 1
    flags = Path("/proc/cpuinfo").read_text().split()
    assert machine["instructions"] == [name for name in INSTRUCTIONS if name in flags] != []
    assert machine["packages"] == package_versions(STAGE)
    assert measured[0]["providers"] == {"onnxruntime": "CPUExecutionProvider"}


@pytest.mark.slow
def test_files_for_cuda_are_left_out_on_the_cpu_and_that_is_told(measured):
    account = measured[0]
    assert [row["name"] for row in account["candidates"]] == ["dense PyTorch fp32", "dense ONNX fp32", "compressed ONNX fp32"]
    assert [row["name"] for row in account["left_out"]] == ["dense ONNX fp16", "compressed ONNX fp16"]


@pytest.mark.slow
def test_every_latency_has_its_share_of_the_machines_limit(measured):
    account = measured[0]
    assert account["limits"] == {"fp32": 1e9, "memory": 1e12, "how": {"fp32": "torch.mm"}}
    for row in account["candidates"]:
        for cell in row["latency"]:
            share = 1000 * cell["batch"] * row["flops"]["8"] / 1e9 / cell["p50"]
            # files leave out of the last block what the head does not read
            expected = pytest.approx(share) if row["runtime"] == "pytorch" else pytest.approx(0.75 * share, rel=0.3)
            assert cell["limit"] == "compute" and cell["limit_share"] == expected
        for cell in row["real_lengths"]:
            assert (
                len(cell["batch_shapes"]) == cell["batches"] and sum(rows for rows, _ in cell["batch_shapes"]) == cell["rows"]
            )
            assert cell["limit"] == "compute" and cell["limit_share"] > 0


@pytest.mark.parametrize(
    ("exports", "again"),
    [
        ([["onnxruntime"]], False),
        ([["onnxruntime", "openvino"]], True),
        ([["openvino"], ["onnxruntime"]], False),
        ([["onnxruntime"], ["openvino"]], True),
    ],
)
def test_times_are_those_of_one_version_of_the_runtimes_of_the_last_export(tmp_path, monkeypatch, exports, again):
    """A new version may compute the same file in another time."""
    stages = [*STAGES, *({"export": {"runtime": runtimes}} for runtimes in exports), {"benchmark": {"length": [8]}}]
    run = prepare(load_pipeline(write_pipeline(tmp_path, stages=stages)), tmp_path / "runs")
    last, installed = len(stages) - 1, environment.distribution
    before = fingerprint_of(run, last, ())
    monkeypatch.setattr(environment, "distribution", lambda name: "openvino 0" if name == "openvino" else installed(name))
    assert (fingerprint_of(run, last, ()) != before) == again


def test_unmerged_deltas_are_part_of_the_least_time(tmp_path):
    """12 multiply-adds more for each of 16 tokens, by 12 weights."""
    shape = ModelShape(4, (LayerShape(1, 4, 8),), other=0, head=0, head_macs=8)
    row = Candidate("dense", "dense", "pytorch", "fp32", tmp_path, 1)
    call = (1.0, [(2, 8)], row, shape)
    alone, beside = (costs.share_of(LIMITS, *call, apart) for apart in (None, {"parameters": 12, "macs": 12}))
    assert beside["limit_share"] - alone["limit_share"] == pytest.approx(2 * 16 * 12 / 1e6)
    slow = replace(LIMITS, memory=1.0)
    assert costs.share_of(slow, *call) == {"limit_share": 4e3 * (64 + 64 + 8), "limit": "memory"}
    assert costs.share_of(slow, *call, {"parameters": 12, "macs": 12})["limit_share"] == 4e3 * (64 + 64 + 8 + 12)
    flops = [costs.cost_of(shape, shape, [8], 0, apart)["flops"]["8"] for apart in (None, {"parameters": 12, "macs": 12})]
    assert flops[1] - flops[0] == 2 * 8 * 12
    assert costs.share_of(None, *call) == {}


def test_positions_that_a_file_holds_projected_are_none_of_its_time(tmp_path):
    """Of DeBERTa: PyTorch projects 3 relative positions to 4 rows of 4 in every call, ONNX Runtime when it opens the file."""
    shape = ModelShape(4, (LayerShape(1, 4, 8, positions=3),), other=0, head=0, head_macs=8)
    shares = [
        costs.share_of(LIMITS, 1.0, [(2, 8)], Candidate("dense", "dense", runtime, "fp32", tmp_path, 1), shape)["limit_share"]
        for runtime in ("pytorch", "onnxruntime")
    ]
    assert shares[0] - shares[1] == pytest.approx(2 * 3 * 4 * 4 / 1e6)


@pytest.mark.parametrize(("runtime", "saved"), [("pytorch", False), ("onnxruntime", True)])
def test_tokens_that_the_head_does_not_read_are_none_of_a_file_s_time(runtime, saved, tmp_path):
    """Of each of 2 rows; PyTorch computes them."""
    shape = ModelShape(4, (LayerShape(1, 4, 8),), other=0, head=0, head_macs=8)
    call = (LIMITS, 1.0, [(2, 8)], Candidate("dense", "dense", runtime, "fp32", tmp_path, 1), shape)
    all_tokens, first = (costs.share_of(*call, first=first)["limit_share"] for first in (False, True))
    assert all_tokens - first == pytest.approx(saved * 2 * shape.unread_flops(8) / 1e6)


def test_on_a_gpu_and_where_they_are_not_wanted_or_cannot_be_measured_there_are_no_limits(ready, monkeypatch):
    told, workspace = [], SimpleNamespace(say=lambda text: told.append(text))
    monkeypatch.setattr(timings, "measure_limits", lambda threads: None)
    for config in (BenchmarkConfig(device="cuda"), BenchmarkConfig(machine_limits=False)):
        assert timings.limits_of(config, ready, workspace) is None and not told
    assert timings.limits_of(BenchmarkConfig(), ready, workspace) is None and "could not be measured" in told[0]


@pytest.mark.slow
def test_every_exported_file_says_where_its_time_goes_at_the_largest_shape(measured):
    dense, *files = measured[0]["candidates"]
    assert "profile" not in dense and len(files) == 2
    for row in files:
        profile = row["profile"]
        assert (profile["batch"], profile["length"], profile["passes"]) == (4, 8, 10)
        shown = {kind["kind"]: list(kind["types"]) for kind in profile["kinds"]}
        assert shown["embeddings and gather"] == ["Gather"] and shown["sums and other elementwise"] == ["ReduceMean"]


def test_a_file_without_a_profile_is_told(ready, monkeypatch, tmp_path):
    asked, told, bar = [], [], SimpleNamespace(advance=lambda: None)
    workspace = SimpleNamespace(say=told.append, progress=lambda description, total: nullcontext(bar))
    monkeypatch.setattr(timings, "measure_profile", lambda *file: asked.append(file[1:]))
    files = [LatencyVariant(name, name, tmp_path) for name in ("pytorch", "onnxruntime")]
    times = [("pytorch", 90_000.0), ("onnxruntime", 60_000.0), ("onnxruntime", 1.0)]
    shapes = [summarize(name, 8, 16, [ms]) for name, ms in times]
    assert timings.profiles_of(files, shapes, BenchmarkConfig(), ready, workspace) == {} and not told
    config = BenchmarkConfig(profile=True, batch=[1, 8], length=[16])
    assert timings.profiles_of(files, shapes, config, ready, workspace) == {}
    assert told == ["onnxruntime has no profile: ONNX Runtime gave none in time"]
    assert asked == [(8, 16, ready.threads, 60_000.0)], "slow passes have the more time"


@pytest.mark.slow
def test_every_candidate_is_timed_on_rows_of_their_own_lengths(measured, ready):
    """All 48 validation rows: one at a time, in fours as they come, and in fours sorted by length."""
    for row in measured[0]["candidates"]:
        assert [(cell["order"], cell["batch"]) for cell in row["real_lengths"]] == [
            ("arrival", 1),
            ("arrival", 4),
            ("sorted", 4),
        ]
        assert {(cell["rows"], cell["rounds"]) for cell in row["real_lengths"]} == {(48, FEWEST_ROUNDS)}
        assert [cell["batches"] for cell in row["real_lengths"]] == [48, 12, 12]
        one, arrival, ordered = row["real_lengths"]
        assert one["padding"] == 0 <= ordered["padding"] <= arrival["padding"] < 1


def test_the_rows_are_drawn_with_the_seed_and_not_at_all_where_they_are_not_wanted(ready):
    data = load_data(ready)

    def ids(seed, **config):
        passes = timings.real_passes(BenchmarkConfig(batch=[1], **config), data, seed)
        return [batch["input_ids"].tolist() for timed in passes for batch in timed.batches]

    assert ids(0) == ids(0) != ids(1) and ids(0, real_lengths=False) == []


def test_a_worse_model_is_below_what_it_is_compared_with():
    labels = np.zeros(200, dtype=int)
    right = np.eye(2)[labels]
    worse = np.concatenate([right[:20, ::-1], right[20:]])
    judged, reference = (MetricInputs(outputs, labels, kind_of("classification")) for outputs in (worse, right))
    found = benchmark.quality_of(judged, reference, reference)
    assert found["difference_interval"] == found["control_interval"] and found["difference_interval"][1] < 0


def test_the_papers_flops_count_what_is_left_of_the_deltas(tmp_path, monkeypatch):
    """Every 10th weight, then a head and a neuron less in each block, where the last training merged all deltas."""
    gone = {number: Removal(heads=[0], neurons=[0]) for number in range(3)}

    def model_of(artifact, _=None):
        model = tiny("bert")
        omega = {matrix.path: torch.arange(0, matrix.original.numel(), 10) for matrix in matrices_of(model, MODULES)}
        apply(model, "selective", Options(modules=MODULES, omega=omega, group="1"))
        if artifact.entry == "recover":
            remove(merge_all(model), gone)
        return model

    made = Artifact(tmp_path, "a", "model", "tune", "tune", {}, {})
    cut = Artifact(tmp_path, "b", "model", "recover", "recover", {}, {"density": []})
    cut.metadata["kept"] = kept_of(model_of(cut))
    exported = Artifact(tmp_path, "c", "onnx", "export", "export", {}, {})
    monkeypatch.setattr(costs, "load_model", model_of)
    facts = costs.facts_of_models(tiny("bert"), Inputs(None, None, 0, (made, cut, exported), dense=made))
    tuned = model_of(made)
    whole = delta_macs(tuned)
    remove(tuned, gone)
    left = delta_macs(tuned)
    assert (facts["dense"].deltas, facts["compressed"].deltas) == (whole, left) and left < whole
    small, dense = facts["compressed"].shape, facts["dense"].shape
    ratio = costs.cost_of(small, dense, [8], left)["paper_flops_ratio"]
    assert ratio == (small.linear_macs() + left) / dense.linear_macs()


def test_the_estimate_counts_the_tokens_behind_prompts():
    """Of decoders, on the CPU: each reads all weights."""
    dense = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    ).to("meta")
    plan, rows = Plan(dense, dense, model), {"validation": 50, "mean": 10}
    with_them, without = (BenchmarkConfig(batch=[2], rounds=40, further_tokens=told) for told in (True, False))
    more, less = (STAGE.estimate(config, plan, plan, rows) for config in (with_them, without))
    assert more["flops"] - less["flops"] == 5 * 10 * 2 * dense.flops(128)
    assert more["seconds"] - less["seconds"] == pytest.approx(5 * 10 * 16 * dense.bytes / 10e9)
    # a checkpoint and four files, two of them int8, each in its own process
    assert (less["temporary"], less["memory"]) == (dense.bytes, int(5.5 * dense.bytes) + 5 * 10**8)
    encoder = replace(plan, model=None)
    assert STAGE.estimate(with_them, encoder, encoder, rows) == less
