"""A pipeline of many tasks: run by the command line, read back from its files, and every way in which it cannot be."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import compressor
from compressor.cost import human_bytes
from compressor.models.special_tokens import tokenizer_of
from compressor.storage.task_files import SHARED
from compressor.tasks.features import predict, tokenize, torch_forward
from compressor.tasks.reading import read_task
from compressor.tasks.task_kind import kind_for
from pipelines.file.config import load_pipeline
from pipelines.reporting.task_report import _notes
from pipelines.stages.training_verdicts import ADVICE, UNLEARNT
from tests.pipelines.toys import tree
from tests.tiny import write_data, write_model

MOOD = "{train: mood/train.tsv, validation: mood/dev.tsv, text: sentence, max_length: 32}"
TUNE = (
    "method: propetl, shared: lora, rank: 8, keep: 0.3, epochs: 6, batch_size: 8, learning_rate: 0.02, mask_learning_rate: 0.02"
)
PIPELINE = f"""\
name: many
model: ./model
threads: 1
tasks:
  topic: {MOOD.replace("mood", "topic")}
  mood: {MOOD}
stages:
  - tune: {{{TUNE}}}
"""
CLASSES = {"mood": 2, "topic": 3}
HEADS, PROTOTYPE, LAYERS = 2 * 33 + 3 * 33, 2 * 8 * (32 + 32), 2
"""Prototypes of query and value, of which every entry is masked in 2 layers and by 2 tasks."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A project of two tasks of two and three classes."""
    folder = tmp_path_factory.mktemp("many")
    for name, classes in CLASSES.items():
        (folder / name).mkdir()
        write_data(folder / name, rows=120, classes=classes)
    write_model(folder / "model")
    (folder / "p.yaml").write_text(PIPELINE)
    return folder


@pytest.fixture
def project(sound, tmp_path) -> Path:
    """The pipeline file of a copy."""
    return shutil.copytree(sound, tmp_path / "project") / "p.yaml"


def test_a_task_that_was_not_learnt_is_told(project, out, compress):
    keys = ["tune.epochs=0.2", "tune.learning_rate=1.0e-9", "tune.mask_learning_rate=1.0e-9"]
    _, shown, _ = compress("run", project, "--out", out, *(part for key in keys for part in ("--set", key)))
    assert re.search(f"topic: ({UNLEARNT}|.* of a constant prediction): {ADVICE}", " ".join(shown.split()))


def test_a_whole_run_and_its_files(project, out, compress):
    keys = ["tasks.topic.metric=macro_f1", f"tasks.topic.test={project.parent / 'topic' / 'dev.tsv'}"]
    code, shown, error = compress("run", project, "--out", out, "--set", keys[0], "--set", keys[1])
    assert code == 0, error
    folder, base = out / "many" / "tasks", project.parent / "model"
    assert sorted(path.name for path in folder.iterdir()) == [SHARED, "mood.safetensors", "topic.safetensors"]
    lock = yaml.safe_load((out / "many" / "pipeline.lock.yaml").read_text())
    assert list(lock["tasks"]) == ["mood", "topic"] and "task" not in lock
    metadata = json.loads((out / ".store" / lock["stages"][0]["artifact"] / "artifact.json").read_text())["metadata"]
    parts = {"prototype": PROTOTYPE, "layer_scores": LAYERS * PROTOTYPE, "task_scores": 2 * PROTOTYPE, "head": HEADS}
    assert metadata["trainable"] == {**parts, "body": metadata["closed_form"]}
    assert metadata["closed_form"] == (1 + LAYERS + 2) * PROTOTYPE
    shared = {"file": f"tasks/{SHARED}", "bytes": (folder / SHARED).stat().st_size}
    assert (metadata["shared_file"], metadata["shared"], metadata["combine"]) == (shared, "lora", "or")
    assert [row["task"] for row in metadata["tasks"]] == ["mood", "topic"]
    assert [row["probability"] for row in metadata["tasks"]] == [0.5, 0.5]
    tokenizer, model = tokenizer_of(base), base
    for row in metadata["tasks"]:
        name, task = row["task"], load_pipeline(project, keys).tasks[row["task"]]
        model = compressor.load(model, delta=folder / f"{name}.safetensors")  # the second on the live model of the first
        rows = read_task(task).validation
        logits = predict(torch_forward(model), tokenize(tokenizer, rows, task), tokenizer.pad_token_id)
        assert logits.shape[1] == len(row["labels"]) == CLASSES[name]
        again, metric = kind_for(task, row["labels"]).quality(logits, np.array(rows.labels)), task.metric or "accuracy"
        assert again == row["quality"] and row["metric"] == metric and f"{again[metric]:.4f}" in shown
        assert row.get("tests") == ({"test": again} if name == "topic" else None)
        assert again["accuracy"] > 0.75, "a guess is right in a half and in a third"
        assert row["bytes"] == (folder / f"{name}.safetensors").stat().st_size
    _, _, error = compress("delta", "convert", out / "many", out / "whole")
    told = f"E805 {out / 'many'}: this run trained many tasks together and has no single model. Convert one of its tasks: "
    assert error.splitlines()[-1].startswith(f"{told}compress delta convert {folder}/NAME.safetensors FILE")


