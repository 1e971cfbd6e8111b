"""A benchmark makes the folders that it writes to, and refuses a record of another machine."""

import importlib
import json

import pytest

from benchmarks import e2e, first_run, many_tasks, table_error
from benchmarks.record import write_record
from compressor.processor import processor
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline

FIGURES = {"kind": "lora", "memory": {"single": 1, "many": 2}, "deltas": 1, "changes": 1, "times": {}, "difference": 0.0}
ROW = ["--only", "quickstart-s0-t2"]


def test_table_error(tmp_path, monkeypatch):
    monkeypatch.setattr(table_error, "compared", lambda name, options: [table_error.Error(["toy"], 0.0)])
    monkeypatch.setattr("sys.argv", ["table_error.py", "--models", "toy", "--out", str(tmp_path / "new" / "er")])
    assert table_error.main() == 0
    assert "| toy |" in (tmp_path / "new" / "er" / "latency_table.md").read_text()


def test_many_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr(many_tasks, "measure", lambda *given: FIGURES | {"compared": 8})
    files = {"--out": tmp_path / "new" / "many.md", "--json": tmp_path / "other" / "many.json"}
    options = [str(word) for pair in files.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["many_tasks.py", "--model", "toy", "--kinds", "lora", *options])
    many_tasks.main()
    assert all(path.is_file() for path in files.values())


class Toy:
    folder = None


@pytest.mark.parametrize(
    ("script", "replaced", "options"),
    [
        ("latency", {"variants": ({}, {}), "measure": [], "table": {"valid": True}}, ["--model", "toy"]),
        (
            "train_step",
            {"made": (), "stepper": None, "interleaved": {"peft LoRA": [1, 1], "peft LoRA again": [1, 1]}, "peak_memory": 1.0},
            ["--model", "toy"],
        ),
        ("rpca", {"queries_and_values": []}, ["--model", "toy", "--tables", ""]),
    ],
)
def test_one_file_of_json(script, replaced, options, tmp_path, monkeypatch):
    """Nothing is measured here."""
    module = importlib.import_module(f"benchmarks.{script}")
    for name, result in {"resolve": Toy, **replaced}.items():
        monkeypatch.setattr(module, name, lambda *given, result=result: result)
    file = tmp_path / "new" / "er" / "figures.json"
    monkeypatch.setattr("sys.argv", [f"{script}.py", *options, "--json", str(file)])
    module.main()
    assert "settings" in json.loads(file.read_text())


def test_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(first_run, "carried_out", lambda row, out: {"ended": 0, "seconds": 60.0, "last": ["done"]})
    record = tmp_path / "new" / "er"
    assert first_run.main(["--out", str(tmp_path / "out"), "--record", str(record), *ROW]) == 0
    assert "1 of 1 rows are green" in (record / "first_run.md").read_text()
    assert list(json.loads((record / "first_run.json").read_text())["rows"]) == ROW[1:]


@pytest.mark.slow
def test_a_first_run_without_an_int8_file_is_not_confirmed(tmp_path, capsys):
    """... and is no reason to end before the others are."""
    stages = [{"tune": {"method": "lora", "rank": 2, "epochs": 1}}, {"merge": None}, {"export": {"precision": ["fp32"]}}]
    out, path = tmp_path / "out", write_pipeline(tmp_path / "project", stages=stages, rows=16)
    run_pipeline(load_pipeline(path, [f"name={ROW[1]}"]), out)
    account = {"ended": 0, "seconds": 60.0, "dense": 0.5, "compressed": 0.5}
    write_record(out / "first_run.json", {"facts": {"processor": processor()["cpu"]}, "rows": {ROW[1]: account}})
    more = path.parent / "dev.tsv"
    assert first_run.main(["--out", str(out), "--confirm", str(more), *ROW]) == 0
    assert f"{ROW[1]}: no int8 file" in capsys.readouterr().out


def test_the_page_of_e2e(tmp_path, monkeypatch):
    """Its folder is made before hours of training. Nothing is trained here."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("name : A||A is here\n")
    page = tmp_path / "new" / "er" / "e2e.md"

    def artifact(table, arm, seed):
        assert page.parent.is_dir()
        return arm

    monkeypatch.setattr(e2e.Table, "artifact", artifact)
    monkeypatch.setattr(e2e, "page", lambda table, made, arms: "the table")
    options = ["--model", "toy", "--data", str(tmp_path), "--work", str(tmp_path / "work"), "--out", str(page)]
    monkeypatch.setattr("sys.argv", ["e2e.py", *options])
    e2e.main()
    assert page.read_text() == "the table"


def test_first_runs_of_another_machine_are_not_mixed_in(tmp_path, capsys):
    write_record(tmp_path / "first_run.json", {"facts": {"processor": "another"}, "rows": {}})
    with pytest.raises(SystemExit, match="2"):
        first_run.main(["--out", str(tmp_path), *ROW])
    assert "is of another 'processor'; give another --out" in capsys.readouterr().err
