"""`precision: auto` on a model that int8 breaks in one matrix: it is found, left in fp32, and told. And mistakes around it."""

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compressor.errors import CheckError, UserError
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import predict, torch_forward
from compressor.tasks.task_kind import kind_of
from export.auto.choose import Candidate
from export.graph.trace import stamp
from export.latency.measure import summarize
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import run as run_session
from export.runtimes.sessions import session
from pipelines.engine.stage import Inputs
from pipelines.stages.benchmark import config as benchmark
from pipelines.stages.deploy import config as deploy
from pipelines.stages.export import config as export
from pipelines.stages.export import precision
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.proving import repaired
from pipelines.stages.export.run import baseline_of
from tests.compressor.conftest import tiny
from tests.loud import LOUD, loud_graph, loud_model
from tests.pipelines.test_runtimes import entry, problems

AUTO = entry(export, precision="auto")
AUTO_CONFIG = ExportConfig(precision="auto")


def rows_of(model, count):
    """Rows of unequal length, each with the label that the model gives it, and those of which it is the surest."""
    draw = np.random.default_rng(count)
    ids = [draw.integers(3, 99, size=draw.integers(3, 20)).tolist() for _ in range(4 * count)]
    tokens = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    logits = predict(torch_forward(model), tokens, 1)
    surest = np.argsort(np.diff(np.sort(logits, axis=1))[:, -1])[-count:]
    return TokenRows([tokens[row] for row in surest], logits[surest].argmax(axis=1), kind_of("classification"))


def chosen(folder, patch, model):
    """(what was written, account, what was said, data); the clock says that int8 is the fastest."""
    data = Data(rows_of(model, 40), rows_of(model, 60), ["a", "b", "c"], 1)
    bar, said = SimpleNamespace(advance=lambda steps=1: None), []
    workspace = SimpleNamespace(
        folder=folder,
        progress=lambda *_: nullcontext(bar),
        say=said.append,
        log=logging.getLogger(),
        proven=lambda record: None,
    )
    inputs = Inputs(None, SimpleNamespace(max_length=64), 0, threads=1)

    def clock(self, trials):
        self.waited = 0.4
        return [replace(trial, ms=(ms := {"int8": 1.0, "fp32": 2.0}[trial.precision]), speed=2 / ms) for trial in trials]

    patch.setattr(precision.PrecisionSearch, "clock", clock)
    made, account = precision.choose_precision(model, ExportConfig(precision="auto"), data, workspace, inputs)
    return made, account, said, data


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """(records, files, account, folder, what was said, data)."""
    model, folder = loud_model(), tmp_path_factory.mktemp("kept")
    graph = stamp(loud_graph(tmp_path_factory.getbasetemp()), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "traced", lambda *_: graph)
        apart = {"model_int8.onnx": 2}  # as if a file had been written so
        patch.setattr(type(RUNTIMES["onnxruntime"]), "attentions_apart", lambda _, path: apart.get(path.name, 0))
        made, account, said, data = chosen(folder, patch, model)
    return made.parity, made.files, account, folder, said, data


def test_only_the_matrix_that_int8_breaks_stays_in_fp32(kept):
    records, files, account, _, said, _ = kept
    assert account["kept"] == {"runtime": "onnxruntime", "precision": "int8", "excluded": [LOUD]}
    assert [(one["precision"], one["excluded"], one["kept"]) for one in account["tried"]] == [
        ("int8", 0, False),
        ("int8", 1, True),
        ("fp32", 0, False),
    ]
    assert account["sensitivity"]["onnxruntime"][0]["name"] == LOUD and account["matrices"]["onnxruntime"] == 23
    assert (account["batch"], account["length"], account["budget"]) == (8, 64, 0.5)
    assert list(files) == ["onnxruntime"] and list(files["onnxruntime"]) == ["fp32", "int8"]
    assert [record["passed"] for record in records] == [True, True]
    assert "kept: ONNX int8, 1 matrix in fp32, 2.00 x the speed of fp32" in said
    told = "compressed: PyTorch -> ONNX int8: 2 attentions are several operators each, which is slower than one"
    assert told in said and [line for line in said if "several operators" in line] == [told]
    assert account["waited"] == 0.4 and any("waited for a core 40% of their time" in line for line in said)
    json.dumps(account)


