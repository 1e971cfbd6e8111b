"""Sweeps over seeds and subsets: what runs, what is reused, what comes out, and every mistake before anything runs."""

import contextlib
import json
import os
import re
import signal
import types
from dataclasses import replace

import pytest
import yaml

from compressor.account import Plan
from compressor.cost import LayerShape, ModelShape
from compressor.errors import UserError, UserErrors
from compressor.tasks import Subset
from compressor.tasks.reading import read_task
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import NamedInputs
from pipelines.engine.store import lock
from pipelines.file.config import load_pipeline
from pipelines.runs.served import find_repository
from pipelines.sweeps.pareto import figures_of, front
from pipelines.sweeps.significance import paired_difference
from pipelines.sweeps.sweep import preview_sweep, sweep
from pipelines.sweeps.sweep_files import FILES, write_files
from pipelines.sweeps.sweep_preview import stage_rows
from pipelines.sweeps.sweep_summary import summarize
from pipelines.sweeps.sweep_trials import Search, SweepPlan, SweepTrial, axes_of
from pipelines.sweeps.table_file import Grid
from pipelines.sweeps.trial_events import TrialEvent, died, in_turn
from pipelines.sweeps.trial_jobs import load_first
from pipelines.sweeps.trial_run import (
    TrialConsole,
    TrialJob,
    TrialOutcome,
    costs_of,
    perform,
    quality_of,
    unlearnt_in,
    waited_in,
)
from tests.compressor.test_tasks import task
from tests.pipelines import toys
from tests.pipelines.processes import start, until, wait
from tests.pipelines.sweep_parts import VALUES, go, go_measured, measure_quality, toy
from tests.pipelines.toys import tree
from tests.tiny import STAGES, write_pipeline

ROWS = "sentence\tlabel\n" + "".join(f"film {n}\t{'no' if n % 2 else 'yes'}\n" for n in range(100))


@pytest.fixture
def project(project, monkeypatch):
    """The project of toys, whose models have a quality, on 100 training rows."""
    measure_quality(monkeypatch)
    (project.parent / "train.tsv").write_text(ROWS)
    return project


def calls(out):
    """The stages that really ran since the last look."""
    path = out / "toy-sweep" / "calls"
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def drawn(tmp_path, rows=ROWS, **subset):
    """The training texts that a subset leaves."""
    return [text for (text,) in read_task(task(tmp_path, rows, subset=Subset(**subset))).train.texts]


@pytest.mark.parametrize(("share", "count"), [(0.9, 90), (0.29, 29), (0.555, 55), (0.999, 99)])
def test_a_subset_is_the_floor_of_its_share_in_the_files_order(tmp_path, share, count):
    everything = [line.split("\t")[0] for line in ROWS.splitlines()[1:]]
    part = drawn(tmp_path, share=share, seed=3)
    assert len(part) == len(set(part)) == count
    assert part == [text for text in everything if text in part]


def test_a_subset_is_its_seeds(tmp_path):
    parts = [drawn(tmp_path, share=0.5, seed=seed) for seed in range(20)]
    assert parts == [drawn(tmp_path, share=0.5, seed=seed) for seed in range(20)]
    assert len({tuple(part) for part in parts}) == 20
    often = [sum(f"film {row}" in part for part in parts) for row in range(100)]
    assert min(often) > 0 and max(often) < 20, "no row is always in or always out"


def test_a_subset_leaves_validation_and_label_names_alone(tmp_path):
    whole = read_task(task(tmp_path, ROWS, ROWS))
    part = read_task(task(tmp_path, ROWS, ROWS, subset=Subset(share=0.3)))
    assert (part.label_names, part.validation) == (whole.label_names, whole.validation)
    labels = dict(zip(whole.train.texts, whole.train.labels, strict=True))
    assert [labels[text] for text in part.train.texts] == part.train.labels


@pytest.mark.parametrize(("share", "says"), [(0.02, "2 of 101 rows (seed 5) holds none of class 'rare'"), (0.001, "0 of 101")])
def test_a_subset_without_a_class_is_refused(tmp_path, share, says):
    rows = ROWS.replace("film 0\tyes\n", "film 0\tyes\nthe only one\trare\n")
    with pytest.raises(UserError) as error:
        drawn(tmp_path, rows, share=share, seed=5)
    assert error.value.code == "E211" and says in str(error.value) and "train.tsv" in error.value.where


def test_a_subset_enters_the_fingerprint_of_what_reads_the_data(project, out):
    def ids(*overrides):
        artifacts = run_pipeline(load_pipeline(project, overrides), out).artifacts
        return artifacts["select"].id, artifacts["tune"].id

    found = [ids(), *(ids(f"task.subset={{share: {share}, seed: {seed}}}") for share, seed in ((0.9, 0), (0.9, 1), (0.8, 0)))]
    assert len({select for select, _ in found}) == 1 and len({tune for _, tune in found}) == 4
    locked = yaml.safe_load((out / "toy" / "pipeline.lock.yaml").read_text())
    assert locked["task"]["subset"] == {"share": 0.8, "seed": 0}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{share: 1}", "E104 --set task.subset={share: 1}: must be less than 1, not 1"),
        ("{seed: 1}", "E105 --set task.subset={seed: 1}: key 'share' is missing"),
        ("{share: 0.5, sed: 1}", "E102 --set task.subset={share: 0.5, sed: 1}: unknown key. Did you mean 'seed'?"),
        ("0.9", "E104 --set task.subset=0.9: must be"),
    ],
)
def test_a_subset_that_is_none(project, value, says):
    with pytest.raises(UserError) as error:
        load_pipeline(project, [f"task.subset={value}"])
    assert str(error.value).startswith(says) and len(str(error.value).splitlines()) == 1


def test_what_a_sweep_runs(project):
    pipeline = load_pipeline(project, ["seed=7"])
    assert SweepPlan(seeds=2).trials(pipeline) == [
        SweepTrial("seed-7", {}, {"seed": 7}),
        SweepTrial("seed-8", {}, {"seed": 8}),
    ]
    trials = SweepPlan(subsets=2).trials(pipeline)
    assert [one.settings for one in trials] == [[f'task.subset={{"share": 0.9, "seed": {seed}}}'] for seed in (0, 1)]
    again = load_pipeline(project, ["seed=7", *trials[1].settings])
    assert (again.seed, again.task.subset) == (7, Subset(share=0.9, seed=1))


def test_names_with_a_dot_are_keys_of_a_sweep(project):
    one = load_pipeline(project)
    many = replace(one, task=None, tasks={"a.b": one.task, "c": one.task})
    assert [*SweepPlan(subsets=2).trials(many)[0].repeat] == ['tasks."a.b".subset', "tasks.c.subset"]
    plan = SweepPlan(axes_of(['task.test."a.b"=x.tsv,y.tsv'], None))
    assert [trial.name for trial in plan.trials(one)] == ["a.b-x.tsv", "a.b-y.tsv"]