def test_the_report_has_every_task_and_what_is_stored(project, out, compress):
    project.write_text(f"{PIPELINE}  - report:\n")
    test = f"tasks.topic.test={project.parent / 'topic' / 'dev.tsv'}"
    assert compress("run", project, "--out", out, "--set", test, "--set", "tune.epochs=1")[0] == 0
    run = out / "many"
    report, page = json.loads((run / "report.json").read_text()), (run / "report.md").read_text()
    files = {path.name: path.stat().st_size for path in (run / "tasks").iterdir()}
    stored = [row["bytes"] for row in report["stored"]]
    assert stored[1:4] == [files[SHARED], files["mood.safetensors"], files["topic.safetensors"]]
    tensors = load_file(project.parent / "model" / "model.safetensors").values()
    assert stored[0] == sum(tensor.nbytes for tensor in tensors), "without a head"
    assert stored[4] == 2 * stored[0] + 4 * HEADS, "each with a head of its own"
    assert report["headline"].startswith(f"2 tasks in {human_bytes(sum(stored[1:4]))} beside one base of ")
    assert [(row["training_rows"], row["validation_rows"]) for row in report["summary"]] == [(120, 240)] * 2
    assert [row["task"] for row in report["summary"]] == ["mood", "topic"]
    assert "| mood | classification | accuracy |" in page and "| topic | test | 240 | accuracy" in page
    assert f"{PROTOTYPE:,} the prototype, {LAYERS * PROTOTYPE:,} the masks of blocks" in page
    html = (run / "report.html").read_text()
    assert "2 tasks: mood, topic" in html and 'id="tasks-plot"' in html and 'id="losses-plot"' in html
    shown = compress("report", run)[1]
    assert "tasks/mood.safetensors" in shown and "report.html" in shown
    assert report["summary"][0]["constant"] == "50.0 %", "each class as often"
    assert "of a constant prediction" in page and '"name": "constant"' in html


@pytest.mark.slow
def test_the_order_in_the_file_means_nothing_and_old_files_do_not_stay(project, out, compress):
    short, topic = PIPELINE.replace("epochs: 6", "epochs: 0.2"), PIPELINE.splitlines(keepends=True)[4]
    for text, says in ((short, "done"), (short.replace(topic, "").replace("stages:", f"{topic}stages:"), "reused")):
        project.write_text(text)
        code, shown, _ = compress("run", project, "--out", out)
        assert code == 0 and says in shown
    project.write_text(short.replace(topic, ""))
    assert compress("run", project, "--out", out)[0] == 0
    assert sorted(path.name for path in (out / "many" / "tasks").iterdir()) == [SHARED, "mood.safetensors"]


@pytest.mark.parametrize("masks", [0, 5])
def test_the_report_tells_of_masks_where_some_are_trained(masks):
    """Not where they are drawn, or hide nothing."""
    parts = {"prototype": 7, "layer_scores": 2 * masks, "task_scores": masks}
    told = next(_notes({"trainable": {"body": 7 + 3 * masks, **parts}, "temperature": 10.0}))
    of_masks = ", 10 the masks of blocks, 5 the masks of tasks: of a mask one bit for each number is stored" if masks else ""
    assert told == f"{7 + 3 * masks} trained numbers are 7 the prototype{of_masks}."


def test_a_dry_run_counts_all_heads_and_masks(project, out, compress):
    code, shown, _ = compress("run", project, "--out", out, "--dry-run")
    assert code == 0 and f"{(1 + LAYERS + 2) * PROTOTYPE:,}" in shown and f"head {HEADS} apart" in shown
    assert not out.exists()


