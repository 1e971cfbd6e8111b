"""GLUE's tasks and data sets of the hub in a pipeline file: what they become, and that the content decides reuse."""

import json
import shutil

import pytest
import yaml

from compressor.errors import UserErrors
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline

STAGES = [{"tune": {"method": "bitfit", "epochs": 0.1}}]


@pytest.fixture
def written(tmp_path):
    """Writes a pipeline file with this task beside a GLUE folder that holds SST-2."""
    folder = tmp_path / "glue" / "SST-2"
    folder.mkdir(parents=True)
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("sentence\tlabel\na film\t1\na plot\t0\n")

    def write(task) -> str:
        path = tmp_path / "pipeline.yaml"
        path.write_text(yaml.safe_dump({"name": "a", "model": "./model", "task": task, "stages": STAGES}))
        return path

    return write


def test_a_glue_task_becomes_files_and_columns_and_keys_beside_it_hold(written, tmp_path):
    plain = load_pipeline(written("glue/sst2"), ["task.max_length=64"]).task
    assert plain.train == tmp_path / "glue/SST-2/train.tsv" and plain.validation.name == "dev.tsv"
    assert (plain.kind, plain.text_columns, plain.label, plain.max_length) == ("classification", ("sentence",), "label", 64)
    other = load_pipeline(written({"glue": "sst2", "folder": "glue", "validation": "mine.tsv", "max_length": 64})).task
    assert other == plain.model_copy(update={"validation": tmp_path / "mine.tsv"})
    assert load_pipeline(written("glue/rte"), ["task=glue/sst2", "task.max_length=64"]).task == plain
    answers = load_pipeline(written({"glue": "sst2", "kind": "text2text", "prefix": "sst2 sentence: "})).task
    assert (answers.kind, answers.metric, answers.label) == ("text2text", None, "label"), "another kind has other metrics"
    with pytest.raises(UserErrors, match=r"E102 .*pipeline.yaml:[0-9]+: task.foldr: unknown key"):
        load_pipeline(written({"glue": "sst2", "foldr": "glue"}))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("task", ["glue/rte", "glue/mnli", {"glue": "rte", "folder": "glue"}])
def test_another_task_of_glue_leaves_nothing_of_the_one_before(written, tmp_path, task, local):
    """Neither its files, from the hub or a folder that may even lack them, nor its columns."""
    if local:
        shutil.copytree(tmp_path / "glue/SST-2", tmp_path / "glue/RTE")
    plain = load_pipeline(written("glue/sst2"), ["task.max_length=64"]).task
    assert load_pipeline(written(task), ["task.glue=sst2", "task.max_length=64"]).task == plain
    assert load_pipeline(written(task), ["task.max_length=64"], [("row", {"task.glue": "sst2"})]).task == plain
    data = yaml.safe_load(written(task).read_text())
    tasks = {"a": data.pop("task"), "b": "glue/sst2"}
    (tmp_path / "many.yaml").write_text(yaml.safe_dump(data | {"tasks": tasks, "stages": [{"tune": {"method": "full"}}]}))
    settings = ["tasks.b.max_length=64", "tasks.a.max_length=64", "tasks.a.glue=sst2"]
    assert load_pipeline(tmp_path / "many.yaml", settings).tasks == {"a": plain, "b": plain}


def test_keys_beside_a_task_of_glue_stay_with_another_one(written, tmp_path):
    """Those of the file, of --set before and after, and of a block that is set as a whole, whatever their values are."""
    beside = ["task.text=[sentence1, sentence2]", "task.glue=sst2", f"task.train={tmp_path}/mine.tsv"]
    task = load_pipeline(written({"glue": "rte", "validation": "other.tsv"}), beside).task
    assert (task.text_columns, task.train, task.validation) == (
        ("sentence1", "sentence2"),
        tmp_path / "mine.tsv",
        tmp_path / "other.tsv",
    )
    whole = ["task={glue: rte, text: [sentence1, sentence2]}", "task.glue=sst2"]
    assert load_pipeline(written("glue/rte"), whole).task.text_columns == ("sentence1", "sentence2")


