"""`compressor.load` on the folder of a run: its last model, and a clear word where there is none or something is damaged."""

import json
import shutil

import pytest
import torch
import yaml

import compressor
from compressor.errors import UserError
from compressor.load_run import last_state
from compressor.models.reference import resolve
from compressor.models.special_tokens import tokenizer_of
from compressor.storage.delta_file import read
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline

STAGES = [
    {"tune": {"method": "lora", "rank": 2, "epochs": 1, "learning_rate": 0.02, "batch_size": 8}},
    {"prune": {"structure": "neurons", "criterion": "weight", "remove": 0.5}},
    {"merge": None},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a project with two runs on one store: `tiny` up to merge, `unmerged` up to prune."""
    path = write_pipeline(tmp_path_factory.mktemp("project"), stages=STAGES, rows=16)
    run_pipeline(load_pipeline(path), path.parent / "runs")
    run_pipeline(load_pipeline(path, ["name=unmerged"]), path.parent / "runs", until="prune")
    return path.parent


@pytest.fixture
def runs(made, tmp_path):
    """A copy of its runs, to do harm to."""
    return shutil.copytree(made / "runs", tmp_path / "runs")


def logits(model, made):
    with torch.no_grad():
        return model(**tokenizer_of(made / "model")("the film was good", return_tensors="pt")).logits


def test_the_last_model_of_a_run(made, monkeypatch, tmp_path):
    """Merged, or as the last stage left it on its base, wherever the program runs now."""
    monkeypatch.chdir(tmp_path)
    merged, unmerged = (compressor.load(made / "runs" / name) for name in ("tiny", "unmerged"))
    assert not merged.training and merged.config.per_layer_config
    assert torch.allclose(logits(merged, made), logits(unmerged, made), atol=1e-5)
    (store,) = (made / "runs" / ".store").glob("merge-*")
    assert torch.equal(logits(compressor.load(store), made), logits(merged, made))
    monkeypatch.setenv("HOME", str(made))
    assert torch.equal(logits(compressor.load("~/runs/tiny"), made), logits(merged, made))
    assert torch.equal(
        logits(compressor.load(str(made / "runs" / "unmerged"), base=made / "model"), made), logits(unmerged, made)
    )


def test_the_delta_of_a_run(made, compress, tmp_path, monkeypatch):
    """Of its last state: what its merge put into the model can be taken out no more."""
    monkeypatch.chdir(tmp_path)
    code, shown, error = compress("delta", "convert", made / "runs" / "tiny", "tiny.safetensors")
    assert (code, error) == (0, ""), shown
    model = compressor.load(made / "model", delta="tiny.safetensors")
    assert torch.equal(logits(model, made), logits(compressor.load(made / "runs" / "unmerged"), made))


def edit_lock(run, part, key, value):
    lock = run / "pipeline.lock.yaml"
    content = yaml.safe_load(lock.read_text())
    content[part][key] = value
    lock.write_text(yaml.safe_dump(content))


def test_the_base_in_the_store_that_the_lock_names(made, runs):
    """Where the last attempt had another one."""
    base = shutil.copytree(made / "model", runs / ".store" / "merge-0123456789abcdef")
    edit_lock(runs / "unmerged", "model", "artifact", base.name)
    (runs / "unmerged" / "run.json").unlink()
    assert last_state(runs / "unmerged")[1] == str(base)
    edit_lock(runs / "unmerged", "model", "artifact", f"../{base.name}")
    assert last_state(runs / "unmerged")[1] is None


def test_the_base_of_a_run_is_the_one_that_it_found(made, compress, tmp_path, monkeypatch):
    """Whatever is called so where the command runs; the delta keeps the name that the pipeline file has."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert compress("delta", "convert", made / "runs" / "unmerged", "one.safetensors")[0] == 0
    named = read(tmp_path / "one.safetensors").base
    compress("delta", "convert", made / "runs" / "unmerged", "two.safetensors", "--base", made / "model")
    assert (named, read(tmp_path / "two.safetensors").base) == ("./model", str(made / "model"))


def test_the_delta_of_a_run_names_the_base_as_its_pipeline_does(runs, compress, tmp_path):
    """Its state may be of an earlier run, whose pipeline had another name for the same base."""
    edit_lock(runs / "unmerged", "model", "reference", "./renamed")
    assert compress("delta", "convert", runs / "unmerged", tmp_path / "delta.safetensors")[0] == 0
    assert read(tmp_path / "delta.safetensors").base == "./renamed"


def test_a_run_in_a_subfolder_finds_the_store_of_all(runs):
    """As the runs of a sweep lie."""
    (runs / "sweep").mkdir()
    (runs / "tiny").rename(runs / "sweep" / "a")
    lock = runs / "sweep" / "a" / "pipeline.lock.yaml"
    lock.write_text(lock.read_text().replace("name: tiny\n", "name: sweep/a\n", 1))
    assert compressor.load(runs / "sweep" / "a").config.per_layer_config


def test_a_run_whose_model_is_not_an_ordinary_one_is_no_base(made):
    """A pipeline's `model` or `teacher`, named by the folder of a run, is what its merge made."""
    with pytest.raises(UserError, match=r"E805 .*unmerged: this run has no merged model. End its pipeline with a merge"):
        resolve(str(made / "runs" / "unmerged"))
    with pytest.raises(UserError, match=r"E304 .*pruned"):
        resolve(str(made / "runs" / "tiny"))


def test_who_may_read_one_file_of_a_run_may_read_all(made):
    """safetensors writes private files (mode 0600): another account could not load the model."""
    files = [path for path in (made / "runs" / ".store").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    plain = made / "plain"
    plain.touch()
    assert not [path for path in files if (path.stat().st_mode ^ plain.stat().st_mode) & 0o777 and ".lock" not in path.name]


def test_a_file_that_may_not_be_read_has_not_changed(made, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("compressor.run_store.sha256_of", refused)
    with pytest.raises(UserError, match=r"E801 .*: this account may not read it. Change its permissions"):
        compressor.load(made / "runs" / "tiny")


def test_a_link_to_a_run_is_as_good_as_its_folder(runs, tmp_path):
    (tmp_path / "latest").symlink_to(runs / "tiny")
    assert compressor.load(tmp_path / "latest").config.per_layer_config


def test_a_run_without_a_model(runs):
    lock = runs / "tiny" / "pipeline.lock.yaml"
    whole = yaml.safe_load(lock.read_text())
    lock.write_text(yaml.safe_dump({**whole, "stages": []}))
    with pytest.raises(UserError, match=r"E805 .*tiny: this run has produced no model. Run its stages up to tune"):
        compressor.load(runs / "tiny")
    shutil.rmtree(runs / ".store")
    lock.write_text(yaml.safe_dump(whole))
    with pytest.raises(UserError, match=r"E805 .*its artifact merge-[0-9a-f]{16} is gone"):
        compressor.load(runs / "tiny")
    with pytest.raises(UserError, match=r"E305 .*no model in this folder"):
        compressor.load(runs)


def test_a_run_of_many_tasks_has_no_single_model(runs):
    lock, store = runs / "tiny" / "pipeline.lock.yaml", runs / ".store" / "tune-0"
    (store / "tasks").mkdir(parents=True)
    (store / "tasks" / "_shared.safetensors").write_bytes(b"")
    files = {"tasks/_shared.safetensors": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
    (store / "artifact.json").write_text(json.dumps({"files": {name: {"sha256": one} for name, one in files.items()}}))
    lock.write_text(yaml.safe_dump({"name": "tiny", "stages": [{"kind": "model", "artifact": "tune-0", "files": files}]}))
    with pytest.raises(UserError, match=r"E805 .*trained many tasks.*delta='.*/tasks/NAME.safetensors'"):
        compressor.load(runs / "tiny")


ROW = {"kind": "model", "artifact": "merge-0", "files": {"config.json": "0" * 64}}
LOCKS = {
    "empty": b"",
    "a list": b"[]",
    "text": b"nonsense",
    "a mapping": b"{}",
    "no YAML": b"a: [",
    "no UTF-8": b"\xff\xfe",
    "deep": b"[" * 2**20,
    "a tag": b"!!python/object/apply:os.system ['true']",
    "aliases": b"a: &a [1]\nb: *a",
    "too large": b"#" * (2**26 + 1),
    "a name that leaves": {"name": "../tiny", "stages": [ROW]},
    "an absolute name": {"name": "/tiny", "stages": [ROW]},
    "stages of no list": {"name": "tiny", "stages": {"a": 1}},
    "an artifact that leaves": {"name": "tiny", "stages": [{**ROW, "artifact": "../../model"}]},
    "an artifact that is a number": {"name": "tiny", "stages": [{**ROW, "artifact": 3}]},
    "a file that leaves": {"name": "tiny", "stages": [{**ROW, "files": {"../config.json": "0" * 64}}]},
    "an absolute file": {"name": "tiny", "stages": [{**ROW, "files": {"/etc/passwd": "0" * 64}}]},
    "no checksum": {"name": "tiny", "stages": [{**ROW, "files": {"config.json": None}}]},
    "no files": {"name": "tiny", "stages": [{**ROW, "files": {}}]},
}


@pytest.mark.parametrize("content", LOCKS.values(), ids=LOCKS)
def test_a_damaged_or_hostile_lock(tmp_path, content):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "pipeline.lock.yaml").write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    with pytest.raises(UserError, match=r"E305 .*tiny: pipeline.lock.yaml cannot be read. Run the pipeline again"):
        compressor.load(folder)


def test_every_file_of_the_artifact_is_compared(runs):
    (place,) = (runs / ".store").glob("merge-*")
    manifest = (place / "artifact.json").read_bytes()
    for content in (b"", b"[]", b"null", b'{"files": []}', b'{"files": {"config.json": 3}}', manifest.replace(b"0", b"1")):
        (place / "artifact.json").write_bytes(content)
        with pytest.raises(UserError, match=r"E305 .*artifact.json (cannot be read|does not match)"):
            compressor.load(runs / "tiny")
    (place / "artifact.json").write_bytes(manifest)
    for path in sorted(place.iterdir()):
        if path.name in ("artifact.json", "artifact.sha256"):
            continue
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(UserError, match=f"E305 .*{path.name} has changed since the run"):
            compressor.load(runs / "tiny")
        path.unlink()
        with pytest.raises(UserError, match=f"E305 .*{path.name} has changed since the run"):
            compressor.load(runs / "tiny")
        path.write_bytes(content)
    assert compressor.load(runs / "tiny")


def test_another_base_is_told(runs, made, tmp_path):
    other = shutil.copytree(made / "model", tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.raises(UserError, match="E306 "):
        compressor.load(runs / "unmerged", base=other)