def test_several_keys_are_every_combination_with_every_seed(project, tmp_path):
    (tmp_path / "grid.yaml").write_text("tune.files: [1, 2]\nselect.text: [a/b, a b, '[c]']\n")
    plan = SweepPlan(axes_of(["prune.text=x,y"], tmp_path / "grid.yaml"), seeds=2)
    trials = plan.trials(load_pipeline(project))
    assert len(trials) == 2 * 3 * 2 * 2 == len({trial.name for trial in trials})
    assert trials[0].settings == ["tune.files=1", 'select.text="a/b"', 'prune.text="x"', "seed=0"]
    assert trials[0].name == "files-1_select.text-a_b_prune.text-x_seed-0-01", "text is a key of two stages"
    assert axes_of(["tune.modules=[query],[query, value]"], None).axes == {"tune.modules": [["query"], ["query", "value"]]}
    alike = SweepPlan(axes_of(["prune.text=abc,ABC"], None)).trials(load_pipeline(project))
    assert [trial.name for trial in alike] == ["text-abc-1", "text-ABC-2"], "one folder where case does not count"
    long = SweepPlan(Grid({"select.text": ["a" * 200, "b" * 200]})).trials(load_pipeline(project))
    assert [len(trial.name) for trial in long] == [122, 122]


def test_mean_and_standard_deviation_by_hand(tmp_path):
    trials = [SweepTrial(f"seed-{seed}", {}, {"seed": seed}) for seed in range(3)]
    qualities = [{"tune": {"accuracy": value, "matthews": -1.0}} for value in (0.1, 0.6, 0.2)]
    outcomes = {trial.name: TrialOutcome(quality) for trial, quality in zip(trials, qualities, strict=True)}
    first, second = summarize(tmp_path, SweepPlan(seeds=3), trials, outcomes, ["tune"]).spreads
    assert (first.stage, first.metric, first.runs, first.values) == ("tune", "accuracy", 3, (0.1, 0.6, 0.2))
    assert (first.mean, first.std) == (pytest.approx(0.3), pytest.approx(0.07**0.5))
    assert (first.min, first.max) == (0.1, 0.6)
    assert (second.mean, second.std) == (-1.0, 0.0)
    ended = {name: outcomes[name] if name == "seed-0" else TrialOutcome() for name in outcomes}
    one = summarize(tmp_path, SweepPlan(seeds=3), trials, ended, ["tune"]).spreads[0]
    assert (one.mean, one.std, one.cells()[3:5]) == (0.1, None, ("0.1000", "")), "one run has no spread"


@pytest.mark.parametrize(
    ("first", "second", "mean", "half", "verdict"),
    [
        # differences 1, 2, 3: deviation 1, t(0.975, 2) = 4.3027
        ((0, 0, 0), (1, 2, 3), 2.0, 4.3027 / 3**0.5, "not shown"),
        ((0, 0, 0, 5), (9, 10, 11, None), 10.0, 4.3027 / 3**0.5, "shown"),
        ((0.1, 0.2), (0.4, 0.5), 0.3, 0.0, "the same difference in every pair"),
        ((0.1, 0.2), (0.1, 0.2), 0.0, 0.0, "equal in every pair"),
        ((0.1, None), (0.4, 0.5), 0.3, None, "not shown: one pair has no interval"),
    ],
)
def test_paired_differences_by_hand(first, second, mean, half, verdict):
    found = paired_difference(first, second)
    assert found.mean == pytest.approx(mean) and found.verdict == verdict
    if half is not None:
        assert (found.low, found.high) == (pytest.approx(mean - half, abs=1e-4), pytest.approx(mean + half, abs=1e-4))
    assert paired_difference((None,), (1.0,)) is None


def test_quality_of_the_validation_rows_and_of_files_that_are_only_scored():
    metadata = {"quality": {"f1": 0.5, "rows": 9}, "tests": {"mm.tsv": {"f1": 0.25, "rows": 3}}, "target": {"measured": 2.0}}
    artifact = types.SimpleNamespace(metadata=metadata)
    assert quality_of({"tune": artifact}, ["tune"]) == {"tune": {"f1": 0.5, "f1, mm.tsv": 0.25, "measured": 2.0}}
    one = {"task": "a", "metric": "f1", "quality": {"f1": 0.5}, "tests": {"mm.tsv": {"f1": 0.25, "rows": 9}}}
    many = types.SimpleNamespace(metadata={"tasks": [one, {**one, "task": "b", "tests": {}}]})
    expected = {"mean of tasks": 0.5, "a f1": 0.5, "a f1, mm.tsv": 0.25, "b f1": 0.5}
    assert quality_of({"tune": many}, ["tune"]) == {"tune": expected}


def test_costs_are_of_the_compressed_model(tmp_path):
    """Its fastest file at the largest shape, and its smallest file; what is trained without the task head."""

    def latency(*times):
        return [{"batch": batch, "length": 128, "p50": ms} for batch, ms in zip((1, 8), times, strict=True)]

    timed = [("dense", (1.0, 2.0)), ("compressed", (1.0, 9.0)), ("compressed", (1.5, 5.0))]
    measured = {"candidates": [{"model": model, "latency": latency(*times)} for model, times in timed]}
    (tmp_path / "measurements.json").write_text(json.dumps(measured))
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"1234")
    sizes = {"dense": (90, 7), "compressed": (40, 10)}
    files = {
        model: {"onnxruntime": {"fp32": {"bytes": fp32}, "int8": {"bytes": int8}}} for model, (fp32, int8) in sizes.items()
    }
    made = {"model": {"trainable": {"body": 5, "head": 3}}, "onnx": {"files": files}, "measurements": {}}
    artifacts = {kind: types.SimpleNamespace(kind=kind, folder=tmp_path, metadata=facts) for kind, facts in made.items()}
    assert costs_of(artifacts) == {
        "trainable parameters": 5,
        "bytes of the stored model": 8,
        "bytes of the smallest exported file": 10,
        "latency in ms at 8 × 128": 5.0,
    }


