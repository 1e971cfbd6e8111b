"""`prune: {target: ...}` in whole pipelines: what is recorded, met, and measured once. Nothing timed is asserted."""

import json
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError

from compressor import load
from compressor.account import Plan, Sparsity
from compressor.cost import LayerShape, ModelShape, shape_of
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.pruning.prices import prices_of
from compressor.pruning.surgery import remove
from compressor.tasks.data import Data
from export.graph.trace import trace
from export.latency.open_files import PROCESS
from export.latency.passes import passes_of
from export.latency.table import LatencyTable, probes
from pipelines.engine import environment
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Artifact, Inputs
from pipelines.engine.store import sealed
from pipelines.file.config import load_pipeline
from pipelines.stages.loading import load_model
from pipelines.stages.prune import meet_target, targets
from pipelines.stages.prune.config import STAGE, PruneConfig, estimate, lengths, planned
from pipelines.stages.prune.targets import GOALS, Target, TargetSearch, closed_form, widths
from pipelines.stages.tune.config import TuneConfig
from pipelines.stages.tune.config import plan as tune_plan
from pipelines.sweeps.sweep import sweep
from pipelines.sweeps.sweep_trials import SweepPlan, axes_of
from pipelines.sweeps.trial_events import in_turn
from tests.compressor.conftest import tiny
from tests.loud import loud_graph
from tests.pipelines.test_precision import rows_of
from tests.pipelines.toys import tree
from tests.tiny import LEFT_OUT, write_pipeline

STAGES = [
    {"tune": {"method": "lora", "rank": 2, "epochs": 1, "learning_rate": 0.02}},
    {"prune": {"target": {"flops": 0.8, "length": 16}, "rows": 32}},
    {"recover": {"epochs": 0.2, "distill": False}},
    {"prune": {
        "target": {"speedup": 1.6, "batch": 2, "length": 16, "rounds": 3},
        "structures": ["heads", "neurons", "layers"], "criterion": {"heads": "delta", "neurons": "weight"},
    }},
    {"merge": None},
]  # fmt: skip
AFTER = [
    {"export": {"precision": ["fp32"]}},
    {"benchmark": {"batch": [2], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}},
    {"report": None},
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("project"), stages=STAGES)


def table_of(model, facts):
    layer, hidden = shape_of(model).layers[0], model.config.hidden_size
    rows = {name: ((0, 0.0), (layer.units(name), 1e-3 * hidden * layer.units(name))) for name in ("heads", "neurons")}
    return LatencyTable(dict(facts), rows, 0.1, 0.2)


@pytest.fixture
def tables(monkeypatch):
    """Tables that are made up instead of measured, one microsecond a parameter of a sublayer; the facts of each are kept."""
    asked = []

    def made_up(model, sample, facts, **settings):
        asked.append(facts)
        return table_of(model, facts)

    monkeypatch.setattr("pipelines.stages.prune.meet_target.measure_table", made_up)
    return asked


@pytest.fixture
def unmeasured(monkeypatch):
    """Whatever is asked for, it is met."""
    monkeypatch.setattr(meet_target, "measured", lambda *given: [3.0, 1e-3])


def flops_of(artifact, pipeline):
    from compressor.models.reference import resolve

    base = resolve(pipeline.model, relative_to=pipeline.source_folder)
    return shape_of(load_model(artifact, base)).flops(16)


