"""A model of many tasks on the real server: tokens with the number of each row's task, texts with its name."""

import copy
import errno
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from triton_parts import KNOBS, QuickServer

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.storage import delta_file
from export.many.stacked_folder import stack_folder
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import run, session
from pipelines.cli.work.serve_work import request_of
from pipelines.runs.served import Served
from serving.client import Client
from serving.deployment.target import LOCK, Target
from serving.layout.knobs import DEFAULT_KNOBS
from serving.layout.text_outputs import TEXT_SUFFIX
from serving.layout.version_file import VersionFacts, read_version
from serving.predict import predict
from serving.repository import read_config, write_config
from serving.stacked_repository import require_runtime, text_limits, write_many_tasks
from tests.compressor.conftest import tuned
from tests.tiny import write_model

TASKS = {"reviews": ["bad", "good"], "topics": ["film", "plot", "scene"], "stars": ["stars"]}


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    base, paths = resolve(str(write_model(folder / "base", num_hidden_layers=1))), []
    for seed, (name, labels) in enumerate(TASKS.items()):
        model = tuned(build(base.folder, labels, seed), ("dsee", "lora", "bitfit")[seed])
        with torch.no_grad():
            for head in compression_of(model).head_parameters:
                model.get_parameter(head).normal_(generator=torch.Generator().manual_seed(seed))
        paths.append(folder / f"{name}.safetensors")
        delta_file.write(model, paths[-1], base=base.reference, base_sha256=base.sha256, label_names=labels)
    stack_folder(paths, folder / "out")
    return folder / "out"


def test_another_set_of_tasks_is_another_version(stacked, tmp_path):
    versions = write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert [str(folder.relative_to(tmp_path)) for folder in versions] == ["many/1", "many-text/1"]
    facts = json.loads((versions[1] / "serving.json").read_text())
    assert facts["tasks"][1] == {"name": "topics", "labels": TASKS["topics"], "kind": "classification"}
    assert facts["task"] == "tasks" and facts["max_length"] == facts["positions"] == 64
    config = read_config(tmp_path / "many-text")
    assert [(value.name, value.optional) for value in config.input] == [("TEXT", False), ("PAIR", True), ("TASK", False)]
    assert write_many_tasks(tmp_path, "many", stacked, max_length=16)[0].name == "2"
    versions = write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert [(version.name, read_version(version).max_length) for version in versions] == [("3", 16)] * 2
    with pytest.raises(UserError, match=r"E779 .*with another config \(another setting\)"):
        write_many_tasks(tmp_path, "many", stacked, knobs=DEFAULT_KNOBS)
    with pytest.raises(UserError, match=r"E779 .*has 'many-text' alone"):
        (tmp_path / "many").rename(tmp_path / "other")
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    with pytest.raises(UserError, match=r"E779 .*not a folder of `compress delta stack`"):
        write_many_tasks(tmp_path, "new", tmp_path)
    with pytest.raises(UserError, match=r"E113 max_length: 100 tokens, where the model has positions for 64\. Use at most 64"):
        write_many_tasks(tmp_path, "new", stacked, max_length=100)
    assert not (tmp_path / "new").exists()


def test_a_model_of_an_earlier_version_takes_another_version_and_keeps_its_settings(stacked, tmp_path):
    """Whose defaults were others; a model that takes other inputs, or of another runtime, does not."""
    write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    config = read_config(tmp_path / "many-text")
    config.dynamic_batching.max_queue_delay_microseconds = 0
    config.parameters.pop("streams")
    write_config(config, tmp_path / "many-text")
    assert [version.name for version in write_many_tasks(tmp_path, "many", stacked)] == ["2", "2"]
    assert read_config(tmp_path / "many-text") == config
    require_runtime(tmp_path, "many", RUNTIMES["onnxruntime"])
    require_runtime(tmp_path, "new", RUNTIMES["openvino"])
    with pytest.raises(UserError, match=r"E779 .*with another config \(another runtime\)"):
        require_runtime(tmp_path, "many", RUNTIMES["openvino"])
    del config.input[1]
    write_config(config, tmp_path / "many-text")
    with pytest.raises(UserError, match=r"E779 .*with another config \(another runtime or kind of task\)"):
        write_many_tasks(tmp_path, "many", stacked)
    assert not (tmp_path / "many" / "3").exists()


@pytest.mark.parametrize("length", [40, 1024, None])
def test_a_model_without_a_table_of_positions_takes_the_length_that_is_given(tmp_path, length):
    """By default 512 tokens, which bounds memory."""
    limits = text_limits(write_model(tmp_path, "modernbert"), length)
    assert limits["max_length"] == limits["positions"] == (length or 512)


