"""benchmarks/peers.py with environments and times that are given: what is kept, what a failure comes to, and the tables."""

import csv
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openvino", reason="the extra openvino is not installed")

from benchmarks import peer_environments, peer_tables, peers
from benchmarks.peer_environments import PEERS, SCRIPTS, File, Peer, account_of, lines_of
from compressor.tasks import TaskConfig
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_model, write_pipeline

SCRIPT = (
    '"""Doc."""\n\nfrom pathlib import Path\n\n# a remark\nassert Path("model").is_dir()\nPath("made.onnx").write_text("x")\n'
)
PEER = Peer("toy", "toy.py", ("toy==1",), (File("", "fp32", "made.onnx"),))


def test_every_script_is_in_the_table_with_pinned_packages():
    assert {peer.script for peer in PEERS} == {path.name for path in SCRIPTS.glob("*.py")}
    assert all("==" in package for peer in PEERS for package in peer.packages)
    titles = [(peer.name, file.title, file.precision) for peer in PEERS for file in peer.files]
    assert len(titles) == len(set(titles)) and all(lines_of(peer.source) > 3 for peer in PEERS)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A peer whose environment is this one; writes its script, runs it, and tells how often it was run."""
    monkeypatch.setattr(peer_environments, "SCRIPTS", tmp_path)
    monkeypatch.setattr(peer_environments, "environment_of", lambda peer, cache, again: (Path(sys.executable), ""))
    monkeypatch.setattr(peer_environments, "versions_of", lambda python: {"toy": "1"})
    (tmp_path / "dense" / "model").mkdir(parents=True)

    def run(script, again=False, minutes=1.0):
        (tmp_path / "toy.py").write_text(script)
        return account_of(PEER, tmp_path / "dense", tmp_path, 1, minutes, again)

    return run


def test_what_a_peer_made_is_kept_until_its_script_changes(toy):
    first = toy(SCRIPT)
    assert (first.failure, first.lines, first.versions) == ("", 3, {"toy": "1"}) and (first.folder / "made.onnx").is_file()
    assert toy(SCRIPT) == first
    again = toy(SCRIPT, again=True)
    assert again.folder == first.folder and again.seconds != first.seconds
    assert toy(SCRIPT + "print(1)\n").folder != first.folder


def test_a_failure_is_the_line_of_its_error_and_is_tried_again(toy):
    failed = toy("import os\nraise ValueError(f'no {os.getcwd()}/model\\nmore')\n")
    assert failed.failure == "ValueError: no ./model" and failed.seconds > 0
    assert not (failed.folder / peer_environments.STAMP).is_file()
    assert toy("import time\ntime.sleep(9)\n", minutes=0.001).failure == "not finished after 0 minutes"
    missing = next(peers.candidates_of(PEER, failed))
    assert missing.failure == failed.failure and missing.to_json()["bytes"] == 0


def test_an_environment_that_pip_cannot_make_is_a_failure(tmp_path, monkeypatch):
    def run(command, **options):
        refused = "install" in command and PEER.packages[0] in command
        return peer_environments.subprocess.CompletedProcess(command, int(refused), "", "note\nERROR: no toy\nERROR: more\n")

    monkeypatch.setattr(peer_environments.subprocess, "run", run)
    monkeypatch.setattr(Path, "write_text", lambda self, text: len(text))
    assert peer_environments.environment_of(PEER, tmp_path, again=False)[1] == "ERROR: no toy"


def row(name, precision, p50, factor, **more):
    times = {name: {"p50": p50, "half_iqr": 0.5, "over_ours": factor} for name in peer_tables.WORKLOADS}
    quality = {"value": 86.25, "interval": [83.9, 88.6], "change": -0.5, "change_interval": [-1.2, 0.2]}
    facts = {"runtime": "onnxruntime", "pruned": False, "ours": False, "minutes": 0.52, "lines": 5, "bytes": 9e7, "failure": ""}
    return facts | {"name": name, "precision": precision, "times": times, "quality": quality} | more


def test_rows_are_sorted_and_a_control_that_is_off_voids_its_column():
    failed = row("b", "fp32", 1.0, 1.0, failure="ValueError: x")
    del failed["times"]
    rows = [row("c", "int8", 5.0, 1.2), failed, row("a", "fp32", 20.0, 0.9), row("ours, dense", "fp32", 18.0, 1.0, ours=True)]
    facts = {"cpu": "CPU", "threads": 2, "runtimes": ["r 1"], "rounds": 4, "run": "run", "metric": "accuracy", "dense": 86.25}
    peer = {"script": "benchmarks/peers/toy.py", "packages": ["toy==1"], "files": ["x.onnx"], "minutes": None, "lines": 3}
    result = {
        "settings": facts | {"rows": 800, "real_rows": 160},
        "files": dict(enumerate(rows)),
        "controls": {"onnxruntime": {"1 x 128": 1.01, "8 x 128": 0.99, "real": 1.04}},
        "peers": {"toy": peer | {"failure": "ERROR: no toy", "note": "slow"}},
    }
    told = peer_tables.markdown(result)
    names = [line.split(" | ")[2] for line in told.splitlines() if line.startswith("| ONNX Runtime | ")]
    assert names == ["**ours, dense**", "a", "b", "c", "A/A control"]
    assert "| 86.25 (83.9 to 88.6) | -0.50 (-1.2 to +0.2) | 20.00 ± 0.50 (0.90×) |" in told
    assert "| 1.010 | 0.990 | 1.040 (void) |" in told and "| b |  |  |  |  |  | 90.0 | 0.5 | 5 | ValueError: x |" in told
    assert "| [toy](../../benchmarks/peers/toy.py) | `toy==1` | `x.onnx` |  | 3 | ERROR: no toy | slow |" in told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--only", "toy"), "no peer toy; peers: optimum-onnx, "),
        (("--rounds", "1"), "--rounds: 1 is too few for quartiles"),
    ],
)
def test_wrong_arguments(given, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        peers.main([str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path), *given])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ({"text": ["first", "second"]}, "classification of first and second"),
        ({"kind": "tokens"}, "tokens of tokens"),
    ],
)
def test_a_run_of_other_rows_than_single_texts_is_refused(task, what, tmp_path, monkeypatch, capsys):
    config = TaskConfig(train="train.tsv", validation="dev.tsv", **task)
    monkeypatch.setattr(peers.Run, "open", lambda folder: SimpleNamespace(inputs=SimpleNamespace(task=config)))
    with pytest.raises(SystemExit, match="2"):
        peers.main([str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path)])
    assert f"are for classification of single texts, and this is {what}" in capsys.readouterr().err


def test_peers_get_the_rows_that_the_run_trained_on(tmp_path):
    rows = [
        {"body": f'a "{label}"\tfilm\u2028no. {number}', "class": label} for number in range(8) for label in ("bad", "good")
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"train": tmp_path / "train.jsonl", "validation": tmp_path / "train.jsonl"}
    peers.write_training_rows(TaskConfig(**files, text="body", label="class", subset={"share": 0.5}), tmp_path / "train.tsv")
    # as the peers' scripts read them
    read = list(csv.DictReader((tmp_path / "train.tsv").read_text().splitlines(), delimiter="\t"))
    known = [{"text": " ".join(row["body"].split()), "label": str(int(row["class"] == "good"))} for row in rows]
    assert len(read) == 8 and [row for row in known if row in read] == read


@pytest.mark.slow
def test_the_files_of_a_run_without_peers(tmp_path, monkeypatch):
    stages = [
        # outputs that hardly differ between rows are lost in the rounding of int8
        {"tune": {"method": "full", "epochs": 3, "learning_rate": 5e-3, "batch_size": 8}},
        {"prune": {"structure": "heads", "criterion": "weight", "remove": 1}},
        {"merge": None},
        {"export": {"precision": ["fp32", "int8"], "runtime": ["onnxruntime", "openvino"]}},
    ]
    path = write_pipeline(tmp_path / "project", stages=stages)
    write_model(tmp_path / "project" / "model", max_position_embeddings=peers.LENGTH)
    run_pipeline(load_pipeline(path), tmp_path / "runs")
    monkeypatch.setattr(peers, "PEERS", ())
    arguments = ["--rounds", "4", "--rows", "16", "--threads", "1"]
    arguments += ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert peers.main([str(tmp_path / "runs" / "tiny"), *arguments]) in (0, 3)
    told = (tmp_path / "out" / "peers.md").read_text()
    lines = [line for line in told.splitlines() if line.startswith("| O") and "in bf16" not in line]
    assert len(lines) == 2 * 2 * 2 + 2 and not re.search(r"\| \w*Error", told)