def test_latencies_that_were_timed_beside_other_work_are_told(tmp_path):
    trials, told = [SweepTrial(f"seed-{seed}", {}, {"seed": seed}) for seed in range(3)], {}
    for trial, waited in zip(trials, (0.7, 0.0, 0.25), strict=True):
        artifact = types.SimpleNamespace(kind="measurements", folder=tmp_path / trial.name, metadata={})
        artifact.folder.mkdir()
        cell = {"batch": 8, "length": 128, "p50": 99.0}
        measured = {"waited": waited, "candidates": [{"model": "compressed", "latency": [cell]}]}
        (artifact.folder / "measurements.json").write_text(json.dumps(measured))
        costs, seen = costs_of({"benchmark": artifact}), waited_in({"tune": artifact, "benchmark": artifact})
        told[trial.name] = TrialOutcome({"tune": {"accuracy": 0.5}}, costs, main="accuracy", waited=seen)
    result = summarize(tmp_path, SweepPlan(seeds=3), trials, told, ["tune"])
    write_files(result, {"pipeline": "toy"}, SweepPlan(seeds=3), trials)
    line = "2 of 3 trials were timed beside other work (seed-0, seed-2): their latencies mislead."
    assert all(line in (tmp_path / f"sweep.{form}").read_text() for form in ("md", "html"))
    assert json.loads((tmp_path / "sweep.json").read_text())["disturbed"] == ["seed-0", "seed-2"]
    assert waited_in({}) == 0.0


def test_models_that_learnt_nothing_are_told(project, tmp_path):
    one = load_pipeline(project)
    many = replace(one, task=None, tasks={"a": one.task, "b": one.task})
    chance, sound = ({"quality": {"accuracy": value}, "constant": 0.5} for value in (0.4, 0.6))
    rows = [{"task": "a", **sound}, {"task": "b", **chance}]

    def found(pipeline, metadata):
        return unlearnt_in(pipeline, {"tune": types.SimpleNamespace(metadata=metadata)}, "tune")

    assert [found(one, chance), found(one, sound)] == [("",), ()]
    assert [found(many, {"tasks": part}) for part in (rows, rows[:1])] == [("b",), ()]
    trials = [SweepTrial(f"seed-{seed}", {}, {"seed": seed}) for seed in range(3)]

    def told(*unlearnt):
        """What the files of a sweep say whose trials have not learnt these tasks."""
        outcomes = {
            trial.name: TrialOutcome({"tune": {"accuracy": 0.5}}, main="accuracy", unlearnt=tasks)
            for trial, tasks in zip(trials, unlearnt, strict=True)
        }
        result = summarize(tmp_path, SweepPlan(seeds=3), trials, outcomes, ["tune"])
        write_files(result, {"pipeline": "toy"}, SweepPlan(seeds=3), trials)
        assert all(result.notes[0] in (tmp_path / f"sweep.{form}").read_text() for form in ("md", "html"))
        content = json.loads((tmp_path / "sweep.json").read_text())
        return result.notes, content["unlearnt"], content.get("unlearnt_tasks")

    line = "1 of 3 trials are no better than a constant prediction (seed-1): their differences say little."
    assert told((), ("",), ()) == ([line], ["seed-1"], None)
    line = "2 of 3 trials are, in a task, no better than a constant prediction (seed-1: a; seed-2: a, b): "
    tasks = {"seed-1": ["a"], "seed-2": ["a", "b"]}
    assert told((), ("a",), ("a", "b")) == ([f"{line}their differences in it say little."], [*tasks], tasks)


def test_a_prune_is_judged_by_the_constant_of_the_training_before_it(project, out, monkeypatch):
    """Trainings alone record it."""

    def trained(config, inputs, workspace):
        return {**toy(config, inputs, workspace), "constant": 0.5}

    toys.replace(monkeypatch, "tune", run=trained)
    assert [list(go(project, out, stage=stage).unlearnt) for stage in ("tune", None)] == [["seed-0", "seed-1"]] * 2


def test_a_file_need_not_be_sound_without_the_values_that_are_compared(project):
    project.write_text(toys.PIPELINE.replace("name: toy", "name: toy\nseed: -1"))
    assert load_first(project, SweepPlan(axes_of(["seed=3,4"], None)), ()).seed == 3
    assert load_first(project, SweepPlan(axes_of(["seed=5..9"], None)), ()).seed == 5
    with pytest.raises(UserError, match=r"E104 .*pipeline.yaml:2: seed"):
        load_first(project, SweepPlan(seeds=2), ())


def test_keys_that_leave_the_model_as_it_is_are_not_compared(tmp_path):
    """Of files in two precisions the costs are their own, and the quality is that of the model of both."""
    plan = SweepPlan(axes_of(["tune.rank=4,8", "export.precision=[fp32],[int8]"], None), seeds=2)
    trials, outcomes = plan.trials(types.SimpleNamespace(seed=0)), {}
    for trial in trials:
        rank, (precision,), seed = trial.values["tune.rank"], trial.values["export.precision"], trial.repeat["seed"]
        costs = {"parameters": float(rank), "bytes": 2.0 * rank if precision == "fp32" else 1.0 * rank}
        quality = {"tune": {"accuracy": (rank + seed) / 10}}
        outcomes[trial.name] = TrialOutcome(quality, costs, main="accuracy", model=f"tune-{rank}-{seed}")
    result = summarize(tmp_path, plan, trials, outcomes, ["tune"])
    assert [(row.first, row.second) for row in result.comparisons] == [
        (("4", f'["{precision}"]'), ("8", f'["{precision}"]')) for precision in ("fp32", "int8")
    ]
    assert [figure.title for figure in figures_of(result)] == [
        "Quality against parameters",
        *(f'Quality against bytes: ["{precision}"]' for precision in ("fp32", "int8")),
    ]
    line = "Values of precision give the same model: its quality, which is not that of exported files, is not compared"
    write_files(result, {"pipeline": "toy"}, plan, trials)
    assert all(line in (tmp_path / f"sweep.{form}").read_text() for form in ("md", "html"))
    assert json.loads((tmp_path / "sweep.json").read_text())["same_model"] == ["export.precision"]


def test_a_trial_says_which_model_its_quality_is_of(project, out):
    result = go(project, out, over=["report.text=x,y"], until="report")
    assert (result.comparisons, result.same_model) == ([], (0,))
    assert not go(project, out, over=["prune.text=x,y"]).same_model
    assert not go(project, out, over=["prune.text=x,y"], stage="tune").same_model, "of the run, also where tune is summarized"


def test_failed_checks_of_a_trial_that_went_on_are_in_the_files(project, out, monkeypatch):
    failure = {"code": "E610", "what": "int8 is left out", "fix": "Leave it out"}

    def checked(config, inputs, workspace):
        return {**toy(config, inputs, workspace), **({} if inputs.seed else {"failures": [failure]})}

    toys.replace(monkeypatch, "prune", run=checked)
    result = go(project, out, runs=2)
    for form in ("md", "html"):
        assert "E610 prune (seed-0): int8 is left out." in (result.folder / f"sweep.{form}").read_text()
    assert json.loads((result.folder / "sweep.json").read_text())["failures"] == [
        {"trial": "seed-0", "stage": "prune", "code": "E610", "what": "int8 is left out"}
    ]