def test_another_folder_of_glue(written, tmp_path):
    shutil.copytree(tmp_path / "glue", tmp_path / "other")
    for task in ("glue/sst2", {"glue": "sst2", "folder": "glue"}, {"glue": "sst2", "folder": "missing"}):
        assert load_pipeline(written(task), [f"task.folder={tmp_path}/other"]).task.train == tmp_path / "other/SST-2/train.tsv"
    settings = [f"task.folder={tmp_path}/other", "task.glue=sst2"]
    assert load_pipeline(written("glue/rte"), settings).task.train == tmp_path / "other/SST-2/train.tsv"
    with pytest.raises(UserErrors, match=r"E233 .*task: .*/glue: neither RTE/train.tsv nor train.tsv"):
        load_pipeline(written({"glue": "sst2", "folder": "glue"}), ["task.glue=rte"])
    with pytest.raises(UserErrors, match=r"E102 --set task.folder=x: unknown key"):
        load_pipeline(written({"train": "a.tsv", "validation": "b.tsv"}), ["task.folder=x"])


BROKEN = 'a film\n"\t1\t2\n'
"""A row that is broken over two lines."""
LEFT_OUT = "rows of train.tsv with another number of fields than its first line are left out: 2 (lines {})"


def test_check_tells_which_rows_are_left_out(tmp_path, compress):
    pipeline = write_pipeline(tmp_path, stages=STAGES, rows=12)
    with (tmp_path / "train.tsv").open("a") as file:
        file.write(BROKEN)
    code, shown, _ = compress("check", pipeline, "--set", "task.broken_rows=skip")
    assert code == 0 and shown.startswith("task.train       12 rows; ")
    assert f"\nwarning: task.train: {LEFT_OUT.format('14, 15')}\n" in shown


def test_a_run_tells_which_rows_are_left_out(project, out, compress):
    with (project.parent / "train.tsv").open("a") as file:
        file.write(BROKEN)
    code, shown, _ = compress("run", project, "--out", out, "--set", "task.broken_rows=skip")
    assert code == 0 and f"task.train: {LEFT_OUT.format('4, 5')}" in " ".join(shown.split())


def test_a_data_set_is_fetched_only_for_a_file_without_faults(written, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = {"train": "hub:./set/train", "validation": "hub:owner/name:main/test:5", "text": "sentence"}
    fetched = []
    monkeypatch.setattr("pipelines.file.data_sources.fetch", lambda split, say: fetched.append(split.reference))
    with pytest.raises(UserErrors, match="E102 "):
        load_pipeline(written(task), ["tune.epoch=1"])
    assert fetched == []
    read = load_pipeline(written(task), ["task.validation=hub:owner/name/test:5"]).task
    assert fetched == ["hub:./set/train", "hub:owner/name/test:5"]
    assert read.validation == tmp_path / "cache/compress/data/3/owner--name/default/test-first-5.jsonl"


def test_a_folder_of_a_data_set_on_the_command_line_is_relative_to_the_current_folder(written, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = []
    monkeypatch.setattr("pipelines.file.data_sources.fetch", lambda split, say: places.append(split.place))
    path = written({"train": "hub:./set/train", "validation": "hub:./set/dev", "text": "sentence"})
    load_pipeline(path, ["task.validation=hub:./other:config/dev:5"])
    load_pipeline(path, ["task.train=hub:owner/name/train", "task.validation=hub:../other/dev"])
    assert places == [str(tmp_path / place) for place in ("set", "here/other")] + ["owner/name", str(tmp_path / "other")]


def test_a_folder_of_a_data_set_is_checked_as_files_are_and_reused_by_content(tmp_path, monkeypatch, compress):
    """By the library itself; a mistake has the line of the fetched rows and the key of the pipeline."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pipeline = write_pipeline(tmp_path, stages=STAGES, rows=12)
    source = yaml.safe_load(pipeline.read_text())
    source["task"] |= {"train": "hub:./set/train", "validation": "hub:./set/test", "text": "text", "label": "label"}
    pipeline.write_text(yaml.safe_dump(source))
    (tmp_path / "set").mkdir()

    def put(**files) -> None:
        for split, labels in files.items():
            rows = [{"text": f"the film was good {number}", "label": label} for number, label in enumerate(labels)]
            (tmp_path / "set" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    put(train=[0, 1] * 6, test=[0, 1, 1])
    code, _, error = compress("run", pipeline, "--out", tmp_path / "runs")
    assert code == 0, error
    put(train=[0, 1] * 6, test=[0, 1, 1])
    assert "tune         reuse" in compress("run", pipeline, "--out", tmp_path / "runs", "--dry-run")[1]
    put(train=[1, 0] * 6)
    assert "tune         run" in compress("run", pipeline, "--out", tmp_path / "runs", "--dry-run")[1]
    put(test=[0, 1, 7])
    code, _, error = compress("run", pipeline, "--out", tmp_path / "runs")
    assert code == 2 and "/test.jsonl:3: label '7' never occurs in training" in error and "task.validation)" in error
