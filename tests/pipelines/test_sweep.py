"""Sweeps over seeds and subsets: what runs, what is reused, what comes out, and every mistake before anything runs."""

import json
import os
import signal

import pytest
import yaml

from compressor.errors import CheckError, CompressError, UserError
from compressor.tasks import Subset
from compressor.tasks.reading import read_task
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.served import find_repository
from pipelines.runs.sweep import Variant, summarize, sweep, values_of, variants_of
from tests.compressor.test_tasks import task
from tests.pipelines import toys
from tests.pipelines.processes import start, until, wait
from tests.pipelines.toys import tree
from tests.tiny import STAGES, write_pipeline

ROWS = "sentence\tlabel\n" + "".join(f"film {n}\t{'no' if n % 2 else 'yes'}\n" for n in range(100))
VALUES = {0: 0.1, 1: 0.2, 2: 0.6}
"""Accuracy of the toys by seed: mean 0.3, squared deviations 0.04 + 0.01 + 0.09, so a variance of 0.07."""


def toy(config, inputs, workspace):
    """A toy that measures a quality, and has trouble with one seed only."""
    metadata = toys.run(config, inputs, workspace)
    trouble = workspace.log_folder.parents[2] / f"trouble-{inputs.seed}"
    if trouble.exists():
        toys.TROUBLES[trouble.read_text()](trouble)
    accuracy = VALUES[inputs.task.subset.seed if inputs.task.subset else inputs.seed]
    return {**metadata, "quality": {"accuracy": accuracy, "matthews": -accuracy, "interval": [0.0, 1.0], "rows": 2}}


def measure_quality(monkeypatch):
    """Put toys with a quality in the place of those without one."""
    for stage in toys.STAGES:
        if stage.produces == "model":
            toys.replace(monkeypatch, stage.name, run=toy)


def go_measured(project, out):
    """`go` where nothing but the toys is installed."""
    measure_quality(pytest.MonkeyPatch())
    go(project, out)


@pytest.fixture
def project(project, monkeypatch):
    """The project of toys, whose models have a quality, on 100 training rows."""
    measure_quality(monkeypatch)
    (project.parent / "train.tsv").write_text(ROWS)
    return project


def go(project, out, kind="seeds", runs=3, **options):
    return sweep(project, kind, runs, out, **options)


def calls(out, kind="seeds"):
    """The stages that really ran since the last look."""
    path = out / f"toy-sweep-{kind}" / "calls"
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
    assert variants_of(load_pipeline(project, ["seed=7"]), "seeds", 2) == [
        Variant("seed-7", {"seed": 7}),
        Variant("seed-8", {"seed": 8}),
    ]
    pipeline = load_pipeline(project, ["seed=7"])
    variants = variants_of(pipeline, "subsets", 2)
    assert [one.settings for one in variants] == [[f'task.subset={{"share": 0.9, "seed": {seed}}}'] for seed in (0, 1)]
    again = load_pipeline(project, ["seed=7", *variants[1].settings])
    assert (again.seed, again.task.subset) == (7, Subset(share=0.9, seed=1))


def test_every_value_has_a_folder_of_its_own(project):
    """Although not every letter of a value may stand in a folder's name."""
    names = [variant.name for variant in values_of(load_pipeline(project), "select.text=a/b,a b,c")]
    assert names == ["text-a_b-1", "text-a_b-2", "text-c-3"]


def test_mean_and_standard_deviation_by_hand():
    first, second = summarize([{"tune": {"accuracy": value, "matthews": -1.0}} for value in (0.1, 0.6, 0.2)])
    assert (first.stage, first.metric, first.runs, first.values) == ("tune", "accuracy", 3, (0.1, 0.6, 0.2))
    assert (first.mean, first.std) == (pytest.approx(0.3), pytest.approx(0.07**0.5))
    assert (first.min, first.max) == (0.1, 0.6)
    assert (second.mean, second.std) == (-1.0, 0.0)