@pytest.mark.parametrize(
    ("count", "chance"), [(1, "1 comparison between equal settings, about 0.05"), (3, "about 0.15"), (40, "about 2 ")]
)
def test_how_many_comparisons_chance_would_show(tmp_path, count, chance):
    plan = SweepPlan(Grid({"tune.rank": list(range(count + 1))}), seeds=2)
    trials = plan.trials(types.SimpleNamespace(seed=0))
    outcomes = {trial.name: TrialOutcome({"tune": {"accuracy": 0.5}}, main="accuracy") for trial in trials}
    write_files(summarize(tmp_path, plan, trials, outcomes, ["tune"]), {"pipeline": "toy"}, plan, trials)
    assert chance in (tmp_path / "sweep.md").read_text()


def test_the_pareto_front_by_hand():
    costs = {("a",): 1.0, ("b",): 2.0, ("c",): 3.0, ("d",): 2.0}
    assert front(costs, {("a",): 0.5, ("b",): 0.4, ("c",): 0.9, ("d",): 0.5}) == [("a",), ("c",)]
    # alike in both: neither beats the other
    assert front(costs, {("a",): 0.5, ("b",): 0.8, ("c",): 0.9, ("d",): 0.8}) == [("a",), ("b",), ("d",), ("c",)]


def test_a_sweep_over_seeds(project, out, compress):
    """Every float of quality at every model stage; the report is not run; a second call makes nothing and says the same."""
    code, shown, error = compress("sweep", project, "--seeds", 3, "--out", out)
    assert (code, error) == (0, "")
    assert calls(out) == ["select", "tune", "prune"] * 3
    assert [line for line in shown.splitlines() if line.startswith("trial")] == [
        f"trial {number + 1} of 3: seed-{number}" for number in range(3)
    ]
    row = next(line.split() for line in shown.splitlines() if "matthews" in line and "prune" in line)
    assert row[2:] == ["3", "-0.3000", "0.2646", "-0.6000", "-0.1000", "-0.1000", "-0.2000", "-0.6000"]
    folder = out / "toy-sweep"
    assert shown.splitlines()[-1] == f"sweep: {folder / 'sweep.md'}, {folder / 'sweep.html'}"
    assert (
        "| tune | accuracy | 3 | 0.3000 | 0.2646 | 0.1000 | 0.6000 | 0.1000 0.2000 0.6000 |"
        in (folder / "sweep.md").read_text()
    )
    note = "Metrics are of all validation rows or the named file; std is the standard deviation of the sample (n − 1)."
    assert all(note in (folder / f"sweep.{form}").read_text() for form in ("md", "html"))
    written, store = [(folder / name).read_bytes() for name in ("sweep.json", "sweep.md", "sweep.html")], tree(out / ".store")
    content = json.loads(written[0])
    assert [one["repeat"] for one in content["trials"]] == [{"seed": seed} for seed in range(3)]
    assert [(one["stage"], one["metric"]) for one in content["summary"]] == [
        (stage, metric) for stage in ("tune", "prune") for metric in ("accuracy", "matthews")
    ]
    assert content["summary"][0]["values"] == list(VALUES.values()) and content["until"] == "prune"
    assert content["artifacts"] == {"select": 3, "tune": 3, "prune": 3} and "stages run: select 3, tune 3, prune 3" in shown
    code, again, _ = compress("sweep", project, "--seeds", 3, "--out", out)
    assert (code, calls(out), again.count("  reused"), tree(out / ".store")) == (0, [], 9, store)
    assert [(folder / name).read_bytes() for name in ("sweep.json", "sweep.md", "sweep.html")] == written


def test_memory_that_will_not_do_is_told_by_one_trial(project, out, monkeypatch, capfd):
    shape = ModelShape(32, (LayerShape(4, 8, 24),), other=1000, head=66, head_macs=64)
    monkeypatch.setattr("pipelines.engine.runner.make_plans", lambda ready: [Plan(shape, shape, None)] * 4)
    monkeypatch.setattr("pipelines.check.estimate.free_memory", lambda: 10**9)
    monkeypatch.setattr("pipelines.check.estimate.resident_memory", lambda: 0)
    go(project, out, runs=2)
    assert capfd.readouterr().err == "warning: about 1.20 GB of memory are needed, 1.00 GB are free\n"
    told = []

    def elsewhere(jobs, perform):
        for job in jobs:
            yield TrialEvent("ended", job.name, outcome=perform(job, TrialConsole(lambda *line: told.append(line))))

    go(project, out.with_name("elsewhere"), runs=2, engine=elsewhere)
    assert [line for kind, line in told if kind == "warned"] == [
        "warning: about 1.20 GB of memory are needed, 1.00 GB are free"
    ]


def test_every_trial_is_an_ordinary_run_on_one_store(project, out):
    """What a plain run has made is reused, and what a sweep has made a plain run reuses; more runs add only themselves."""
    run_pipeline(load_pipeline(project), out, until="tune")
    go(project, out, runs=2)
    assert calls(out) == ["prune", "select", "tune", "prune"]
    assert run_pipeline(load_pipeline(project, ["seed=1"]), out).reused == ("select", "tune", "prune")
    assert go(project, out, runs=3).spreads[0].runs == 3
    assert calls(out) == ["select", "tune", "prune"]
    lock = yaml.safe_load((out / "toy-sweep" / "seed-2" / "pipeline.lock.yaml").read_text())
    assert (lock["seed"], [stage["id"] for stage in lock["stages"]]) == (2, ["select", "tune", "prune"])


def test_subsets_share_what_does_not_read_the_data(project, out):
    result = go(project, out, "subsets", share=0.5, overrides=["seed=9"], stage="tune")
    assert calls(out) == ["select", "tune", "prune", "tune", "prune", "tune", "prune"]
    assert [(one.stage, one.values) for one in result.spreads][:1] == [("tune", tuple(VALUES.values()))]
    assert {one.stage for one in result.spreads} == {"tune"}
    content = json.loads((result.folder / "sweep.json").read_text())
    assert [one["repeat"]["task.subset"] for one in content["trials"]] == [{"share": 0.5, "seed": n} for n in range(3)]
    assert content["set"] == ["seed=9"]


