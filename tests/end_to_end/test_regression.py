"""A number for each pair of sentences, all the way: scores by its gradients, recovery with a live teacher, int8, Triton."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from compressor import load
from compressor.tasks.task_kind import kind_of
from export.parity.bounds import BOUNDS
from export.parity.compare import in_words
from pipelines.cli.commands import main
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from serving.predict import predict
from serving.server import EmbeddedServer
from tests.tiny import LEFT_OUT, write_data, write_pipeline, write_scores

FAST = {"learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"select": {"score": "fish", "count": 8, "samples": 32, "batch_size": 8}},
    {"tune": {"method": "dsee", "rank": 4, "epochs": 16, **FAST}},
    {"prune": [
        {"structure": "heads", "criterion": "taylor", "remove": 1},
        {"structure": "weights", "criterion": "fisher", "remove": 0.1},
    ]},
    {"recover": {"method": "lora", "rank": 4, "modules": "all", "epochs": 4, "distill": "both", "control": False, **FAST}},
    {"merge": None},
    {"export": None},
    {"deploy": {"name": "alike"}},
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}},
    {"report": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("project"), kind="regression", stages=STAGES)


@pytest.fixture(scope="module")
def run(project):
    """The result of the whole run."""
    return run_pipeline(load_pipeline(project), project.parent / "runs")


@pytest.mark.slow
def test_it_learns_a_number_and_keeps_it(project):
    artifacts = run_pipeline(load_pipeline(project), project.parent / "runs", until="merge").artifacts
    metadata = {name: made.metadata for name, made in artifacts.items()}
    assert metadata["merge"]["labels"] == ["score"] and load(artifacts["merge"].folder).classifier.out_features == 1
    assert all(hop["passed"] for name in ("prune", "merge") for hop in metadata[name]["parity"])
    losses = metadata["tune"]["losses"]
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]
    for name in ("tune", "recover", "merge"):
        quality = metadata[name]["quality"]
        assert set(quality) == {"spearman", "interval", "pearson", "rows"} and quality["spearman"] > 0.6


@pytest.mark.slow
def test_every_hop_is_proven_and_verified_again(run):
    exported, merged = run.artifacts["export"].metadata["files"]["compressed"], run.artifacts["merge"].metadata["quality"]
    for file in exported["onnxruntime"].values():
        assert abs(file["quality"]["spearman"] - merged["spearman"]) < 0.01
    hops = [hop for made in run.artifacts.values() for hop in made.metadata.get("parity", [])]
    assert len(hops) == 9 and all(hop["passed"] for hop in hops)
    (bound, *_) = {hop["bound"] for hop in hops if hop["kind"] == "int8"}
    assert bound == in_words(BOUNDS["int8"], kind_of("regression")) and bound.startswith("concordance 99%")
    assert [check.fault for check in verify(run.folder, serve=False) if not check.passed] == []


@pytest.mark.slow
def test_a_recorded_quality_that_is_not_there_is_found(run, monkeypatch):
    """As `verify` compares it: under the metric of the kind."""
    recorded = run.artifacts["merge"].metadata["quality"]["spearman"]
    artifact = replace(run.artifacts["merge"], metadata={**run.artifacts["merge"].metadata})
    artifact.metadata["quality"] = {**artifact.metadata["quality"], "spearman": recorded - 0.1}
    monkeypatch.setattr(
        "pipelines.runs.finished.FinishedRun.artifact", lambda _, stage: {**run.artifacts, "merge": artifact}[stage["id"]]
    )
    failed = {check.hop: check.fault for check in verify(run.folder, serve=False, stage="merge") if not check.passed}
    assert f"E613 spearman {recorded:.4f}, recorded {recorded - 0.1:.4f}" in failed["quality as recorded"]


@pytest.mark.slow
def test_the_report_speaks_of_correlations(run):
    report = json.loads((run.folder / "report.json").read_text())
    written, page = (run.folder / "report.md").read_text(), (run.folder / "report.html").read_text()
    assert report["metric"]["key"] == "spearman" and report["summary"][0]["metric"] == "Spearman (× 100, 95 % interval)"
    shown = f"{100 * report['variants'][0]['quality']['spearman']:.1f}"
    assert report["summary"][0]["dense"].startswith(f"{shown} (") and f"against {shown} dense" in report["headline"]
    assert "accuracy" not in written.lower() and "labels agree" not in written and "concordance × 100" in written
    assert page.count("Spearman × 100") >= 4 and "Spearman, \\u00d7 100" in page


@pytest.mark.slow
def test_the_server_tells_the_number(run, tmp_path, monkeypatch):
    """`predict` on a live Triton is what the checkpoint says, for pairs; the command line prints it, alone or as JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    repository = run.artifacts["deploy"].folder / "repository"
    assert (repository / "alike" / "labels.txt").read_text() == "score\n"
    folder, pairs = repository / "alike" / "1", [("good great fine film", "the plot"), ("awful", "a very quite")]
    with EmbeddedServer(repository, log_path=tmp_path / "triton.log") as server:
        good, bad = predict(server.url, "alike", pairs, version_folder=folder)
        asked = ["predict", server.url, "alike", *(first for first, _ in pairs), "--tokenizer", str(folder)]
        for _, second in pairs:
            asked += ["--pair", second]
        shown, as_json = (CliRunner().invoke(main, [*asked, *more]).output for more in ([], ["--json"]))
    assert good.value > 3.5 > 1.5 > bad.value and (good.name, str(good)) == ("score", f"{good.value:.3f}")
    assert shown.splitlines() == [f"{one}  {text}" for one, (text, _) in zip((good, bad), pairs, strict=True)]
    assert json.loads(as_json.splitlines()[1]) == {
        "text": "awful",
        "pair": "a very quite",
        "name": "score",
        "value": pytest.approx(bad.value),
    }


def test_a_class_and_a_number_share_a_base(tmp_path):
    """Two tasks of two kinds, each with its own loss and metric, and a file of its own."""
    path = write_pipeline(tmp_path, stages=[{"tune": {"method": "propetl", "shared": "lora", "rank": 4, "epochs": 8, **FAST}}])
    text = path.read_text()
    tasks = {}
    for name, write in (("mood", write_data), ("taste", write_scores)):
        (tmp_path / name).mkdir()
        task = write(tmp_path / name, rows=100)
        tasks[name] = {**task, **{key: f"{name}/{task[key]}" for key in ("train", "validation")}}
    before, rest = text.split("task:")[0], text[text.index("stages:") :]
    path.write_text(f"{before}tasks: {json.dumps(tasks)}\n{rest}")
    rows = run_pipeline(load_pipeline(path), tmp_path / "runs").artifacts["tune"].metadata["tasks"]
    assert [(row["task"], row["metric"], len(row["labels"])) for row in rows] == [
        ("mood", "accuracy", 2),
        ("taste", "spearman", 1),
    ]
    assert rows[0]["quality"]["accuracy"] > 0.75 and rows[1]["quality"]["spearman"] > 0.3