def test_overrides_reach_a_task(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline(project, ["tasks.mood.train=mine.tsv", "tasks.topic.max_length=16", "tune.combine=add"])
    assert pipeline.tasks["mood"].train == tmp_path / "mine.tsv" and pipeline.tasks["topic"].max_length == 16
    assert pipeline.tasks["mood"].validation == project.parent / "mood" / "dev.tsv"
    assert pipeline.stages[0].config.combine == "add"


ONE = PIPELINE.replace("tasks:\n", f"task: {MOOD}\n").replace("  topic:", "# ").replace("  mood:", "# ")


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        (("tasks:", f"task: {MOOD}\ntasks:"), "E116 {}:5: tasks: task and tasks exclude each other", "train several together"),
        ((ONE.splitlines()[3], ""), "E105 {}:1: key 'task' is missing", "or tasks with several"),
        (("  mood:", "  a/b:"), "E104 {}:6: tasks.a/b: a task cannot be called 'a/b'", "a letter or digit first"),
        (("  mood:", "  _shared:"), "E104 {}:6: tasks._shared: a task cannot be called '_shared'", ""),
        (("  mood:", f"  {65 * 'm'}:"), f"E104 {{}}:6: tasks.{60 * 'm'}: has 65 characters, where at most 64", "Shorten it"),
        (("train: mood", "trian: mood"), "E102 {}:6: tasks.mood.trian: unknown key", "Did you mean 'train'?"),
        (("mood/train", "mood/none"), "E201 ", "none.tsv: no such file"),
        (("32}\nstages", "65}\nstages"), "E113 {}:6: tasks.mood.max_length: 65 tokens", "at most 64"),
        (
            ("{train: mood", "{kind: tokens, train: mood"),
            "E118 {}:6: tasks.mood.kind: a task of kind tokens cannot share a base",
            "a separate pipeline",
        ),
        ((TUNE, "method: lora"), "E117 {}:8: stages[0].tune.method: method lora trains one task", "run it once for each task"),
        ((TUNE, "epochs: 1"), "E117 {}:8: stages[0].tune: method dsee trains", "compressor.load(base, delta=FILE) switches"),
        (("stages:", "stages:\n  - select:"), "E117 {}:8: stages[0].select: this stage works on one task", "`task` instead"),
        ((f"{TUNE}}}", f"{TUNE}}}\n  - merge:\n  - export:"), "E117 {}:9: stages[1].merge: this stage works on one", ""),
        ((f"{TUNE}}}", f"{TUNE}}}\n  - benchmark:"), "E117 {}:9: stages[1].benchmark: this stage works on one task", ""),
        ((TUNE, f"{TUNE}, temperature: 0"), "E104 {}:8: stages[0].tune.temperature: must be greater than 0, not 0", ""),
        ((TUNE, f"{TUNE}, combine: xor"), "E104 {}:8: stages[0].tune.combine: must be 'or' or 'and' or 'add'", "'or'?"),
        (
            (TUNE, "method: adapter, combine: and"),
            "E403 {}:8: stages[0].tune.combine: combine is not used by method adapter",
            "",
        ),
        (
            (TUNE, "method: propetl, keep: 1, combine: add"),
            "E403 {}:8: stages[0].tune.combine: combine is not used by method propetl with keep: 1",
            "",
        ),
        ((TUNE, f"{TUNE}, keep_best: true"), "E403 {}:8: stages[0].tune.keep_best: keep_best is not used with several", ""),
        ((TUNE, f"{TUNE}, combine: and"), "E403 {}:8: stages[0].tune.combine: combine is not used with one task", "tasks"),
    ],
)
def test_mistakes(change, says, fix, project, out, compress):
    text = ONE if says.startswith("E105") or "with one task" in says else PIPELINE
    assert change[0] in text
    project.write_text(text.replace(*change))
    before = tree(project.parent)
    code, shown, error = compress("run", project, "--out", out)
    assert (code, shown, error.count("\n")) == (2, "", 1)
    assert error.startswith(says.format(project)) and fix in error
    assert tree(project.parent) == before and not out.exists()


@pytest.mark.slow
def test_a_sweep_has_the_quality_of_every_task(project, out, compress):
    """Repeated on subsets of both: which exist only as keys of each task."""
    code, _, error = compress("sweep", project, "--subsets", 2, "--set", "tune.epochs=1", "--out", out)
    assert (code, error) == (0, "")
    content = json.loads((out / "many-sweep" / "sweep.json").read_text())
    mean, *tasks = content["summary"]
    mains = [row for row in tasks if row["metric"] in ("mood accuracy", "topic accuracy")]
    assert mean["metric"] == "mean of tasks" and len(mains) == 2
    assert mean["mean"] == pytest.approx(sum(row["mean"] for row in mains) / 2)
    assert [cost["cost"] for cost in content["costs"]] == ["trainable parameters", "bytes of the stored model"]
    assert list(content["trials"][1]["repeat"]) == ["tasks.mood.subset", "tasks.topic.subset"]


def test_no_task_at_all(project, compress):
    project.write_text(f"name: many\nmodel: ./model\ntasks: {{}}\nstages:\n  - tune: {{{TUNE}}}\n")
    assert compress("check", project)[2].startswith(f"E104 {project}:3: tasks: is empty")
