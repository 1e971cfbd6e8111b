"""A benchmark makes the folders that it writes to, and refuses a record of another machine."""

import importlib
import json
from types import SimpleNamespace

import pytest

from benchmarks import e2e, first_run, many_tasks, table_error
from benchmarks.record import Record, write_record
from compressor.processor import processor
from pipelines.engine.attempt import CHECKS_FAILED, DONE, FAILED, write_attempt
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline

FIGURES = {"kind": "lora", "memory": {"single": 1, "many": 2}, "deltas": 1, "changes": 1, "times": {}, "difference": 0.0}
ROW = ["--only", "quickstart-s0-t2"]
ENDS = [(2, DONE), (-9, FAILED), (3, CHECKS_FAILED)]
"""(exit code, status in run.json) of one call after the other: the last one is finished."""


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


def test_a_first_run_that_was_stopped_is_run_again_and_has_no_figures_of_an_earlier_one(tmp_path, monkeypatch):
    """A full disk (2) and a signal (-9) tell nothing of the recipe. Of a check that fails (3) the report may be there."""
    folder, started = tmp_path / ROW[1], []
    folder.mkdir()
    variants = [{"name": name, "quality": {"accuracy": 0.8}} for name in ("dense", "int8")]
    report = {"metric": {"key": "accuracy"}, "baseline": "dense", "deployed": "int8", "variants": variants}
    (folder / "report.json").write_text(json.dumps(report | {"parity": [], "notes": []}))

    def run(command, **_):
        ended, status = ENDS[len(started)]
        started.append(command)
        write_attempt(folder, {"status": status, "started": 0.0, "seconds": 1.0})
        return SimpleNamespace(returncode=ended)

    monkeypatch.setattr(first_run.subprocess, "run", run)
    for number, (ended, status) in enumerate(ENDS, start=1):
        code = first_run.main(["--out", str(tmp_path), *ROW])
        account = json.loads((tmp_path / "first_run.json").read_text())["rows"][ROW[1]]
        assert (code, account["ended"], len(started)) == (3, ended, number)
        assert ("dense" in account) == (status == CHECKS_FAILED)
    assert first_run.main(["--out", str(tmp_path), *ROW]) == 3 and len(started) == len(ENDS)


def test_two_commands_on_one_record_keep_the_rows_of_both(tmp_path):
    """As of two terminals: `quality.py --arms labels` beside `--arms texts`."""
    path = tmp_path / "record.json"
    one, other = Record(path, {"cpu": "x"}), Record(path, {"cpu": "x"})
    for record, name in ((one, "labels-0"), (other, "texts-0"), (one, "labels-1")):
        assert record.figures(name, lambda name=name: {"of": name}) == {"of": name}
    assert list(json.loads(path.read_text())["runs"]) == ["labels-0", "texts-0", "labels-1"]
    assert one.figures("texts-0", lambda: None) == {"of": "texts-0"}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_two_commands_of_other_facts_mix_no_rows(tmp_path):
    """Both began before the record was there, so neither was refused at its start."""
    path = tmp_path / "record.json"
    one, other = Record(path, {"threads": 2}), Record(path, {"threads": 4})
    one.figures("labels-0", lambda: {"of": 2})
    with pytest.raises(ValueError, match="of another 'threads'"):
        other.figures("texts-0", lambda: {"of": 4})
    assert json.loads(path.read_text()) == {"facts": {"threads": 2}, "runs": {"labels-0": {"of": 2}}}


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