def test_a_dry_run_says_what_would_run_and_what_is_shared(project, out, compress):
    """As `compress run --dry-run`: nothing is written, and the run that follows does just that."""
    over = ("--over", "tune.files=1,2", "--over", "prune.text=x,y", "--seeds", 3, "--out", out)
    code, shown, error = compress("sweep", project, *over, "--dry-run")
    assert (code, error, out.exists()) == (0, "", False)
    lines = shown.splitlines()
    assert len(lines) > 12 and lines[0] == "[ 1/12] files-1_text-x_seed-0  run select, tune, prune"
    assert lines[-1] == "12 trials: 0 finished, 12 to run; of 36 stages 15 are shared: 21 to run, 0 to reuse"
    rows = [line.split() for line in lines if line.split()[:1] in (["select"], ["tune"], ["prune"])]
    assert rows == [["select", "12", "3", "0", "3"], ["tune", "12", "6", "0", "6"], ["prune", "12", "12", "0", "12"]]
    go(project, out, over=["tune.files=1,2"], overrides=["prune.text=x"])
    before = tree(out)
    compress("--version")  # takes what the sweep has printed
    lines = compress("sweep", project, *over, "--dry-run")[1].splitlines()
    assert lines[0].endswith("files-1_text-x_seed-0  reuse select, tune, prune") and tree(out) == before
    assert lines[3].endswith("files-1_text-y_seed-0  reuse select, tune; run prune")
    assert lines[-1] == "12 trials: 6 finished, 6 to run; of 36 stages 15 are shared: 6 to run, 15 to reuse"
    calls(out)
    assert compress("sweep", project, *over)[0] == 0 and calls(out) == ["prune"] * 6
    assert compress("sweep", project, "--seeds", 2, "--set", "tune.fils=1", "--dry-run")[2].startswith("E102 ")


def test_another_engine_gets_the_jobs_and_a_function(project, out):
    def backwards(jobs, perform):
        return in_turn(jobs[::-1], perform)

    assert go(project, out, engine=backwards).spreads[0].values == tuple(VALUES.values())


def test_forced_colours_make_no_table_of_trials_in_a_file(project, out, compress, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(
        "pipelines.cli.work.sweep_work.engine_of", lambda *options: lambda jobs, perform: in_turn(jobs, perform)
    )
    code, shown, _ = compress("sweep", project, "--seeds", 2, "--out", out)
    assert code == 0 and "trial 2 of 2: seed-1\n" in shown and "\033[?25l" not in shown, "the cursor is hidden beside a table"


def test_combinations_are_compared_over_equal_seeds(project, out):
    """Shared stages run once; each other value against the first of its key."""
    result = go(project, out, over=["tune.files=1,2", "prune.text=x,y"], stage="prune")
    assert sorted(calls(out)) == ["prune"] * 12 + ["select"] * 3 + ["tune"] * 6
    assert result.artifacts == {"select": 3, "tune": 6, "prune": 12} and result.titles == ("files", "text")
    assert result.counts == "stages run: select 3, tune 6, prune 12; reused: select 9, tune 6"
    assert [row[:4] for row in result.rows[:2]] == [("1", "x", "prune", "accuracy"), ("1", "y", "prune", "accuracy")]
    compared = [(row.first, row.second) for row in result.comparisons if row.metric == "accuracy"]
    pairs = [("1x", "1y"), ("1x", "2x"), ("1y", "2y"), ("2x", "2y")]
    assert sorted(compared) == [(tuple(first), tuple(second)) for first, second in pairs]
    assert {row.difference.verdict for row in result.comparisons} == {"equal in every pair"}
    text = (result.folder / "sweep.md").read_text()
    assert text.startswith("# toy: 12 trials, 2 values of tune.files × 2 values of prune.text × 3 seeds\n")
    page = (result.folder / "sweep.html").read_text()
    assert "<h1>toy: 12 trials" in page and "Plotly" not in page, "without costs there is nothing to plot"
    assert page.index("@media print") > page.index("prefers-color-scheme: dark")


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("user_error", "E501 trial seed-1, {project}:7: stages[1].tune: too much is removed. Remove less"),
        ("check_error", "E601 trial seed-1: logits differ. Look at row 3"),
        ("bug", "E899 trial seed-1: stage 'tune' failed unexpectedly"),
    ],
)
def test_a_trial_that_fails_is_told_and_does_not_stop_the_rest(project, out, compress, trouble, says):
    go(project, out)
    (out / "trouble-1").write_text(trouble)
    calls(out)
    code, shown, error = compress("sweep", project, "--seeds", 3, "--set", "tune.files=3", "--out", out)
    assert (code, error[:46]) == (3, f"E810 1 trial failed: {says[:4]} in seed-1. Each is t")
    assert f"FAILED {says.format(project=project)}" in shown
    folder = out / "toy-sweep"
    assert (
        "| tune | accuracy | 2 | 0.3500 | 0.3536 | 0.1000 | 0.6000 | 0.1000 none 0.6000 |" in (folder / "sweep.md").read_text()
    )
    assert list(json.loads((folder / "sweep.json").read_text())["failed"]) == ["seed-1"]
    (out / "trouble-1").unlink()
    calls(out)
    assert not go(project, out, overrides=["tune.files=3"]).failed
    assert calls(out) == ["tune", "prune"]


def test_every_mistake_of_a_trial_is_in_the_files(project, out, monkeypatch):
    def mistaken(config, inputs, workspace):
        if inputs.seed:
            raise UserErrors([UserError("E501", "too much is removed", "Less"), UserError("E403", "no rank", "More")])
        return toy(config, inputs, workspace)

    toys.replace(monkeypatch, "prune", run=mistaken)
    folder = go(project, out, runs=2).folder
    for form in ("md", "html"):
        assert re.findall(r"FAILED (E\d+) seed-1: ([a-z ]+)\.", (folder / f"sweep.{form}").read_text()) == [
            ("E501", "too much is removed"),
            ("E403", "no rank"),
        ]
    record = {"code": "E501", "what": "too much is removed", "others": [{"code": "E403", "what": "no rank"}]}
    assert json.loads((folder / "sweep.json").read_text())["failed"] == {"seed-1": record}


def test_a_trial_that_fails_leaves_no_model_in_memory(project, out):
    """On a GPU there would be no room for the trials after it."""
    out.mkdir()
    (out / "trouble-1").write_text("failing_with_a_model")
    left = []

    def engine(jobs, perform):
        for event in in_turn(jobs, perform):
            if (event.kind, event.trial) == ("started", "seed-2"):
                left.extend(model() for model in toys.MODELS)
            yield event

    error = go(project, out, engine=engine).failed["seed-1"]
    assert left == [None] and str(error).startswith("E899 trial seed-1: stage 'tune' failed unexpectedly")
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_errors_found_before_their_trial_are_kept_without_their_frames(tmp_path):
    with pytest.raises(UserError) as one:
        raise UserError("E501", "too much is removed", "Remove less")
    with pytest.raises(UserErrors) as several:
        raise UserErrors([one.value, one.value]) from one.value
    error = perform(TrialJob("a", None, tmp_path, "", (), several.value), None).error
    assert str(error) == str(several.value) and len(error.errors) == 2
    assert [kept.__traceback__ or kept.__cause__ for kept in (error, *error.errors)] == [None] * 3


