"""Each kind of task with files of its own form, all the way: data, tune, prune, recovery, int8, Triton, predictions, report."""

import json
from dataclasses import asdict

import pytest

from compressor.storage.delta_file import read
from pipelines.cli.work.delta_work import apply, convert
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from serving.client import Client
from serving.predict import predict, predictor
from serving.server import EmbeddedServer
from tests.tiny import LEFT_OUT, write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"tune": {"method": "lora", "rank": 4, "modules": "all", "epochs": 16, **FAST}},
    {"prune": [
        {"structure": "heads", "criterion": "taylor", "remove": 1},
        {"structure": "neurons", "criterion": "delta", "remove": 0.25},
    ]},
    {"recover": {"method": "lora", "rank": 4, "modules": "all", "epochs": 4, "control": False, **FAST}},
    {"merge": None},
    {"export": None},
    {"deploy": {"name": "served", "max_batch_size": 1}},  # fewer than a row has choices
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}},
    {"report": None},
]  # fmt: skip
KINDS = {
    "multilabel": (
        {"micro_f1": 0.7, "macro_f1": 0.7, "exact_match": 0.3},
        [("a good scene and a dull story", {"labels": ("blame", "praise", "tale")}), ("the film was", {"labels": ()})],
    ),
    "spans": (
        {"f1": 0.7, "exact_match": 0.5},
        [
            (("was the film", "a plot good fine and story"), {"answer": "good fine", "start": 7, "end": 16}),
            (("was the film", "the story awful plot"), {"answer": "", "start": 0, "end": 0}),
        ],
    ),
    "choices": (
        {"accuracy": 0.8},
        [
            (("the film", "bad and dull", "good and fine", "awful plot"), {"choice": "good and fine", "number": 1}),
            (("a story", "lovely fine scene", "poor scene"), {"choice": "lovely fine scene", "number": 0}),
        ],
    ),
    "marked": (
        {"accuracy": 0.75, "matthews": 0.5},
        [("the film [ good ] plot { story }", {"label": "class1"}), ("a [ dull ] film { story }", {"label": "class0"})],
    ),
}
"""Kind -> the least value of each metric after merging (far below the usual one, which differs between machines), texts, and
entries of their predictions."""
PROBLEM_TYPES = {"multilabel": "multi_label_classification", "choices": "regression"}


@pytest.fixture(scope="module", params=KINDS)
def project(request, tmp_path_factory):
    return request.param, write_pipeline(tmp_path_factory.mktemp(request.param), kind=request.param, stages=STAGES)


@pytest.fixture(scope="module")
def run(project):
    """The result of the whole run."""
    return run_pipeline(load_pipeline(project[1]), project[1].parent / "runs")


def test_it_learns_and_keeps_what_it_learned(project, tmp_path):
    kind, path = project
    artifacts = run_pipeline(load_pipeline(path), path.parent / "runs", until="merge").artifacts
    quality, least = artifacts["merge"].metadata["quality"], KINDS[kind][0]
    assert set(quality) == {*least, "interval", "rows"}
    assert all(quality[key] >= value for key, value in least.items()), quality
    assert all(hop["passed"] for made in artifacts.values() for hop in made.metadata.get("parity", []))
    base = str(path.parent / "model")
    convert(artifacts["tune"].folder, tmp_path / "delta", base, "delta", None, None, True)
    apply(tmp_path / "delta", base, tmp_path / "merged")
    for folder in (artifacts["merge"].folder, tmp_path / "merged"):  # else transformers' pipeline would make them one choice
        assert json.loads((folder / "config.json").read_text()).get("problem_type") == PROBLEM_TYPES.get(kind)


@pytest.mark.slow
def test_a_delta_file_names_its_kind(project, run, tmp_path):
    base = str(project[1].parent / "model")
    convert(run.artifacts["tune"].folder, tmp_path / "one", base, "delta", None, None, True)
    convert(tmp_path / "one", tmp_path / "two", base, "delta", None, None, True)
    assert read(tmp_path / "two").kind == project[0]


@pytest.mark.slow
def test_every_hop_is_proven_reported_and_verified_again(project, run):
    hops = [hop for made in run.artifacts.values() for hop in made.metadata.get("parity", [])]
    # a tiny dense model's int8 file may be beyond its bound where weights have 7 bits; it is only compared with
    assert len(hops) == 9 and all(hop["passed"] for hop in hops if hop["gated"])
    report = json.loads((run.folder / "report.json").read_text())
    assert report["metric"]["key"] == next(iter(KINDS[project[0]][0]))
    assert [check.fault for check in verify(run.folder, serve=False) if not check.passed] == []


@pytest.mark.slow
def test_both_interfaces_of_the_server_predict(project, run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    repository, examples = run.artifacts["deploy"].folder / "repository", KINDS[project[0]][1]
    texts = [text for text, _ in examples]
    with EmbeddedServer(repository, log_path=tmp_path / "triton.log") as server, Client(server.url) as client:
        found = predictor(client, "served")(texts), predict(server.url, "served", texts, repository / "served" / "1")
    for predictions in found:
        for prediction, (text, expected) in zip(predictions, examples, strict=True):
            assert {key: asdict(prediction)[key] for key in expected} == expected, text