@pytest.mark.parametrize("in_earnest", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_meets_its_targets_and_says_how(project, tmp_path, tmp_path_factory, tables, compress, monkeypatch, in_earnest):
    """Both are shares of the dense model; the timed one is exported (in the fast row the graph is another model's, for tracing
    takes long) and measured once."""
    timed, graph = [], None if in_earnest else loud_graph(tmp_path_factory.getbasetemp())

    def traced(model, sample):
        timed.append(shape_of(model).flops(16))
        return trace(model, sample) if graph is None else graph

    monkeypatch.setattr("export.latency.table.trace", traced)
    monkeypatch.setattr(meet_target, "TRIES", 1)
    pipeline = load_pipeline(project)
    code, shown, error = compress("run", project, "--out", tmp_path, "--until", "prune-2")
    assert (code, error) == (0, "")
    artifacts = run_pipeline(pipeline, tmp_path).artifacts
    first, second = (artifacts[name].metadata["target"] for name in ("prune", "prune-2"))
    share = flops_of(artifacts["prune"], pipeline) / flops_of(artifacts["tune"], pipeline)
    assert 0.7 < share <= 0.8 and first["predicted"] == share and "measured" not in first
    assert f"target 0.800 of the FLOPs, predicted {share:.3f} of the FLOPs" in shown
    assert second["predicted"] >= 1.6 and second["measured"] == second["dense_ms"] / second["ms"] > 0
    assert len(second["tried"]) == 1 and first["tried"] == []
    assert timed == [flops_of(artifacts[name], pipeline) for name in ("tune", "prune-2")], "the dense model and the pruned one"
    assert f"predicted {second['predicted']:.2f}x, measured {second['measured']:.2f}x" in second["told"]
    assert second["told"].startswith("target 1.60x, predicted 1.6") and second["told"] in shown
    assert second["criterion"] == {"heads": "delta", "neurons": "weight"}
    left = [{name: len(units) for name, units in row.items()} for row in artifacts["prune"].metadata["kept"].values()]
    assert first["widths"] == left
    [facts] = tables
    assert (facts["batch"], facts["length"], facts["architecture"], facts["rounds"]) == (2, 16, "bert", 3)
    assert [path.stem for path in (tmp_path / ".store" / ".cache").glob("latency-*.json")] == [second["table"]]
    assert [row["hop"] for row in artifacts["prune-2"].metadata["parity"]] == ["target masked -> removed"]


@pytest.mark.slow
def test_gradual_pruning_is_a_list_of_stages(tmp_path):
    """Prune, recover, prune, recover: each target is a share of the first dense model, whatever was removed before."""
    shares, recover = (0.8, 0.6), {"recover": {"epochs": 0.2, "distill": False}}
    prunes = [{"prune": {"target": {"flops": share, "length": 16}, "rows": 16, "price_rows": 16}} for share in shares]
    stages = [STAGES[0], *(stage for prune in prunes for stage in (prune, recover))]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=stages, rows=32))
    made = run_pipeline(pipeline, tmp_path / "runs").artifacts
    dense = flops_of(made["tune"], pipeline)
    left = [flops_of(made[name], pipeline) / dense for name in ("recover", "recover-2")]
    assert 0.7 < left[0] <= 0.8 and 0.5 < left[1] <= 0.6
    assert [made[name].metadata["target"]["predicted"] for name in ("prune", "prune-2")] == left
    assert made["recover-2"].metadata["control"]["recoveries"] == 2


@pytest.mark.slow
def test_a_table_is_measured_once_and_again_by_force(project, tmp_path, tables, unmeasured):
    """For one machine, model shape and setting, whatever is pruned before and however much is asked for."""

    def go(*settings, force=()):
        found = run_pipeline(load_pipeline(project, settings), tmp_path, until="prune-2", force=force)
        return found.artifacts["prune-2"].metadata["target"]["table"], len(tables)

    name, _ = go()
    assert go("prune-2.target.speedup=1.3", "prune.target.flops=0.9") == (name, 1)
    other, count = go("prune-2.target.batch=3")
    assert (other != name, count) == (True, 2)
    assert go(force=["prune-2"]) == (name, 3)
    path = tmp_path / ".store" / ".cache" / f"{name}.json"
    before = path.read_bytes()
    path.write_text(json.dumps({**json.loads(before), "facts": {}}))
    with pytest.raises(UserError, match=r"E803 .*latency-.*has changed since it was measured"):
        go("prune-2.target.speedup=1.4")
    path.with_suffix(".sha256").write_bytes(sealed(path.read_bytes(), path.name))
    with pytest.raises(UserError, match=r"E803 .*prune: the latency table belongs to another model"):
        go("prune-2.target.speedup=1.4")
    path.with_suffix(".sha256").unlink()
    assert go("prune-2.target.speedup=1.4") == (name, 4), "without its seal it is measured again"


@pytest.mark.slow
def test_a_table_that_was_measured_beside_other_work_is_not_used_again(project, tmp_path, unmeasured, monkeypatch):
    """Every later target would be chosen by its wrong times."""
    waits = [0.6, 0.02]

    def made_up(model, sample, facts, **_):
        return replace(table_of(model, facts), waited=waits.pop(0))

    monkeypatch.setattr("pipelines.stages.prune.meet_target.measure_table", made_up)
    for speedup, left in ((1.6, 1), (1.3, 0), (1.4, 0)):
        run_pipeline(load_pipeline(project, [f"prune-2.target.speedup={speedup}"]), tmp_path, until="prune-2")
        assert len(waits) == left


@pytest.mark.slow
def test_a_target_for_the_rows_own_lengths(tmp_path, compress):
    """Table and trials are timed on the rows that the benchmark times, and the report says what that measured."""
    target = "prune-2.target={speedup: 1.05, batch: 2, lengths: data, rounds: 3}"
    whole = write_pipeline(tmp_path, stages=[*STAGES, *AFTER])
    code, *_ = compress("run", whole, "--set", target, "--out", tmp_path / "out")
    assert code == 0
    artifacts = run_pipeline(load_pipeline(whole, [target]), tmp_path / "out").artifacts
    found, timed = artifacts["prune-2"].metadata["target"], artifacts["benchmark"].metadata
    assert (found["batch"], found["length"]) == (2, None) and found["measured"] > 0 and 1 <= len(found["tried"]) <= 3
    table = json.loads((tmp_path / "out" / ".store" / ".cache" / f"{found['table']}.json").read_text())
    assert len(table["facts"]["length"]) == 32 and {rows for rows, _ in table["facts"]["length"]} == {2}
    assert timed and "batch 2 × own lengths" in next((tmp_path / "out").glob("*/report.md")).read_text()


