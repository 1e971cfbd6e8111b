"""A task's own metric and the files that are only scored, from the pipeline file to metadata, sweeps and checks."""

import json
from pathlib import Path

import pytest
import yaml

from pipelines.check.checkup import account_of
from pipelines.engine import stage_inputs
from pipelines.engine.preflight import check_inputs
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.sweeps.trial_run import quality_of
from tests.pipelines import toys
from tests.tiny import write_pipeline

FAST = {"method": "lora", "epochs": 1, "learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"tune": {**FAST, "keep_best": True, "evaluate_every": 4}},
    {"prune": {"structure": "neurons", "criterion": "random", "remove": 0.5}},
    {"recover": FAST},
    {"merge": None},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Artifacts of two runs that choose F1, by id: without files that are only scored, and with two."""
    folder = tmp_path_factory.mktemp("project")
    path = write_pipeline(folder, stages=STAGES, rows=40)
    lines = (folder / "dev.tsv").read_text().splitlines(keepends=True)
    (folder / "other.tsv").write_text("".join([lines[0], *lines[1:31:2], *lines[2:6:2]]))
    tests = {name: str(folder / f"{name}.tsv") for name in ("dev", "other")}
    keys = (["task.metric=f1"], ["task.metric=f1", f"task.test={json.dumps(tests)}"])
    return [run_pipeline(load_pipeline(path, overrides), folder / "runs").artifacts for overrides in keys]


def test_a_run_is_measured_by_them(made):
    _, tested = made
    for stage in ("tune", "recover", "merge"):
        metadata = tested[stage].metadata
        low, high = metadata["quality"]["interval"]
        assert low < metadata["quality"]["f1"] < high and metadata["tests"]["dev"] == metadata["quality"]
        assert metadata["tests"]["other"]["rows"] == 17 and metadata["tests"]["other"]["f1"] != metadata["quality"]["f1"]
    control = tested["recover"].metadata["control"]
    assert control["tests"]["dev"] == control["quality"]
    assert "tests" not in tested["prune"].metadata, "pruned and not yet recovered: nothing to publish"
    best = max(evaluation["value"] for evaluation in tested["tune"].metadata["evaluations"])
    assert best == tested["tune"].metadata["quality"]["f1"], "the best F1 is kept, not the best accuracy"
    sweeps = quality_of(tested, ("tune",))["tune"]
    assert sweeps["f1, dev"] == sweeps["f1"] and "rows, other" not in sweeps


def test_files_that_are_only_scored_change_nothing_else(made):
    plain, tested = made
    for stage in ("tune", "recover", "merge"):
        before, after = plain[stage], tested[stage]
        assert (before.id != after.id, before.files) == (True, after.files)
        assert {**after.metadata, "tests": None, "control": None} == {**before.metadata, "tests": None, "control": None}


def test_their_content_counts_only_where_they_are_scored(project, out, monkeypatch):
    toys.replace(monkeypatch, "tune", scores_tests=True)
    (project.parent / "mm.tsv").write_text("sentence\tlabel\na film\tyes\n")

    def ids(*overrides):
        artifacts = run_pipeline(load_pipeline(project, overrides), out).artifacts
        return artifacts["select"].id, artifacts["tune"].id

    place = f"task.test={{mm: {project.parent / 'mm.tsv'}}}"
    found = [ids(), ids(place)]
    (project.parent / "mm.tsv").write_text("sentence\tlabel\na film\tno\n")
    found.append(ids(place))
    assert len({select for select, _ in found}) == 1 and len({tune for _, tune in found}) == 3
    locked = yaml.safe_load((out / "toy" / "pipeline.lock.yaml").read_text())
    assert [Path(name).name for name in locked["data"]] == ["train.tsv", "dev.tsv", "mm.tsv"]


def test_what_scores_texts_counts_where_they_are_scored(project, out, monkeypatch):
    toys.replace(monkeypatch, "prune", scores_texts=True)
    found = []
    for version in ("1", "2"):
        monkeypatch.setattr(stage_inputs, "scored_by", lambda tasks, version=version: {"sacrebleu": version})
        artifacts = run_pipeline(load_pipeline(project), out).artifacts
        found.append((artifacts["tune"].id, artifacts["prune"].id))
    (tune, prune), (again, made_again) = found
    assert tune == again and prune != made_again


def test_a_check_tells_of_them(project):
    (project.parent / "mm.tsv").write_text("sentence\tlabel\na good film\tyes\nunseen\tno\n")
    account = account_of(check_inputs(load_pipeline(project, [f"task.test={{mm: {project.parent / 'mm.tsv'}}}"])))
    assert account["tasks"]["task"]["test.mm"]["rows"] == 2
    assert any("1 of 2 test.mm rows are in the training file, too" in text for text in account["warnings"])