@pytest.mark.parametrize("before", [0, 1])
def test_a_version_that_could_not_be_written_whole_is_no_obstacle_to_the_next(stacked, tmp_path, monkeypatch, before):
    for _ in range(before):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    found, copy_file = sorted(tmp_path.rglob("[!.]*")), shutil.copyfile

    def full(source, target):
        if "many-text" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        copy_file(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert sorted(tmp_path.rglob("[!.]*")) == found and [path.name for path in tmp_path.rglob(".*")] == [LOCK]
    monkeypatch.undo()
    (tmp_path / "many" / f".{before + 1}" / "tokenizer").mkdir(parents=True)  # as one that was killed leaves it
    versions = write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert [folder.name for folder in versions] == [str(before + 1)] * 2
    assert [path.name for path in tmp_path.rglob(".*")] == [LOCK]


def full_at_the_config(monkeypatch, model):
    """A full disk, which is met once the file of a model's config was opened, and so is empty."""
    write = LocalFileSystem.pipe_file

    def full(self, path, content, **options):
        if Path(path).parent.name == model and "config.pbtxt" in path:
            Path(path).write_bytes(b"")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path, content, **options)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", full)


def test_the_config_of_a_served_model_outlives_a_full_disk(stacked, tmp_path, monkeypatch):
    write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    full_at_the_config(monkeypatch, "many")
    with pytest.raises(OSError, match="No space left"):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("before", [0, 1])
def test_a_version_that_a_kill_left_to_one_model_alone_is_completed(stacked, tmp_path, before):
    """Both were written under hidden names before the first was renamed. One that is not whole is none."""
    for _ in range(before):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    home, number = tmp_path / f"many{TEXT_SUFFIX}", str(before + 1)
    staged = (home / number).rename(home / f".{number}")
    assert [folder.name for folder in write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)] == [str(before + 2)] * 2
    assert (home / number / "serving.json").is_file() and not staged.exists()
    assert [path.name for path in tmp_path.rglob(".*")] == [LOCK]


def test_a_version_that_was_never_whole_is_not_completed(stacked, tmp_path):
    """And models whose numbers came apart have the same ones again."""
    for _ in range(2):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    home = tmp_path / f"many{TEXT_SUFFIX}"
    staged = (home / "2").rename(home / ".2")
    (staged / "serving.json").unlink()
    assert [folder.name for folder in write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)] == ["3", "3"]
    assert not (home / "2").exists()


@pytest.mark.parametrize("model", ["many", f"many{TEXT_SUFFIX}"])
def test_a_version_whose_config_could_not_be_written_is_no_obstacle_either(stacked, tmp_path, monkeypatch, model):
    full_at_the_config(monkeypatch, model)
    with pytest.raises(OSError, match="No space left"):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    monkeypatch.undo()
    whole = write_many_tasks(tmp_path / "whole", "many", stacked, knobs=KNOBS)
    left = tmp_path / model  # as one that was killed before its first version leaves it
    left.mkdir()
    shutil.copyfile(whole[0].parent / "config.pbtxt", left / "config.pbtxt")
    require_runtime(tmp_path, "many", RUNTIMES["openvino"])  # no version of another one is there
    versions = write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert [folder.name for folder in versions] == ["1", "1"]
    assert read_config(tmp_path / model).name == model


def test_one_writer_at_a_time(stacked, tmp_path):
    with Target.at(str(tmp_path)).locked(), pytest.raises(UserError, match="E756"):
        write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)
    assert write_many_tasks(tmp_path, "many", stacked, knobs=KNOBS)