def test_a_table_is_of_one_graph(monkeypatch):
    """Other weights and labels: the same. Another activation in the same shape: not. Nor another runtime, or other lengths, or
    other kernels."""

    def name(model, workload=(1, 128), threads=1, **where):
        inputs = Inputs(base=None, task=None, seed=0, threads=threads)
        return meet_target.table_name(meet_target.facts_of(Target(speedup=2.0, **where), workload, model, inputs))

    model, other, relu = tiny("bert", seed=0), tiny("bert", seed=1), tiny("bert")
    other.config.id2label = {0: "x", 1: "y", 2: "z"}
    relu.config.hidden_act = "relu"
    assert name(model) == name(other) != name(relu)
    short, longer = (passes_of([{"input_ids": [5] * length, "attention_mask": [1] * length}], 0, [1])[0] for length in (4, 9))
    others = [name(model, short), name(model, longer)]
    others += [name(model, precision="int8"), name(model, rounds=9), name(model, threads=2)]
    others += [name(model, batch=8), name(model, length=64)]
    for key, value in (("KNOTS", meet_target.KNOTS[1:]), ("TABLE", meet_target.TABLE + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(meet_target, key, value)
            others.append(name(model))
    assert len({name(model), *others}) == 10
    names = {name(model)}
    for value in ("AVX2", "AVX512_CORE"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
        names.add(name(model))
    assert len(names) == 3
    pytest.importorskip("nncf", reason="the extra openvino is not installed")
    assert name(model) != name(model, runtime="openvino")


@pytest.mark.parametrize(("batch", "shapes"), [(4, [4, 4]), (5, [5, 5]), (16, [10])])
def test_rows_of_their_own_lengths_come_in_whole_batches(batch, shapes):
    """A last batch of two rows would count as one of four; of fewer rows than a batch has, all are one."""
    model = tiny("bert", torch.float32)
    data = Data(rows_of(model, 4), rows_of(model, 10), ["a", "b", "c"], 1)
    target, inputs = Target(speedup=2.0, lengths="data", batch=batch), Inputs(base=None, task=None, seed=0, threads=1)
    assert [rows for rows, _ in meet_target.workload_of(target, inputs, data).shapes] == shapes


def test_a_key_that_is_null_is_not_given():
    of_own_lengths = {"speedup": 2.0, "lengths": "data"}
    assert Target(**of_own_lengths, length=None, flops=None) == Target(**of_own_lengths)
    assert Target(flops=0.5, batch=None, speedup=None) == Target(flops=0.5)
    with pytest.raises(ValueError, match="exactly one of speedup"):
        Target(speedup=None)


@pytest.mark.parametrize(("runtime", "package"), [("onnxruntime", "onnxruntime"), ("openvino", "openvino and nncf")])
def test_a_time_needs_its_runtime(runtime, package, monkeypatch):
    monkeypatch.setattr("export.runtimes.runtime.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"E901 .*needs the package {package}"):
        targets.surroundings(Target(speedup=2.0, runtime=runtime))


def test_a_timed_prune_is_one_of_what_writes_its_files(monkeypatch):
    """As its latency table is: other graphs of the same model take another time, and other widths meet the target."""

    def found():
        return [STAGE.surroundings(PruneConfig(search={"target": target})) for target in ({"speedup": 2.0}, {"flops": 0.5})]

    seen, installed = [found()], environment.distribution
    monkeypatch.setattr("export.graph.graph_version.GRAPHS", 0)
    seen.append(found())
    monkeypatch.setattr(environment, "distribution", lambda name: "onnxscript 0" if name == "onnxscript" else installed(name))
    seen.append(found())
    timed, counted = zip(*seen, strict=True)
    assert len({json.dumps(facts) for facts in timed}) == 3 and counted == ({}, {}, {})


def test_what_this_machine_cannot_time_is_told_before_anything_is_trained(project, tmp_path, monkeypatch):
    monkeypatch.setattr("export.runtimes.runtime.processor", lambda: {"instructions": ["avx2"]})
    with pytest.raises(UserError, match=r"E904 .*stages\[3\].prune: OpenVINO computes in bf16 by .*, which this CPU lacks"):
        run_pipeline(load_pipeline(project, ["prune-2.target.runtime=openvino", "prune-2.target.precision=bf16"]), tmp_path)
    assert not list(tmp_path.rglob("tune-*"))


@pytest.mark.slow
def test_a_target_that_is_met_removes_nothing(project, tmp_path, tables, unmeasured, compress):
    settings = ("--set", "prune-2.target={flops: 0.9, length: 16}", "--until", "prune-2", "--out", tmp_path)
    code, shown, _ = compress("run", project, *settings)
    assert code == 0 and "0.900 of the FLOPs is met already: nothing is removed" in shown
    lock = yaml.safe_load((tmp_path / "tiny" / "pipeline.lock.yaml").read_text())
    folders = [tmp_path / ".store" / stage["artifact"] for stage in lock["stages"][-2:]]
    before, after = (json.loads((folder / "artifact.json").read_text())["metadata"] for folder in folders)
    assert after["parity"] == [] and (after["kept"], after["quality"]) == (before["kept"], before["quality"])
    assert after["target"]["predicted"] <= 0.8


@pytest.mark.slow
def test_a_time_that_cannot_be_had_says_which_could(project, tmp_path, tables, unmeasured):
    with pytest.raises(
        UserError, match=r"E520 .*prune: 900\.00x is out of reach: .* gives \d+\.\d\dx\. Choose a lower target$"
    ):
        run_pipeline(load_pipeline(project, ["prune-2.target.speedup=900"]), tmp_path)
    published = sorted(json.loads(path.read_text())["stage"] for path in (tmp_path / ".store").glob("*/artifact.json"))
    assert published == ["prune", "recover", "tune"]


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.slow
def test_a_target_in_milliseconds(project, tmp_path, tables, unmeasured, share):
    """As many units stay as the time allows: with one more of any block it would be over."""

    def reached(ms):
        pipeline = load_pipeline(project, [f"prune-2.target={{p50_ms: {ms}, batch: 2, length: 16}}"])
        made = run_pipeline(pipeline, tmp_path, until="prune-2").artifacts["prune-2"]
        return made.metadata["target"], made.folder

    whole, folder = reached(1000.0)
    asked = share * whole["predicted"]
    found, _ = reached(asked)
    unit = 1e-3 * load(folder, base=project.parent / "model").config.hidden_size
    assert (found["goal"], found["measured"], len(tables)) == ("p50_ms", 1e-3, 1)
    assert asked - unit < found["predicted"] <= asked < whole["predicted"]


@pytest.mark.slow
def test_a_target_that_the_table_misses_is_met_by_measurement(project, tmp_path, tables, compress, monkeypatch):
    """The model turns out 5 % slower than the table says, so as much more is saved; and the record holds both trials."""

    def slower(target, dense, pruned, *_):
        table = table_of(dense, {})
        return [table.ms(shape_of(dense)), 1.05 * table.ms(shape_of(pruned))]

    monkeypatch.setattr(meet_target, "measured", slower)
    code, shown, error = compress("run", project, "--out", tmp_path, "--until", "prune-2")
    assert (code, error) == (0, "")
    artifact = run_pipeline(load_pipeline(project), tmp_path).artifacts["prune-2"]
    found = artifact.metadata["target"]
    first, last = found["tried"]
    assert first["measured"] < 1.6 * 0.98 <= last["measured"] == found["measured"] and last["predicted"] == found["predicted"]
    assert last["dense_ms"] / last["ms"] == pytest.approx(last["predicted"] / 1.05)
    said = ", then ".join(f"predicted {one['predicted']:.2f}x, measured {one['measured']:.2f}x" for one in (first, last))
    assert f"target 1.60x, {said}" in shown and found["told"] == f"target 1.60x, {said}"
    left = [{name: len(units) for name, units in row.items()} for row in artifact.metadata["kept"].values()]
    assert found["widths"] == left, "what was measured last is what was cut"


@pytest.mark.slow
def test_a_target_that_only_the_table_says_is_met_is_met_by_measurement(project, tmp_path, tables, monkeypatch):
    """After an earlier cut. The model turns out 8 % slower than the table says: units go until the measurement is as asked."""

    def slower(target, dense, pruned, *_):
        table = table_of(dense, {})
        return [table.ms(shape_of(dense)), 1.08 * table.ms(shape_of(pruned))]

    monkeypatch.setattr(meet_target, "measured", slower)

    def made(speedup):
        pipeline = load_pipeline(project, ["prune.target.flops=0.5", f"prune-2.target.speedup={speedup}"])
        return run_pipeline(pipeline, tmp_path, until="prune-2").artifacts["prune-2"].metadata["target"]

    met = made(1.01)
    assert "widths" not in met and 1.01 < met["measured"] == pytest.approx(met["predicted"] / 1.08)
    asked = 0.98 * met["predicted"]
    found = made(asked)
    assert found["tried"][0]["predicted"] == met["predicted"] and found["tried"][0]["measured"] == met["measured"]
    assert found["widths"] and found["measured"] >= asked / 1.03


@pytest.mark.parametrize(
    ("goal", "ms", "told"), [("speedup", 50, False), ("speedup", 30, True), ("speedup", 80, True), ("p50_ms", 80, True)]
)
def test_a_measurement_that_other_work_disturbed_is_told(goal, ms, told):
    """No latency table is wrong by a quarter."""
    target = Target(**{goal: {"speedup": 2.0, "p50_ms": 50.0}[goal]})
    first = meet_target.TargetTrial([], {"speedup": 2.0, "p50_ms": 50.0}[goal], 100, ms)
    assert meet_target.is_disturbed(target, first) == told


def test_a_measurement_that_waited_for_a_core_is_told():
    target, trial = Target(speedup=2.0), partial(meet_target.TargetTrial, [], 2.0, 100, 50)
    assert meet_target.disturbance_of(target, [trial(), trial(waited=0.05)]) == ""
    assert "waited for a core 40% of their time" in meet_target.disturbance_of(target, [trial(waited=0.4), trial()])
    assert meet_target.disturbance_of(target, []) == ""


def test_other_work_is_told_where_it_made_a_target_unreachable():
    def refused(table, code="E520"):
        with pytest.raises(UserError) as found, meet_target.told_of_other_work(table):
            raise UserError(code, "2.00x is out of reach", "Choose a lower target")
        return found.value.fix

    busy, quiet = (LatencyTable({}, {}, 0.0, 1.0, waited) for waited in (0.6, 0.0))
    assert refused(busy).startswith("Stop what else runs")
    assert {refused(quiet), refused(None), refused(busy, "E803")} == {"Choose a lower target"}


@pytest.mark.slow
def test_out_of_reach_by_a_disturbed_table_is_no_reason_for_a_lower_target(project, tmp_path, monkeypatch, compress):
    """Nothing that may be removed costs anything: what a table says that was measured beside other work."""

    def disturbed(waited):
        return lambda model, sample, facts, **_: LatencyTable(dict(facts), {}, 0.0, 9.0, waited)

    monkeypatch.setattr("pipelines.stages.prune.meet_target.measure_table", disturbed(0.6))
    out = ("--out", tmp_path, "--until", "prune-2")
    code, shown, error = compress("run", project, *out)
    assert code == 2 and "waited for a core 60%" in shown
    assert "E520" in error and "waited for a core 60%" in error and "Stop what else runs" in error
    code, shown, error = compress("run", project, *out)
    assert code == 2 and "is made again: the measured processes waited" in shown and "waited for a core 60%" in error
    monkeypatch.setattr("pipelines.stages.prune.meet_target.measure_table", disturbed(0.02))
    code, _, error = compress("run", project, *out, "--force", "prune-2")
    assert code == 2 and "E520" in error and "Choose a lower target" in error and "waited" not in error


# where log(time) is linear in log(share) between 1 (0.46) and 0.5 / 0.46 (0.53), and between that place (0.48) and the latter
BETWEEN = (0.5 / 0.46) ** (math.log(0.92) / math.log(0.46 / 0.53))
SHARE = math.log(0.96) / math.log(0.48 / 0.53)


@pytest.mark.parametrize(
    ("times", "shares"),
    [
        ([0.5], [1]),  # met: enough is enough
        ([0.51], [1]),  # within MISS
        ([0.53, 0.49], [1, 0.5 / 0.53]),
        # a measurement that no table is off by; and no fifth trial
        ([0.9, 0.58, 0.56, 0.52], [1, 1 / 1.1, 1 / 1.21, 1 / 1.331]),
        ([0.53, None], [1, 0.5 / 0.53]),  # nothing more to be saved: what was had stays
        ([0.47, 0.49], [1, 0.5 / 0.47]),  # faster than requested: quality would be given away
        ([0.3, 0.51], [1, 1 / 0.9]),  # a measurement that no table is off by
        ([0.46, 0.53, 0.49], [1, 0.5 / 0.46, BETWEEN]),  # from both sides
        ([0.46, 0.53, 0.48, 0.5], [1, 0.5 / 0.46, BETWEEN, BETWEEN * (0.5 / 0.46 / BETWEEN) ** SHARE]),  # nearer
    ],
)
def test_widths_are_chosen_until_the_measurement_meets_the_target(times, shares):
    asked = []

    def choose(share=1):
        asked.append(share)
        if times[len(asked) - 1] is None:
            raise UserError("E520", "out of reach", "Ask for less")
        return [{"heads": len(asked)}]

    def trial(found):
        return meet_target.TargetTrial(found, 2.0, 1.0, times[len(asked) - 1])

    tried = meet_target.settled(choose, trial, Target(speedup=2.0))
    assert asked == pytest.approx(shares)
    assert [one.ms for one in tried] == [one for one in times if one]


@pytest.mark.parametrize(
    ("times", "used"), [([0.46, 0.53], 0.46), ([0.53, 0.49], 0.49), ([0.9, 0.55, 0.52], 0.52), ([0.45, 0.48, 0.49], 0.49)]
)
def test_the_widths_that_are_used_meet_the_target_and_keep_most(times, used):
    tried = [meet_target.TargetTrial([{}], 2.0, 1.0, ms) for ms in times]
    assert meet_target.best_of(tried, Target(speedup=2.0)).ms == used


def test_a_family_of_targets_shares_the_tune(project, tmp_path, tables, unmeasured, compress):
    overs = ("--over", "prune.target.flops=0.9,0.6", "--until", "prune", "--out", tmp_path)
    code, shown, error = compress("sweep", project, *overs)
    assert (code, error) == (0, "") and shown.count("  reused") == 1
    folder = tmp_path / "tiny-sweep"
    content = json.loads((folder / "sweep.json").read_text())
    assert [one["values"] for one in content["trials"]] == [{"prune.target.flops": value} for value in (0.9, 0.6)]
    reached = [row["mean"] for row in content["summary"] if row["metric"] == "predicted"]
    assert 0.8 < reached[0] <= 0.9 and 0.5 < reached[1] <= 0.6
    text = (folder / "sweep.md").read_text()
    assert f"| 0.9 | prune | predicted | 1 | {reached[0]:.4f} |  |" in text
    assert "or the named file; predicted and measured are of the target; std is" in text
    assert "trial 1 of 2: flops-0.9" in shown and f"{reached[1]:.4f}" in shown


def copying(jobs, perform):
    """An engine whose trials run elsewhere: only what they are given and return is there."""
    return in_turn(pickle.loads(pickle.dumps(jobs)), lambda *given: pickle.loads(pickle.dumps(perform(*given))))


def test_blocks_that_stay_anyway_are_those_that_are_kept():
    """A T5's first blocks hold the position bias of all others: that others are dearer keeps no second one."""
    search, shape = TargetSearch(target=Target(parameters=0.45), structures=["layers"]), start("t5").shape
    rising = {"layers": [np.array([0.0, 1.0 + place]) for place in range(len(shape.layers))]}
    found = widths(search, shape, shape, closed_form(search.target), rising)
    assert found == widths(search, shape, shape, closed_form(search.target), None) == [{}, None, None, {}, None, None]


def test_the_estimate_counts_the_prices_of_units_and_a_refit():
    dense = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
    plan, rows = Plan(dense, dense, None), {"train": 1000, "validation": 50, "mean": 10, "sequences": 1}
    search = {"target": {"flops": 0.5}, "price_rows": 100}
    priced, refitted = (
        estimate(PruneConfig.model_validate(search | more), plan, plan, rows)["flops"] for more in ({}, {"refit": 64})
    )
    assert priced > 5 * 100 * 2 * 2 * dense.flops(10) and refitted - priced == 4 * 64 * dense.flops(10)
    # of an output that keeps 18 of 24 inputs, or 24 of 32: factorizations in the inverse at the hidden ones, which are fewer
    masked = replace(plan, sparsity=(Sparsity("unstructured", ("query", "output", "ffn_out"), 1000, 250),))
    under_masks = estimate(PruneConfig.model_validate(search | {"refit": 64}), masked, plan, rows)["flops"] - refitted
    assert under_masks == pytest.approx(5 * 2 * (24**3 + 32 * 6**3 / 3 + 32**3 + 32 * 8**3 / 3))
    few = estimate(PruneConfig.model_validate(search | {"refit": 64}), plan, plan, rows | {"train": 20})["flops"]
    assert few == (20 * (2 * 3 + 5 * 2 * 2 + 4) + 50) * dense.flops(10), "no more rows than there are"


@pytest.mark.parametrize(
    ("item", "passes"),
    [
        ({"structure": "heads", "rows": 40}, 3 * 40),
        ({"structure": "heads", "criterion": "fisher"}, 3 * 100),
        ({"structure": "heads", "criterion": "weight"}, 0),
        ({"structure": "layers", "criterion": "random"}, 0),
        ({"structure": "neurons", "criterion": "reconstruction", "rows": 40}, 4 * 40),
        ({"structure": "layers", "criterion": "reconstruction", "rows": 40}, 40),
        ({"structure": "weights", "criterion": "taylor", "rows": 40}, 3 * 40),
        ({"structure": "weights"}, 0),
    ],
)
def test_the_estimate_counts_the_rows_that_are_scored(item, passes):
    """Of 100 training rows, and all validation rows once."""
    dense = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
    plan, rows = Plan(dense, dense, None), {"train": 100, "validation": 50, "mean": 10, "sequences": 1}
    config = PruneConfig.model_validate({**item, "remove": 0.5})
    needs = estimate(config, plan, plan, rows)
    assert ("memory" in needs) == (item["structure"] == "weights"), "scores of single weights are ranked together"
    assert {key: value for key, value in needs.items() if key != "memory"} == {"flops": (passes + 50) * dense.flops(10)}


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_the_estimate_counts_the_files_of_a_latency_table(architecture):
    """Every one of them is written to a temporary folder, and open in its own process while they are timed."""
    plan, rows, sizes = start(architecture), {"train": 100, "validation": 50, "mean": 10, "sequences": 1}, []
    plan.model.to("meta")
    for removals in ({}, *probes(tiny(architecture), reads_first=False)):
        remove(cut := tiny(architecture), removals)
        sizes.append(shape_of(cut).bytes)
    whole, quarter, closed, refitted = (
        estimate(PruneConfig.model_validate({"target": target} | more), plan, plan, rows)
        for target, more in (
            ({"speedup": 2.0}, {}),
            ({"speedup": 2.0, "precision": "int8"}, {}),
            ({"flops": 0.5}, {}),
            ({"speedup": 2.0}, {"refit": 1}),
        )
    )
    assert whole["temporary"] == sum(sizes) > 5 * plan.dense.bytes
    assert whole["memory"] == refitted["memory"] == 2 * plan.dense.bytes + sum(sizes) + len(sizes) * PROCESS
    assert quarter["temporary"] == sum(size // 4 for size in sizes)
    assert closed.keys() == {"flops"}


@pytest.mark.slow
def test_units_are_priced_once_for_a_model_and_its_scores(project, tmp_path, monkeypatch):
    """Whatever is asked for; again by force, with other rows or other scores, and where the file is damaged it is told."""
    counted = []

    def counting(*given):
        counted.append(given)
        return prices_of(*given)

    monkeypatch.setattr("pipelines.stages.prune.meet_target.prices_of", counting)

    def go(*settings, force=()):
        found = run_pipeline(load_pipeline(project, settings), tmp_path, until="prune", force=force)
        return found.artifacts["prune"].metadata["target"]["widths"], len(counted)

    first, count = go()
    assert (count, go("prune.target.flops=0.7")[1]) == (1, 1)
    assert go(force=["prune"]) == (first, 2) == (go()[0], 2)
    assert go("prune.price_rows=9")[1] == 3 and go("prune.criterion=random", "prune.rows=null")[1] == 4
    with pytest.raises(UserError, match=r"E520 .*0\.001 of the FLOPs"):
        go("prune.target.flops=0.001", "prune.price_rows=8")
    assert len(counted) == 4, "what is out of reach needs no prices"
    for path in (tmp_path / ".store" / ".cache").glob("prices-*.json"):
        path.write_text("{")
    with pytest.raises(UserError, match=r"E803 .*prices"):
        go("prune.target.flops=0.75")


def test_units_of_another_model_of_the_same_id_are_priced_anew(tmp_path):
    """A forced training may end in other bits; and nothing is kept of files that change meanwhile."""
    model = tiny("bert", torch.float32)
    data = Data(rows_of(model, 8), rows_of(model, 4), ["a", "b", "c"], 1)
    search = TargetSearch(target=Target(flops=0.5), structures=["layers"], price_rows=4)
    bar = SimpleNamespace(advance=lambda *_: None)
    quiet = {"say": lambda text: None, "progress": lambda *_: nullcontext(bar)}
    workspace = SimpleNamespace(cache=tmp_path, again=False, **quiet)

    def kept(sha256, **options):
        artifact = Artifact(tmp_path, "tune-0", "model", "tune", "tune", {"changes.safetensors": sha256}, {})
        inputs = Inputs(base=None, task=None, seed=0, artifacts=(artifact,), threads=1, **options)
        meet_target.prices(search, {}, model, inputs, data, workspace)
        return len([*tmp_path.glob("prices-*.json")])

    assert [kept(sha256) for sha256 in ("one", "one", "other")] == [1, 1, 2]

    def changed():
        raise UserError("E807", "changed while the run was reading it", "Run again")

    with pytest.raises(UserError, match="E807"):
        kept("third", require_unchanged=changed)
    assert len([*tmp_path.glob("prices-*.json")]) == 2


def test_units_are_priced_anew_where_they_are_measured_in_another_way(tmp_path, monkeypatch):
    names, model = [], tiny("bert")
    monkeypatch.setattr(meet_target, "once", lambda name, *_: names.append(name) or b"{}")
    artifact = Artifact(tmp_path, "tune-0", "model", "tune", "tune", {}, {})

    def ask(threads=1, rows=4):
        inputs = Inputs(base=None, task=None, seed=0, artifacts=(artifact,), threads=threads)
        search = TargetSearch(target=Target(flops=0.5), structures=["layers"], price_rows=rows)
        meet_target.prices(search, {}, model, inputs, None, None)

    ask()
    ask(threads=2)
    ask(rows=5)
    how = {"HOW": ("otherwise",), "distribution": lambda package: f"{package} 0", "accelerator": lambda: "another card"}
    for name, value in how.items():
        with monkeypatch.context() as patch:
            patch.setattr(meet_target, name, value)
            ask()
    assert len({*names}) == 6


def test_a_target_out_of_reach_ends_no_family(project, tmp_path, tables, unmeasured, compress):
    """It is told, and the others run; so are several, even if they are all."""
    limits = ("--set", "prune.keep={neurons: 16}", "--until", "prune", "--out", tmp_path)
    code, shown, error = compress("sweep", project, "--over", "prune.target.flops=0.05,0.8", *limits)
    folder = tmp_path / "tiny-sweep"
    told = "0.050 of the FLOPs is out of reach: removing everything allowed gives 0."
    assert (code, error) == (0, "") and f"E520 trial flops-0.05, {project}" in shown
    content = json.loads((folder / "sweep.json").read_text())
    assert list(content["unreached"]) == ["flops-0.05"] and content["unreached"]["flops-0.05"]["what"].startswith(told)
    low, high = (row["mean"] for row in content["summary"] if row["metric"] == "predicted")
    assert low is None and 0.6 < high <= 0.8
    written = (folder / "sweep.md").read_text()
    assert f"| 0.8 | prune | predicted | 1 | {high:.4f} |" in written and f"flops-0.05: {told}" in written
    plan = SweepPlan(axes_of(["prune.target.flops=0.05,0.8"], None))
    limited = {"overrides": ["prune.keep={neurons: 16}"], "until": "prune", "say": lambda text: None}
    apart = sweep(project, plan, tmp_path, engine=copying, **limited)
    assert apart.unreached["flops-0.05"].what == content["unreached"]["flops-0.05"]["what"]
    code, _, error = compress("sweep", project, "--over", "prune.target.flops=0.05,0.04", *limits)
    assert (code, error) == (0, "") and "flops-0.04: 0.040 of the FLOPs is out of reach" in (folder / "sweep.md").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--over", "prune.target.flops=0.9"], "E115 --over prune.target.flops=0.9: no key with several values"),
        (["--over", "prune.target.flops=0.9,0.90"], "E115 --over prune.target.flops=0.9,0.90: a value appears twice"),
        (["--over", "prune.target.flops"], "E115 --over"),
        (["--over", "prune.target.flop=0.9,0.8"], "E102 the sweep's prune.target.flop=0.9: unknown key. Did you mean 'flops'?"),
        (["--over", "prune.target.flops=0.9,1.8"], "E104 the sweep's prune.target.flops=1.8: must be less than 1"),
        ([], "E115 nothing differs between the runs. Give --over"),
    ],
)
def test_a_family_that_cannot_be(project, tmp_path, compress, options, says):
    before = tree(tmp_path)
    code, shown, error = compress("sweep", project, *options, "--out", tmp_path / "runs")
    assert (code, shown) == (2, "") and error.startswith(says) and error.count("\n") == 1
    assert tree(tmp_path) == before


def start(architecture: str) -> Plan:
    """The account of a tiny model before any stage."""
    model = tiny(architecture)
    return Plan(shape_of(model), shape_of(model), model)


@pytest.mark.parametrize("structures", [["heads"], ["neurons"], ["heads", "neurons", "layers"]])
@pytest.mark.parametrize("architecture", ["bert", "llama", "t5", "modernbert"])
def test_the_plan_meets_a_closed_target(architecture, structures):
    search = TargetSearch(target=Target(flops=0.9, length=8), structures=structures)
    left = planned(search, start(architecture))
    assert 0.5 < left.shape.flops(8) / left.dense.flops(8) <= 0.9
    assert len(layers_of(left.model)) == len(left.shape.layers)
    parameters = TargetSearch(target=Target(parameters=0.95), structures=structures, keep={"heads": 1})
    left = planned(parameters, start(architecture))
    assert left.shape.parameters <= 0.95 * left.dense.parameters
    whole = start(architecture)
    assert planned(TargetSearch(target=Target(p50_ms=1.0)), whole) == whole, "only a measurement can tell"


def test_least_units_are_kept():
    left = planned(TargetSearch(target=Target(flops=0.75), keep={"heads": 3, "neurons": 2}), start("bert"))
    assert all(layer.units("heads") >= 3 and layer.neurons >= 2 for layer in left.shape.layers)
    dropped = planned(TargetSearch(target=Target(flops=0.75), structures=["layers"], keep={"layers": 2}), start("bert"))
    assert 2 <= len(dropped.shape.layers) < len(dropped.dense.layers)
    with pytest.raises(UserError, match=r"E520 0\.300 of the FLOPs is out of reach: removing everything allowed gives 0\.\d+"):
        planned(TargetSearch(target=Target(flops=0.3), structures=["layers"], keep={"layers": 2}), start("bert"))


def test_adapters_count_on_both_sides_of_a_target():
    """The dense model is the tuned one: half of its parameters are not half of the pretrained model's."""
    tuned = tune_plan(TuneConfig(method="adapter", bottleneck=256), start("bert"))
    left = planned(TargetSearch(target=Target(parameters=0.9)), tuned)
    assert 0.85 * tuned.shape.parameters < left.shape.parameters <= 0.9 * tuned.shape.parameters
    assert left.shape.inserted > left.dense.parameters, "or the case would show nothing"


def test_only_targets_that_have_a_length_are_compared_with_positions():
    asked = {goal: list(lengths(PruneConfig(search={"target": {goal: 0.5}}))) for goal in ("flops", "parameters")}
    assert asked == {"flops": [(("search", "target", "length"), 128)], "parameters": []}


@pytest.mark.parametrize(("ms", "told"), [(0.0512, "0.0512 ms"), (12.345, "12.3 ms"), (1500.0, "1,500 ms")])
def test_a_time_in_words(ms, told):
    assert Target(p50_ms=1.0).say(ms) == told


def test_goals_are_costs_and_costs_are_goals():
    for goal, value in zip(GOALS, (2.0, 5.0, 0.5, 0.5), strict=True):
        target = Target(**{goal: value})
        assert target.reached(target.budget(10.0), 10.0) == pytest.approx(value)


def test_a_target_that_is_none():
    for given in ({}, {"flops": 0.5, "speedup": 2.0}, {"flops": 0.5, "batch": 8}, {"parameters": 0.5, "length": 8}):
        with pytest.raises(ValidationError):
            Target(**given)
    for given in ({"items": []}, {"search": {"target": {"flops": 0.5}}, "items": [{"structure": "heads", "remove": 1}]}):
        with pytest.raises(ValidationError, match="give items to remove, or a target to meet"):
            PruneConfig(**given)