def test_a_trial_outwaits_the_lock_of_a_lost_machine(project, out, monkeypatch):
    """A server of NFS 4 holds it for 90 seconds."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    (run := out / "toy-sweep" / "seed-0").mkdir(parents=True)

    def sleep(_: float) -> None:
        clock.now += 20
        if clock.now == 100:
            held.close()

    clock.sleep = sleep
    monkeypatch.setattr("pipelines.sweeps.trial_run.time", clock)
    with contextlib.ExitStack() as held:
        held.enter_context(lock(run / "run.lock"))
        assert not go(project, out, runs=2).failed and clock.now == 100


def test_a_mistake_in_every_trial_is_one_of_the_user(project, out, compress):
    out.mkdir()
    for seed in (0, 1):
        (out / f"trouble-{seed}").write_text("user_error")
    code, _, error = compress("sweep", project, "--seeds", 2, "--out", out)
    assert code == 2 and [line[:18] for line in error.splitlines()] == ["E501 trial seed-0,", "E501 trial seed-1,"]
    (out / "trouble-1").write_text("check_error")
    assert compress("sweep", project, "--seeds", 2, "--out", out)[0] == 3
    with lock(out / "toy-sweep" / "sweep.lock"), pytest.raises(UserError, match=r"E802 .*is running this sweep"):
        go(project, out)


def test_a_sweep_that_is_stopped_goes_on_where_it_was(project, out, tmp_path):
    out.mkdir()
    (out / "trouble-1").write_text("hang")
    process = start(tmp_path / "said", go_measured, project, out)
    until(out / "hanging", process)
    os.kill(process.pid, signal.SIGTERM)
    assert wait(process) == 143
    (out / "trouble-1").unlink()
    assert calls(out) == ["select", "tune", "prune", "select", "tune"]
    whole = go(project, tmp_path / "whole")
    assert go(project, out).spreads == whole.spreads
    assert calls(out) == ["tune", "prune", "select", "tune", "prune"]
    assert (out / "toy-sweep" / "sweep.json").read_bytes() == (whole.folder / "sweep.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runs": 1}, "E115 --seeds 1: a spread needs at least 2 runs"),
        ({"share": 0.9}, "E115 --share is not used without --subsets"),
        ({"kind": "subsets", "share": 1.0}, "E115 --share 1 is no part of the training rows"),
        (
            {"kind": "subsets", "overrides": ["task.subset={share: 0.5}"]},
            "E115 --set task.subset={share: 0.5}: the pipeline trains on a subset already",
        ),
        ({"stage": "select"}, "E115 --stage select: it measures no quality. Stages that do: tune, prune"),
        ({"stage": "tun"}, "E111 --stage: no stage 'tun' in this pipeline. Did you mean 'tune'?"),
        ({"stage": "prune", "until": "tune"}, "E111 --stage prune comes after --until tune"),
        ({"until": "select"}, "E115 --until select: nothing measures quality up to there"),
        ({"until": "x"}, "E111 --until: no stage 'x'"),
        ({"overrides": ["seed=4294967295"]}, "E104 the sweep's seed=4294967296: must be less than 4,294,967,296"),
        ({"overrides": ["tune.fils=2"]}, "E102 --set tune.fils=2: unknown key"),
        ({"overrides": ["task.train=no.tsv"]}, "E201"),
        ({"kind": "subsets", "share": 0.01}, "E211 trial subset-0, "),
        ({"runs": None}, "E115 nothing differs between the runs"),
        ({"over": ["seed=1,2"]}, "E115 the compared key seed and --seeds set the same, and only the second one would count"),
        ({"over": ['"seed"=1,2']}, 'E115 the compared key "seed" and --seeds set the same'),
        ({"over": ["prune.text=a,b", '"prune".text=c,d']}, "E115 the compared key prune.text and the compared key "),
        ({"over": ["tune.files=1,2", "stages.1.tune.files=3,4"]}, "E115 the compared key tune.files and the compared key "),
        (
            {"over": ["tune.files=1,2"], "overrides": ["tune.files=7"]},
            "E115 --set tune.files=7 and the compared key tune.files",
        ),
        (
            {"over": ["trainings.files=1,2"], "overrides": ["tune.files=7"]},
            "E115 --set tune.files=7 and the compared key train",
        ),
        ({"over": ["name=a,b"]}, "E115 the name is compared as a key"),
        (
            {"over": ["report.text=a,b"]},
            "E115 report.text is compared, and stage 'report' is not run: it comes after 'prune'. Add --until report",
        ),
        (
            {"over": ["tune.id=tune,a"]},
            "E115 trial id-a_seed-0: the stages that measure its quality are a, prune, and not tune",
        ),
        ({"over": ["task.max_length=64,1024"]}, "E113 trial max_length-1024_seed-0, the sweep's task.max_length=1024: 1024"),
        ({"over": ["tune.fils=4,8"]}, "E102 the sweep's tune.fils=4: unknown key. Did you mean 'files'?"),
        (
            {"over": ["tune.files=4,8"], "overrides": ["tune.fils=4"]},
            "E102 --set tune.fils=4: unknown key. Did you mean 'files'?",
        ),
        ({"over": ["model=./model,./missing"], "runs": 2}, "E303 trial model-"),
        ({"over": ["task.text=[sentence],[label]"], "runs": 2}, "E104 trial text-label_seed-0, "),
        ({"over": ["tune.files=null,2"]}, "E115 --over tune.files=null,2: null is no value to compare"),
        ({"over": ["tune.files=1,2"] * 2}, "E115 --over tune.files=1,2: the key is given twice"),
        ({"over": ["tune.files=8,'8'"]}, "E115 --over tune.files=8,'8': 8 and '8' are written alike in a table. Keep one"),
        ({"over": ["select.text=[a],'[\"a\"]'"]}, "E115 --over select.text="),
        ({"over": ["tune.files=1,,2"]}, "E101 --over tune.files=1,,2"),
        ({"over": ["tune.files=1,2"], "runs": 6000}, "E115 12,000 runs are more than 10,000"),
        ({"name": "a/b"}, "E115 a sweep cannot be called 'a/b'"),
    ],
)
def test_mistakes_come_before_anything_is_written(project, out, options, says):
    with pytest.raises(UserError) as error:
        go(project, out, **options)
    assert str(error.value).startswith(says)
    assert not out.exists()


def test_a_pipeline_without_a_model_and_a_folder_that_is_a_file(project, out):
    project.write_text(project.read_text().split("  - tune")[0])
    with pytest.raises(UserError, match=r"E114 .*pipeline.yaml:6"):
        go(project, out)
    project.write_text(toys.PIPELINE)
    out.mkdir()
    (out / "toy-sweep").touch()
    with pytest.raises(UserError, match="E801"):
        go(project, out)


def test_what_a_variant_deployed_is_found(project, out):
    """A variant's run folder lies two deep below the store, an ordinary run's one."""
    project.write_text(project.read_text().replace("  - report: {text: all}", "  - deploy:"))
    go(project, out, until="deploy", stage="prune")
    run_pipeline(load_pipeline(project), out)
    found = [find_repository(run).repository.parent for run in (out / "toy-sweep" / "seed-0", out / "toy")]
    assert found[0] == found[1] and found[0].parent == out / ".store"
    assert find_repository(out / "toy-sweep" / "seed-1").repository.parent != found[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- 1\n", "E120 {grid}:1: a grid is a mapping of keys to lists of values"),
        ("tune.files: [1, 2]\nselect.text: x\n", "E120 {grid}:2: select.text: 'select.text' has no list of several values"),
        ("tune.files: [1]\n", "E120 {grid}:1: tune.files: 'tune.files' has no list"),
        ("tune.files: [null, 2]\n", "E120 {grid}:1: tune.files: null is no value to compare"),
        ("tune.files: [2, 2]\n", "E115 {grid}:1: tune.files: a value appears twice"),
        ("tune.fils: [1, 2]\n", "E102 the sweep's tune.fils=1: unknown key. Did you mean 'files'"),
    ],
)
def test_a_grid_that_is_none(project, out, compress, tmp_path, text, says):
    grid = tmp_path / "grid.yaml"
    grid.write_text(text)
    code, shown, error = compress("sweep", project, "--grid", grid, "--out", out)
    assert (code, shown) == (2, "") and error.startswith(says.format(grid=grid)) and not out.exists()


ROWS_OF_SIZE = "size: {few: {tune.files: 1}, many: {tune.files: 9}}\n"


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("size: {few: {seed: 1, tune.files: 1}, many: {seed: 2}}", "--seeds 2", "E115 seed of size 'few' and --seeds set the"),
        (ROWS_OF_SIZE, "--over tune.files=3,4", "E115 tune.files of size 'few' and the compared key tune.files set the same"),
        (ROWS_OF_SIZE, "--set tune.files=3", "E115 tune.files of size 'few' and --set tune.files=3 set the same"),
        (ROWS_OF_SIZE + "more: {a: {tune.files: 3}, b: {tune.files: 4}}", "", "E115 tune.files of size 'few' and every row of"),
        (
            "size: {few: {report.text: a}, many: {report.text: b}}",
            "--seeds 2",
            "E115 'size' is compared, and changes nothing in what is run. Compare what is used up to 'prune', or name",
        ),
        *(
            (
                "size: {few: {tune.files: 1}, many: {tune.files: 9, report.text: b}}",
                options,
                "E115 report.text of size 'many' is compared, and stage 'report' is not run: it comes after",
            )
            for options in ("", "--search 2")
        ),
        (
            "size: {few: {tune.files: 1}, many: {tune.files: 9, name: b}}",
            "--dry-run",
            "E115 the name is compared as a key, and changes nothing in a run",
        ),
        (ROWS_OF_SIZE, "--until select", "E115 trial size-few: --until select: nothing measures quality"),
        (
            "m: {a: {tune.files: 1}, b: {stages: [{select: {id: prune}}, {tune: {}}]}}",
            "--stage prune",
            "E115 trial m-b: --stage prune: it measures no quality",
        ),
        (
            "m: {a: {tune.files: 1}, b: {stages: [{tune: {id: first}}, {prune: {}}, {tune: {}}]}}",
            "--stage tune --until prune",
            "E111 trial m-b: --stage tune comes after --until prune",
        ),
    ],
)
def test_rows_that_would_not_count_or_are_not_measured(project, out, compress, tmp_path, text, options, says):
    (tmp_path / "grid.yaml").write_text(text)
    code, shown, error = compress("sweep", project, "--grid", tmp_path / "grid.yaml", *options.split(), "--out", out)
    assert (code, shown) == (2, "") and error.startswith(says), error
    assert not out.exists()


def test_what_is_set_on_purpose_is_no_contradiction(project, out, tmp_path, monkeypatch):
    """A column that counts more than rows, which are the same there; the first of the seeds; and keys below others."""
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"{ROWS_OF_SIZE}more: {{a: {{tune.text: a}}, b: {{tune.files: 4}}}}\n")
    plan = SweepPlan(axes_of(["task.max_length=64,128"], grid), seeds=2)
    monkeypatch.chdir(project.parent)
    files = "{train: train.tsv, validation: dev.tsv, text: sentence}"
    assert len(preview_sweep(project, plan, out, overrides=["seed=1", f"task={files}"])) == 16


def test_a_search_whose_range_ends_beyond_the_models_positions(project, out):
    with pytest.raises(UserError, match=r"E113 trial 000_max_length-1024, .*: 1024 tokens, where the model has"):
        sweep(project, SweepPlan(axes_of(["task.max_length=64..1024"], None), search=Search(4)), out)
    assert not out.exists()


@pytest.mark.parametrize("search", [None, Search(2)])
def test_a_model_and_data_that_no_trial_reads_need_not_exist(project, out, tmp_path, search):
    """Those of the file, where each trial has its own."""
    project.write_text(toys.PIPELINE.replace("./model", "./missing").replace("train.tsv", "missing.tsv"))
    toys.write_model(other := tmp_path / "other")
    over = [f"model={project.parent / 'model'},{other}", f"task.train={project.parent}/train.tsv,{project.parent}/dev.tsv"]
    assert not sweep(project, SweepPlan(axes_of(over, None), search=search), out).failed


@pytest.mark.parametrize(("name", "words"), [("'../../esc/x'", "esc_x-"), ("尺寸", ""), ("'-'", "")])
def test_a_name_of_rows_leads_nowhere(project, out, compress, tmp_path, name, words):
    (tmp_path / "grid.yaml").write_text(ROWS_OF_SIZE.replace("size", name))
    assert compress("sweep", project, "--grid", tmp_path / "grid.yaml", "--out", out)[0] == 0
    folders = sorted(path.parent.relative_to(out / "toy-sweep") for path in tmp_path.rglob("run.json"))
    assert [str(folder) for folder in folders] == [f"{words}few", f"{words}many"]


def changing(change):
    """An engine of one process, where something changes after the first trial."""

    def engine(jobs, perform):
        for event in in_turn(jobs, perform):
            yield event
            if event.kind == "ended" and event.trial == "seed-0":
                change()

    return engine


def test_trials_of_changed_data_or_models_are_not_in_the_table(project, out, tmp_path, monkeypatch):
    data = project.parent / "train.tsv"
    changed = go(project, out, engine=changing(lambda: data.write_text(ROWS.replace("film", "play"))))
    assert changed.spreads[0].values == (VALUES[0], None, None)
    assert [str(error) for error in changed.failed.values()] == [
        f"E807 trial seed-{seed}, {data}: changed since the sweep started. Run the same command again, and do not change it "
        "meanwhile: the other trials are of what it was before"
        for seed in (1, 2)
    ]
    assert not go(project, out).failed
    other = go(project, out, engine=changing(lambda: toys.flip_weight(project.parent / "model")))
    assert [error.where for error in other.failed.values()] == ["trial seed-1, ./model", "trial seed-2, ./model"]
    toys.write_model(teacher := tmp_path / "teacher")
    toys.replace(monkeypatch, "prune", run=toy, beside=NamedInputs(models=("text",)))
    other = go(project, out, overrides=[f"prune.text={teacher}"], engine=changing(lambda: toys.flip_weight(teacher)))
    assert [error.where for error in other.failed.values()] == [f"trial seed-{seed}, {teacher}" for seed in (1, 2)]


def test_targets_out_of_reach_and_workers_that_died_are_no_mistakes_in_the_input(project, out, compress, monkeypatch):
    def beyond(config, inputs, workspace):
        raise UserError("E520", "0.1 of the FLOPs is out of reach", "Lower the target")

    def dying(jobs, perform):
        yield from (TrialEvent("ended", job.name, outcome=died(job, "was ended by SIGKILL")) for job in jobs)

    toys.replace(monkeypatch, "prune", run=beyond)
    code, shown, error = compress("sweep", project, "--over", "prune.text=x,y", "--out", out)
    assert (code, error) == (0, "") and "text-y: 0.1 of the FLOPs" in (out / "toy-sweep" / "sweep.md").read_text()
    assert "\nE520 trial text-y, " in shown and "FAILED" not in shown
    code, _, error = compress("sweep", project, "--seeds", 2, "--out", out)
    assert code == 2 and error.startswith("E520 trial seed-0"), "where nothing is compared it is a mistake"
    result = go(project, out, engine=dying)
    assert [error.code for error in result.failed.values()] == ["E811"] * 3
    assert "FAILED E811 seed-0" in (result.folder / "sweep.md").read_text()


def test_the_table_of_an_earlier_sweep_stays_until_the_next_one_has_its_own(project, out):
    folder, said = go(project, out).folder, []
    before = {name: (folder / name).read_bytes() for name in FILES}
    troubles = [out / f"trouble-{seed}" for seed in (0, 1)]
    for trouble in troubles:
        trouble.write_text("user_error")
    with pytest.raises(UserError, match="E501"):
        go(project, out, runs=2, overrides=["tune.files=5"], say=said.append)
    assert {name: (folder / name).read_bytes() for name in FILES} == before
    assert said[-1] == f"sweep.json, sweep.md, sweep.html in {folder} are still those of an earlier sweep"
    for trouble in troubles:
        trouble.unlink()
    go(project, out, runs=2, overrides=["tune.files=5"], say=said.append)
    assert (folder / "sweep.json").read_bytes() != before["sweep.json"]
    assert sum("earlier sweep" in line for line in said) == 1


def test_a_sweep_is_not_written_into_the_folder_of_a_run(project, out):
    """Of another pipeline, too; nor into that of the pipeline's own runs before there is one."""
    says = "the folder of a run, and not of a sweep. Give the sweep another --name"
    with pytest.raises(UserError, match=rf"E115 .*toy: {says}"):
        go(project, out, name="toy")
    assert not out.exists()
    for name in ("toy", "other"):
        run_pipeline(load_pipeline(project, [f"name={name}"]), out)
        before = tree(out)
        with pytest.raises(UserError, match=rf"E115 .*{name}: {says}"):
            go(project, out, name=name)
        assert tree(out) == before


