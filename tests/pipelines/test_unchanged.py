"""What is hashed is what is used: an input that changes in the middle of a run ends it, and nothing is published."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from compressor import digests
from compressor.errors import UserError
from compressor.tasks import reading
from pipelines.engine.preflight import check_inputs
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import NamedInputs
from pipelines.file.config import load_pipeline
from tests.pipelines import toys
from tests.pipelines.toys import tree
from tests.tiny import write_pipeline


def go(path, out, **options):
    return run_pipeline(load_pipeline(path), out, **options)


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("new_data", "train.tsv: changed while the run was reading it"),
        ("new_weights", "model: the model's folder changed"),
        ("new_generation", "generation_config.json: changed while the run was reading it"),
        ("exchanged_data", "train.tsv: was written to"),
        ("exchanged_weights", "model.safetensors: was written to"),
        ("exchanged_config", "config.json: was written to"),
        ("deleted_data", "train.tsv: disappeared"),
    ],
)
@pytest.mark.parametrize("stage", ["select", "tune"])
def test_an_input_that_changes_while_a_stage_runs(project, out, compress, trouble, says, stage):
    expected = tree(go(project, out.with_name("whole")).folder.parent / ".store")
    before = tree(project.parent)
    out.mkdir()
    (out / f"trouble-{stage}").write_text(trouble)
    code, _, error = compress("run", project, "--out", out)
    assert (code, error[:4], len(error.splitlines())) == (2, "E807", 1) and says in error
    assert [path.name.split("-")[0] for path in (out / ".store").iterdir()] == ["select"] * (stage == "tune")
    assert json.loads((out / "toy" / "run.json").read_text())["error"]["code"] == "E807"
    (out / f"trouble-{stage}").unlink()
    for name, content in before.items():
        (project.parent / name).write_bytes(content)
    go(project, out)
    assert tree(out / ".store") == expected


def test_a_process_reads_an_unchanged_input_once(project, monkeypatch):
    """For the trials of a sweep; a changed file is hashed again, and so is one that may still change within a clock's tick."""
    read, real = [], hashlib.file_digest

    def recorded(stream, name):
        read.append(Path(stream.name).name)
        return real(stream, name)

    columns, checked = reading._checked_columns, []
    monkeypatch.setattr(reading, "_checked_columns", lambda path, task: checked.append(path.name) or columns(path, task))
    monkeypatch.setattr(hashlib, "file_digest", recorded)
    pipeline = load_pipeline(project)
    first = check_inputs(pipeline)
    assert check_inputs(pipeline) == first and read.count("train.tsv") == read.count("model.safetensors") == 2, "just written"
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    read.clear()
    checked.clear()
    assert check_inputs(pipeline) == check_inputs(pipeline) == first
    assert read.count("train.tsv") == read.count("model.safetensors") == 1
    assert checked == ["train.tsv", "dev.tsv"]
    toys.flip_weight(project.parent / "model")
    changed = check_inputs(pipeline)
    assert changed.base.sha256 != first.base.sha256 and read.count("model.safetensors") == 2 and read.count("train.tsv") == 1


def test_a_teacher_that_changes_while_a_stage_runs(project, out, tmp_path, monkeypatch):
    toys.write_model(teacher := tmp_path / "teacher")

    def change(config, inputs, workspace):
        toys.flip_weight(teacher)
        return toys.run(config, inputs, workspace)

    toys.replace(monkeypatch, "tune", beside=NamedInputs(models=("text",)), run=change)
    with pytest.raises(UserError, match=r"E807 .*teacher: the model's folder changed"):
        run_pipeline(load_pipeline(project, [f"tune.text={teacher}"]), out)


def test_an_input_that_changes_between_two_stages(project, out, monkeypatch):
    """It is noticed before the next one begins: a training may take hours."""
    begun = []

    def change(config, inputs, workspace):
        begun.append(inputs)
        return toys.run(config, inputs, workspace)

    toys.replace(monkeypatch, "prune", run=change)
    from pipelines.engine.store import Store

    publish = Store.publish

    def published(self, work, name, *others):
        publish(self, work, name, *others)
        if name == "tune":
            toys.new_data(out / "trouble")

    monkeypatch.setattr(Store, "publish", published)
    with pytest.raises(UserError, match=r"E807 .*train.tsv"):
        go(project, out)
    assert not begun


def test_a_file_that_was_touched_between_two_stages_is_the_same_file(project, out, monkeypatch):
    from pipelines.engine.store import Store

    publish = Store.publish

    def published(self, work, *others):
        publish(self, work, *others)
        (project.parent / "train.tsv").touch()

    monkeypatch.setattr(Store, "publish", published)
    assert list(go(project, out).artifacts) == ["select", "tune", "prune", "report"]


STAGES = [{"select": {"count": 4}}, {"tune": {"method": "dsee", "rank": 2, "epochs": 1, "batch_size": 8}}]


def change_when(path: Path, change) -> threading.Thread:
    """Call `change` as soon as `path` is there."""

    def watch() -> None:
        for _ in range(20_000):
            if path.exists():
                return change()
            wait.wait(0.001)

    wait = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("file", ["train.tsv", "model/model.safetensors"])
@pytest.mark.parametrize("stage", ["select", "tune"])
def test_real_stages(tmp_path, file, stage):
    """The data, or the weights, are written anew as soon as the stage has opened its log."""
    path = write_pipeline(tmp_path, stages=STAGES, rows=24)
    target, out = tmp_path / file, tmp_path / "runs"
    other = target.read_bytes()
    # the last byte of a row's label, or of a weight: no file is damaged by it
    place = other.index(b"class1") + 5 if file == "train.tsv" else len(other) - 4
    changed = other[:place] + (b"0" if file == "train.tsv" else b"\x01") + other[place + 1 :]
    thread = change_when(out / "tiny" / "logs" / f"{stage}.log", lambda: target.write_bytes(changed))
    with pytest.raises(UserError) as error:
        go(path, out)
    thread.join()
    assert error.value.code == "E807"
    assert [one.name.split("-")[0] for one in (out / ".store").glob("[!.]*")] == ["select"] * (stage == "tune")