@pytest.fixture(scope="module")
def server(stacked, tmp_path_factory, triton):
    folder = tmp_path_factory.mktemp("served")
    write_many_tasks(folder / "repository", "many", stacked, knobs=KNOBS)
    with QuickServer(folder / "repository", log_path=folder / "triton.log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as live:
        yield live


TOKENS = {
    "input_ids": np.array([[2, 5, 9, 3], [2, 12, 3, 0], [2, 7, 14, 3]]),
    "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]),
    "token_type_ids": np.zeros((3, 4), dtype=np.int64),
}


def test_rows_of_one_batch_have_their_own_tasks(client, stacked):
    task = np.array([2, 0, 1])
    logits = client.infer("many", {**TOKENS, "task": task[:, None]})["logits"]
    assert np.array_equal(logits, run(session(stacked / "model.onnx"), {**TOKENS, "task": task}))
    for wrong, said in ((3, "task holds 3, not a task from 0 to 2"), (-1, "task holds -1")):
        with pytest.raises(UserError, match=f"E715 .*{said}"):
            client.infer("many", {**TOKENS, "task": np.array([[0], [wrong], [1]])})


def texts(*rows):
    return {
        name: np.array([[cell.encode()] for cell in column], dtype=object)
        for name, column in zip(("TEXT", "TASK"), zip(*rows, strict=True), strict=True)
    }


def test_texts_are_answered_with_the_labels_of_their_task(client, server):
    rows = texts(("good film", "stars"), ("good film", "topics"), ("bad plot", "reviews"))
    answers = client.infer(f"many{TEXT_SUFFIX}", rows)
    assert answers["LABEL"][0] == b"stars" and answers["SCORE"][0] == answers["SCORES"][0, 0]
    assert answers["LABELS"].tolist() == [[b"stars", b"", b""], [b"film", b"plot", b"scene"], [b"bad", b"good", b""]]
    assert np.allclose(answers["SCORES"][1:].sum(axis=1), 1) and (answers["SCORES"][answers["LABELS"] == b""] == 0).all()
    alone = predict(server.url, "many", ["good film"], task="topics")[0]
    assert alone.label.encode() == answers["LABEL"][1] and set(alone.scores) == set(TASKS["topics"])
    pair = {**copy.copy(rows), "PAIR": np.array([[b"a scene"]] * 3, dtype=object)}
    assert abs(client.infer(f"many{TEXT_SUFFIX}", pair)["SCORE"] - answers["SCORE"]).max() > 1e-4
    assert predict(server.url, "many", [("good film", "a scene")], task="topics")[0].scores != alone.scores


def test_the_command_that_compress_serve_shows_names_a_task(client, server):
    for model in ("many", f"many{TEXT_SUFFIX}"):
        command = shlex.split(request_of(model, server.url, Served(server.repository, Path())))
        program, verb, url, name, text, option, task = command
        assert (program, verb, name, option, task) == ("compress", "predict", model, "--task", "reviews")
        assert predict(url, name, [text], task=task)[0].scores.keys() == set(TASKS["reviews"])


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({"task": "classification"}, 'compress predict h:1 m "a text"'),
        ({"task": "classification", "pair": True}, 'compress predict h:1 m "a text" --pair "a second text"'),
        (
            {"task": "choices", "pair": True},
            """echo '{"text": "a text", "choices": ["a choice", "another"]}' | compress predict h:1 m --format jsonl""",
        ),
        (None, 'compress predict h:1 m "a text"'),
    ],
)
def test_the_command_that_compress_serve_shows_has_what_the_model_takes(tmp_path, facts, command):
    """Whatever the columns of the run's task: two of marked spans are one text."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").touch()
    if facts is not None:
        limits = {"max_length": 8, "positions": 8, "vocabulary": 9, "pad_id": 0, "labels": ()}
        (tmp_path / "m" / "1" / "serving.json").write_text(VersionFacts(**facts, **limits).to_json())
    assert request_of("m", "h:1", Served(tmp_path, Path())) == command


@pytest.mark.parametrize("facts", [None, {"task": "classification"}, {"task": "choices"}])
@pytest.mark.parametrize("config", ["", "model_transaction_policy { decoupled: true }"])
def test_no_name_takes_the_shown_command_apart(tmp_path, facts, config):
    """The user copies it into a shell."""
    name = "a$(touch x)\ntry 'b'"
    (tmp_path / name / "1").mkdir(parents=True)
    (tmp_path / name / "config.pbtxt").write_text(config)
    if facts is not None:
        limits = {"max_length": 8, "positions": 8, "vocabulary": 9, "pad_id": 0, "labels": ()}
        (tmp_path / name / "1" / "serving.json").write_text(VersionFacts(**facts, **limits).to_json())
    words = shlex.split(request_of(name, "h:1", Served(tmp_path, Path())))
    assert (f"h:1/v2/models/{name}/generate_stream" if config else name) in words


def test_a_wrong_task_is_refused_by_name(client, server):
    with pytest.raises(UserError, match=r"E715 .*no task 'news' in this version; it has reviews, topics, stars"):
        client.infer(f"many{TEXT_SUFFIX}", texts(("good film", "news")))
    with pytest.raises(UserError, match=r"E778 .*has many tasks"):
        predict(server.url, "many", ["good film"])
    for asked in (["good film"], ["good film", "a scene"]):
        told = rf"model 'many{TEXT_SUFFIX}' has no task 'news'; it has reviews, topics, stars\. Name one of them with --task"
        with pytest.raises(UserError, match=f"E778 {told}"):
            predict(server.url, "many", asked, task="news")


def test_the_front_names_the_task_of_its_texts(server):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    def refused(**body):
        response = front.post("/predict", json={"texts": ["good film"], **body})
        return response.status_code, response.json()["code"]

    with TestClient(make_app(Settings(f"127.0.0.1:{server.ports['grpc']}"))) as front:
        (given,) = front.post("/predict", json={"texts": ["good film"], "task": "reviews"}).json()["predictions"]
        expected = predict(server.url, "many", ["good film"], task="reviews")[0]
        assert given["label"] == expected.label and given["scores"] == pytest.approx(expected.scores, abs=1e-6)
        body = {"texts": ["good film"], "pairs": ["a scene"], "task": "reviews"}
        (pair,) = front.post("/predict", json=body).json()["predictions"]
        assert set(pair["scores"]) == set(TASKS["reviews"]) and pair["scores"] != given["scores"]
        assert refused() == (400, "E778")
        assert refused(task="news") == (400, "E715")
        assert refused(task="reviews", pairs=["one", "two"]) == (400, "E767")