def test_a_sweep_over_seeds(project, out, compress):
    """Every float of quality at every model stage; the report is not run; a second call makes nothing and says the same."""
    code, shown, error = compress("sweep", project, "--stability", "seeds", "--runs", 3, "--out", out)
    assert (code, error) == (0, "")
    assert calls(out) == ["select", "tune", "prune"] * 3
    assert [line for line in shown.splitlines() if line.startswith("variant")] == [
        f"variant {number + 1} of 3: seed-{number}" for number in range(3)
    ]
    row = next(line.split() for line in shown.splitlines() if "matthews" in line and "prune" in line)
    assert row[2:] == ["3", "-0.3000", "0.2646", "-0.6000", "-0.1000", "-0.1000", "-0.2000", "-0.6000"]
    folder = out / "toy-sweep-seeds"
    assert shown.splitlines()[-1] == f"sweep: {folder / 'sweep.md'}"
    assert (
        "| tune | accuracy | 3 | 0.3000 | 0.2646 | 0.1000 | 0.6000 | 0.1000 0.2000 0.6000 |"
        in (folder / "sweep.md").read_text()
    )
    written, store = [(folder / name).read_bytes() for name in ("sweep.json", "sweep.md")], tree(out / ".store")
    content = json.loads(written[0])
    assert [one["overrides"] for one in content["variants"]] == [{"seed": seed} for seed in range(3)]
    assert [(one["stage"], one["metric"]) for one in content["summary"]] == [
        (stage, metric) for stage in ("tune", "prune") for metric in ("accuracy", "matthews")
    ]
    assert content["summary"][0]["values"] == list(VALUES.values()) and content["until"] == "prune"
    code, again, _ = compress("sweep", project, "--stability", "seeds", "--runs", 3, "--out", out)
    assert (code, calls(out), again.count("reused"), tree(out / ".store")) == (0, [], 9, store)
    assert [(folder / name).read_bytes() for name in ("sweep.json", "sweep.md")] == written


def test_every_variant_is_an_ordinary_run_on_one_store(project, out):
    """What a plain run has made is reused, and what a sweep has made a plain run reuses; more runs add only themselves."""
    run_pipeline(load_pipeline(project), out, until="tune")
    go(project, out, runs=2)
    assert calls(out) == ["prune", "select", "tune", "prune"]
    assert run_pipeline(load_pipeline(project, ["seed=1"]), out).reused == ("select", "tune", "prune")
    assert go(project, out, runs=3).spreads[0].runs == 3
    assert calls(out) == ["select", "tune", "prune"]
    lock = yaml.safe_load((out / "toy-sweep-seeds" / "seed-2" / "pipeline.lock.yaml").read_text())
    assert (lock["seed"], [stage["id"] for stage in lock["stages"]]) == (2, ["select", "tune", "prune"])


def test_subsets_share_what_does_not_read_the_data(project, out):
    result = go(project, out, "subsets", share=0.5, overrides=["seed=9"], stage="tune")
    assert calls(out, "subsets") == ["select", "tune", "prune", "tune", "prune", "tune", "prune"]
    assert [(one.stage, one.values) for one in result.spreads][:1] == [("tune", tuple(VALUES.values()))]
    assert {one.stage for one in result.spreads} == {"tune"}
    content = json.loads((result.folder / "sweep.json").read_text())
    assert [one["overrides"]["task.subset"] for one in content["variants"]] == [{"share": 0.5, "seed": n} for n in range(3)]
    assert content["set"] == ["seed=9"]


def test_another_engine_gets_the_variants_and_a_function(project, out):
    def backwards(variants, run, say):
        return [run(variant) for variant in reversed(variants)][::-1]

    assert go(project, out, execute=backwards).spreads[0].values == tuple(VALUES.values())


