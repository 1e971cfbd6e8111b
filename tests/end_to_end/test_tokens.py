"""A tag for each word, all the way: IOB1 columns and lists in, recovery from logits, int8, Triton, verified and reported."""

import json

import pytest
import torch
from click.testing import CliRunner

from compressor import load
from compressor.models.special_tokens import tokenizer_of
from compressor.tasks.task_kind import kind_of
from export.parity.bounds import BOUNDS
from export.parity.compare import in_words
from pipelines.cli.commands import main
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from serving.predict import predict
from serving.server import EmbeddedServer
from tests.compressor.test_tokens import ENCODERS
from tests.tiny import write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"select": {"score": "fish", "count": 8, "samples": 32, "batch_size": 8}},
    {"tune": {"method": "dsee", "rank": 4, "epochs": 16, **FAST}},
    {"prune": [
        {"structure": "heads", "criterion": "taylor", "remove": 1},
        {"structure": "neurons", "criterion": "taylor", "remove": 0.25},
        {"structure": "weights", "criterion": "fisher", "remove": 0.1, "modules": ["query", "ffn_in"]},
    ]},
    {"recover": {"method": "lora", "rank": 4, "modules": "all", "epochs": 4, "control": False, **FAST}},
    {"merge": None},
    {"export": None},
    {"deploy": {"name": "tags"}},
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6, "machine_limits": False}},
    {"report": None},
]  # fmt: skip
TEXTS = ["the  film was good fine and a bad plot", "awful"]
WORDS = [("the", "film", "was", "good", "fine", "and", "a", "bad", "plot"), ("awful",)]
TAGS = [("O", "O", "O", "B-GOOD", "I-GOOD", "O", "O", "B-BAD", "O"), ("B-BAD",)]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("project"), kind="tokens", stages=STAGES)


@pytest.fixture(scope="module")
def run(project):
    """The result of the whole run."""
    return run_pipeline(load_pipeline(project), project.parent / "runs")


@pytest.mark.slow
def test_it_learns_tags_and_keeps_them(project):
    artifacts = run_pipeline(load_pipeline(project), project.parent / "runs", until="merge").artifacts
    metadata = {name: made.metadata for name, made in artifacts.items()}
    assert metadata["merge"]["labels"] == ["O", "B-BAD", "I-BAD", "B-GOOD", "I-GOOD"]
    assert all(hop["passed"] and hop["rows"] == 256 for name in ("prune", "merge") for hop in metadata[name]["parity"])
    for name in ("tune", "recover", "merge"):
        quality = metadata[name]["quality"]
        assert set(quality) == {"f1", "interval", "accuracy", "rows"} and quality["rows"] == 320
        assert quality["f1"] > 0.9 and quality["accuracy"] > 0.95
    model, tokenizer = load(artifacts["merge"].folder), tokenizer_of(project.parent / "model")
    with torch.no_grad():
        ids = model(**tokenizer(" ".join(WORDS[0]), return_tensors="pt")).logits[0, 1:-1].argmax(-1).tolist()
    assert tuple(model.config.id2label[tag] for tag in ids) == TAGS[0]


@pytest.mark.slow
def test_every_hop_is_proven_and_verified_again(run):
    exported, merged = run.artifacts["export"].metadata["files"]["compressed"], run.artifacts["merge"].metadata["quality"]
    for file in exported["onnxruntime"].values():
        assert abs(file["quality"]["f1"] - merged["f1"]) <= 0.01
    hops = [hop for made in run.artifacts.values() for hop in made.metadata.get("parity", [])]
    assert len(hops) == 10 and all(hop["passed"] for hop in hops)
    (bound, *_) = {hop["bound"] for hop in hops if hop["kind"] == "int8"}
    assert bound == in_words(BOUNDS["int8"], kind_of("tokens")) and bound.startswith("tags agree on 98%")
    assert [check.fault for check in verify(run.folder, serve=False) if not check.passed] == []


@pytest.mark.slow
def test_the_report_speaks_of_entities(run):
    report = json.loads((run.folder / "report.json").read_text())
    assert report["metric"]["key"] == "f1" and report["summary"][0]["metric"].startswith("entity F1")
    shown = f"{100 * report['variants'][0]['quality']['f1']:.1f} %"
    assert report["summary"][0]["dense"].startswith(f"{shown} (") and f"against {shown} dense" in report["headline"]
    assert "tags agree" in (run.folder / "report.md").read_text()
    assert (run.folder / "report.html").read_text().count("entity F1") >= 4


@pytest.mark.slow
def test_the_server_tags_the_words(run, tmp_path, monkeypatch):
    """`predict` on a live Triton splits at spaces, whatever their number; the command line prints word/tag, or JSON."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    repository = run.artifacts["deploy"].folder / "repository"
    folder = repository / "tags" / "1"
    with EmbeddedServer(repository, log_path=tmp_path / "triton.log") as server:
        found = predict(server.url, "tags", TEXTS, version_folder=folder)
        asked = ["predict", server.url, "tags", *TEXTS, "--tokenizer", str(folder)]
        shown, as_json = (CliRunner().invoke(main, [*asked, *more]).output for more in ([], ["--json"]))
        long = CliRunner().invoke(main, [*asked[:3], "film " * 31, *asked[-2:]])
    assert [one.words for one in found] == WORDS and [one.tags for one in found] == TAGS
    assert shown.splitlines()[1] == "awful/B-BAD  awful"
    assert json.loads(as_json.splitlines()[1]) == {"text": "awful", "words": ["awful"], "tags": ["B-BAD"]}
    assert long.exit_code == 2 and "is longer than the model reads. Split the text" in long.output


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in ENCODERS if name != "bert"])
def test_every_encoder_goes_the_whole_way(architecture, tmp_path):
    tune = {"tune": {**STAGES[1]["tune"], "method": "lora", "epochs": 6}}
    stages = [tune, *STAGES[2:5], {"export": {"precision": "fp32"}}]
    path = write_pipeline(tmp_path, kind="tokens", model_type=architecture, stages=stages)
    artifacts = run_pipeline(load_pipeline(path), tmp_path / "runs").artifacts
    assert all(hop["passed"] for made in artifacts.values() for hop in made.metadata.get("parity", []))
    assert artifacts["merge"].metadata["quality"]["f1"] > 0.6


@pytest.mark.slow
def test_a_live_teacher_and_openvino(tmp_path):
    recover = {"recover": {**STAGES[3]["recover"], "distill": "both"}}
    stages = [{"tune": {"method": "lora", "rank": 4, "epochs": 16, **FAST}}, STAGES[2], recover, {"merge": None}]
    export = {"export": {"runtime": ["openvino"], "precision": ["int8"]}}
    artifacts = run_pipeline(
        load_pipeline(write_pipeline(tmp_path, kind="tokens", stages=[*stages, export])), tmp_path
    ).artifacts
    assert all(hop["passed"] for hop in artifacts["export"].metadata["parity"])
    assert artifacts["merge"].metadata["quality"]["f1"] > 0.5


@pytest.mark.parametrize(
    ("model_type", "options", "code"), [("gpt2", [], "E309"), ("bert", ["task.max_length=4"], "E213"), ("t5", [], "E309")]
)
def test_what_cannot_be_is_told(model_type, options, code, tmp_path):
    stages = [{"tune": {"method": "lora", "rank": 2}}]
    path = write_pipeline(tmp_path, kind="tokens", model_type=model_type, stages=stages, rows=8)
    with pytest.raises(Exception, match=rf"{code} ") as caught:
        run_pipeline(load_pipeline(path, options), tmp_path / "runs")
    assert caught.value.exit_code == 2