def test_the_search_knows_how_long_what_it_timed_waited(tmp_path, monkeypatch):
    """Of all timings: the choice is kept, however long the last of them waited. A speed is of the faster fp32 of a timing."""
    waits, ms = iter((0.3, 0.1)), {"onnxruntime": 2.0, "openvino": 4.0}

    def measured(variants, *_, **__):
        waited = next(waits)
        return [summarize(variant.name, 8, 64, [ms[variant.runtime]], waited) for variant in variants]

    monkeypatch.setattr(precision, "measure", measured)
    monkeypatch.setattr(precision, "end_id", lambda folder: None)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    inputs = Inputs(SimpleNamespace(folder=tmp_path), None, 0, threads=1)
    workspace = SimpleNamespace(progress=lambda *_: nullcontext(SimpleNamespace(advance=None)))
    search = precision.PrecisionSearch(model, ExportConfig(batch=8, length=64), None, workspace, inputs, tmp_path)
    for _ in range(2):
        trials = search.clock([Candidate(runtime, "fp32", tmp_path / runtime) for runtime in ms])
        assert [(trial.ms, trial.speed) for trial in trials] == [(2.0, 1.0), (4.0, 0.5)] and search.waited == 0.3


@pytest.mark.parametrize(("budget", "within"), [(0.5, False), (1.0, True)])
def test_the_budget_is_in_points_of_the_metric(tmp_path, monkeypatch, budget, within):
    """Within the bound of the precision; of 90 % the file loses 0.8 points."""
    judged = SimpleNamespace(metric_reference=0.9, metric_candidate=0.892, passed=True, bound="b", agreement=0.99)
    compared = SimpleNamespace(compared=lambda *_: SimpleNamespace(result=judged))
    monkeypatch.setattr(precision, "OneFile", lambda *_: compared)
    config = ExportConfig(precision="auto", accuracy_budget=budget)
    search = precision.PrecisionSearch(None, config, None, SimpleNamespace(say=lambda text: None), None, tmp_path)
    vars(search).update(prover=None, graph=None, rows=[])
    assert search.judge(Candidate("onnxruntime", "int8", tmp_path / "file")).within is within


def test_the_file_that_is_published_is_the_one_that_was_judged(kept):
    _, files, account, folder, _, data = kept
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["model.onnx", "model_int8.onnx"]
    live = session(folder / files["onnxruntime"]["int8"]["path"])
    logits = predict(lambda batch: run_session(live, batch), data.validation.tokens, 1)
    agree = (logits.argmax(axis=1) == data.validation.labels).mean()
    assert agree == 1 - account["tried"][1]["loss"] == account["tried"][1]["agreement"]


@pytest.mark.slow
def test_an_int8_file_that_no_session_opens_is_left_out(tmp_path, monkeypatch):
    written = precision.PrecisionSearch.written

    def damaged(self, runtime, excluded, precision="int8"):
        trial = written(self, runtime, excluded, precision)
        if precision == "int8":
            trial.path.write_bytes(b"not a graph")
        return trial

    monkeypatch.setattr(precision.PrecisionSearch, "written", damaged)
    made, account, said, _ = chosen(tmp_path, monkeypatch, tiny("bert", torch.float32))
    assert account["kept"]["precision"] == "fp32" and list(made.files["onnxruntime"]) == ["fp32"]
    [failure] = made.failures
    assert failure["code"] == "E602" and "left out" in failure["what"] and "in place of auto" in failure["fix"]
    assert any(line.startswith("ONNX int8: left out") for line in said)


@pytest.mark.slow
def test_an_int8_file_that_gives_no_numbers_is_not_kept(tmp_path, monkeypatch):
    """Numbers that are not finite are E611: a verdict for a file that may be left out, the end for one in fp32."""
    compared = precision.OneFile.compared

    def failing(self, path, excluded=()):
        if self.precision == "int8":
            raise CheckError("E611", "values that are not finite", "Leave it out")
        return compared(self, path, excluded)

    monkeypatch.setattr(precision.OneFile, "compared", failing)
    _, account, _, _ = chosen(tmp_path, monkeypatch, tiny("bert", torch.float32))
    assert account["kept"]["precision"] == "fp32"
    assert {one["verdict"] for one in account["tried"] if one["precision"] == "int8"} == {"values that are not finite"}