@pytest.mark.parametrize(
    ("trouble", "kind", "says"),
    [
        ("user_error", UserError, "E501 variant seed-1, {project}:7: stages[1].tune: too much is removed. Remove less"),
        ("check_error", CheckError, "E601 variant seed-1: logits differ. Look at row 3"),
        ("bug", CompressError, "E899 variant seed-1: stage 'tune' failed unexpectedly"),
    ],
)
def test_a_variant_that_fails_is_named_and_the_finished_ones_are_kept(project, out, trouble, kind, says):
    go(project, out)
    (out / "trouble-1").write_text(trouble)
    calls(out)
    said = []
    with pytest.raises(kind) as error:
        go(project, out, overrides=["tune.files=3"], say=said.append)
    assert str(error.value).startswith(says.format(project=project)) and isinstance(error.value, kind)
    assert said[-1] == "1 of 3 variants are finished and kept. The same command continues."
    assert not (out / "toy-sweep-seeds" / "sweep.json").exists(), "the summary of an earlier sweep must not be left"
    (out / "trouble-1").unlink()
    calls(out)
    go(project, out, overrides=["tune.files=3"])
    assert calls(out) == ["tune", "prune"] * 2


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
    assert (out / "toy-sweep-seeds" / "sweep.json").read_bytes() == (whole.folder / "sweep.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"runs": 1}, "E115 --runs 1: a spread needs at least 2 runs"),
        ({"share": 0.9}, "E115 --share is not used with --stability seeds"),
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
        ({"overrides": ["seed=4294967295"]}, "E104 --set seed=4294967296: must be less than 4,294,967,296"),
        ({"overrides": ["tune.fils=2"]}, "E102 --set tune.fils=2: unknown key"),
        ({"overrides": ["task.train=no.tsv"]}, "E201"),
        ({"kind": "subsets", "share": 0.01}, "E211 variant subset-0, "),
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
    (out / "toy-sweep-seeds").touch()
    with pytest.raises(UserError, match="E801"):
        go(project, out)


def test_what_a_variant_deployed_is_found(project, out):
    """A variant's run folder lies two deep below the store, an ordinary run's one."""
    project.write_text(project.read_text().replace("  - report: {text: all}", "  - deploy:"))
    go(project, out, until="deploy", stage="prune")
    run_pipeline(load_pipeline(project), out)
    found = [find_repository(run).repository.parent for run in (out / "toy-sweep-seeds" / "seed-0", out / "toy")]
    assert found[0] == found[1] and found[0].parent == out / ".store"
    assert find_repository(out / "toy-sweep-seeds" / "seed-1").repository.parent != found[0]


def test_help_and_usage(compress):
    code, shown, _ = compress("sweep", "--help")
    assert code == 0 and "Example: compress sweep" in shown
    assert compress("sweep", "x.yaml", "--stability", "nonsense", "--runs", "2")[0] == 2
    assert compress("sweep", "x.yaml", "--stability", "seeds", "--runs", "2")[2].startswith("E110")


def test_real_stages(tmp_path):
    """Tune and prune for real on two subsets: the values are those of the artifacts, and the merge and beyond are not run."""
    path = write_pipeline(tmp_path, stages=[STAGES[0], STAGES[1], STAGES[2], {"merge": None}, {"export": None}], rows=60)
    result = sweep(path, "subsets", 2, tmp_path / "runs", share=0.8, overrides=["tune.epochs=1"])
    made = sorted(folder.name.split("-")[0] for folder in (tmp_path / "runs" / ".store").iterdir())
    assert made == ["prune", "prune", "select", "tune", "tune"]
    for spread in result.spreads:
        manifests = [
            json.loads(file.read_text()) for file in (tmp_path / "runs" / ".store").glob(f"{spread.stage}-*/artifact.json")
        ]
        assert sorted(one["metadata"]["quality"][spread.metric] for one in manifests) == sorted(spread.values)
        assert len({json.dumps(one["files"]) for one in manifests}) == 2, "different rows train different weights"
    assert {one.stage for one in result.spreads} == {"tune", "prune"}