def test_help_and_usage(project, compress, tmp_path):
    code, shown, _ = compress("sweep", "--help")
    assert code == 0 and "Example: compress sweep" in shown
    assert compress("sweep", "x.yaml", "--engine", "nonsense", "--seeds", "2")[0] == 2
    assert compress("sweep", "x.yaml", "--seeds", "2")[2].startswith("E110")
    assert compress("sweep", project, "--seeds", "2", "--address", "auto")[2].startswith("E115 --address is not used by")
    project.write_text(project.read_text().replace("threads: 1\n", ""))
    assert compress("sweep", project, "--seeds", "2", "--workers", "2")[2].startswith("E121 trials side by side need a fixed")
    (tmp_path / "grid.yaml").write_text('size: {few: {tune.files: 1, "threads": 1}, many: {tune.files: 9}}\n')
    for compared in (["--over", "threads=1,2"], ["--grid", tmp_path / "grid.yaml"]):
        for engine in (["--workers", "2"], ["--engine", "ray"], ["--workers", "2", "--threads", "1"]):
            code, _, error = compress("sweep", project, *compared, *engine)
            assert code == 2 and error.startswith("E115 the number of threads is compared, and trials side by side all have")
        assert compress("sweep", project, *compared, "--dry-run")[0] == 0


@pytest.mark.slow
def test_real_stages(tmp_path):
    """Tune and prune for real on two subsets: the values are those of the artifacts, and the merge and beyond are not run."""
    path = write_pipeline(tmp_path, stages=[STAGES[0], STAGES[1], STAGES[2], {"merge": None}, {"export": None}], rows=60)
    given = (path, SweepPlan(subsets=2, share=0.8), tmp_path / "runs")
    foreseen = stage_rows(preview_sweep(*given, overrides=["tune.epochs=1"]))
    assert [row[0] + row[4] for row in foreseen] == ["select1", "tune2", "prune2"] and not (tmp_path / "runs").exists()
    result = sweep(*given, overrides=["tune.epochs=1"])
    assert all(trial.finished for trial in preview_sweep(*given, overrides=["tune.epochs=1"]))
    made = sorted(folder.name.split("-")[0] for folder in (tmp_path / "runs" / ".store").iterdir())
    assert made == ["prune", "prune", "select", "tune", "tune"]
    for spread in result.spreads:
        manifests = [
            json.loads(file.read_text()) for file in (tmp_path / "runs" / ".store").glob(f"{spread.stage}-*/artifact.json")
        ]
        assert sorted(one["metadata"]["quality"][spread.metric] for one in manifests) == sorted(spread.values)
        assert len({json.dumps(one["files"]) for one in manifests}) == 2, "different rows train different weights"
    assert {one.stage for one in result.spreads} == {"tune", "prune"}