@pytest.mark.parametrize(
    ("name", "code", "raised"), [("int8", "E602", None), ("int8", "E908", "E908 .* precision"), ("fp32", "E602", "E602")]
)
def test_a_repaired_file_that_no_session_opens_is_not_kept(tmp_path, monkeypatch, name, code, raised):
    """`narrow` opens the files without matrices in fp32; only fp32 ends the stage, and memory that is used up."""

    def closed(*_):
        raise UserError(code, "it cannot be opened", "Export it again")

    monkeypatch.setattr(precision, "OneFile", lambda *_: SimpleNamespace(compared=closed))
    search = precision.PrecisionSearch(None, AUTO_CONFIG, None, SimpleNamespace(say=lambda text: None), None, tmp_path)
    vars(search).update(prover=None, graph=None, rows=[])
    with pytest.raises(UserError, match=raised) if raised else nullcontext():
        trial = search.judge(Candidate("onnxruntime", name, tmp_path / "file", ("a",)))
        assert not trial.within and trial.verdict == "it cannot be opened"


@pytest.mark.parametrize(
    ("failed", "distance", "made", "told"),
    [
        (("rounding",), 0.5, [8], "x: no matrices in fp32 help; with 8 of them its outputs still move 5.0 times as far as "),
        (("rounding",), 0.1, [8, 1, 2, 4, 8], ""),
        (("metric",), 0.5, [1, 2, 4, 8], ""),
    ],
    ids=["in vain", "not in vain", "explained"],
)
def test_a_search_over_matrices_ends_where_half_of_them_do_not_help(failed, distance, made, told):
    said, tried = [], []
    prover = SimpleNamespace(ranking=lambda graph, static: [*range(16)], workspace=SimpleNamespace(say=said.append))

    def make(excluded):
        tried.append(len(excluded))
        return SimpleNamespace(result=SimpleNamespace(failed=failed, distance=distance))

    first = SimpleNamespace(hop="x", kind="int8", failed=failed, rounding=0.1)
    found = list(repaired(prover, None, first, static=True, make=make))
    assert tried == made and len(found) == (1 if told else 4)
    assert told in "".join(said) and bool(said) == bool(told)


@pytest.mark.parametrize("kept", [["fp32", "int8"], ["fp32"]])
def test_the_dense_model_is_written_in_what_auto_keeps(kept):
    """The speed of int8 alone is no gain of compression: dense int8 is what a report compares with."""
    config = baseline_of(ExportConfig(precision="auto", runtime=["onnxruntime", "openvino"]), {"openvino": dict.fromkeys(kept)})
    assert (config.runtime, config.precision, config.auto) == (["openvino"], kept, False)


def test_keys_of_auto_mean_nothing_without_it_and_auto_stands_alone():
    assert problems(export, {"precision": "auto", "accuracy_budget": 0.5, "batch": 1, "length": 32}) == []
    assert problems(export, {"accuracy_budget": 0.5}) == [("E641", ("accuracy_budget",))]
    assert problems(export, {"batch": 1, "length": 9}) == [("E641", ("batch",)), ("E641", ("length",))]
    assert problems(export, {"precision": ["auto", "int8"]}) == [("E640", ("precision",))]
    assert problems(export, {"precision": "auto", "runtime": "openvino", "calibration_rows": 9}) == []


def test_what_auto_may_keep_is_known_to_the_stages_behind_it():
    assert problems(deploy, {}, AUTO) == []
    assert problems(deploy, {"precision": "int8"}, AUTO) == [("E725", ("precision",))]
    assert problems(deploy, {"runtime": "onnxruntime"}, AUTO) == [("E725", ("runtime",))]
    assert problems(benchmark, {"device": "cuda"}, AUTO) == [("E604", ("device",))]
