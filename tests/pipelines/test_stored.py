"""`compress store`: what a store holds, whose it is, and that only what nobody uses is removed."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from compressor.errors import UserError
from pipelines.cli.work.store_work import store
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import NamedInputs
from pipelines.engine.store import Store, lock, sealed, shared_lock
from pipelines.file.config import load_pipeline
from pipelines.runs.finished import open_run
from pipelines.runs.stored import remove, stored, unused
from tests.pipelines import toys
from tests.pipelines.toys import tree

QUIET = {"remove_unused": False, "remove_caches": False, "older_than": None, "as_json": False}


def go(project, out, *overrides):
    return run_pipeline(load_pipeline(project, overrides), out)


def ids(result):
    return {artifact.id for artifact in result.artifacts.values()}


@pytest.fixture
def ages(monkeypatch):
    """Results of another day."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * 86400)


@pytest.fixture
def two(project, out):
    """What a run made first, and what it uses now."""
    return ids(go(project, out, "seed=3")), ids(go(project, out))


def test_every_result_is_shown_with_its_runs_and_size(project, out, two, capsys):
    other = ids(go(project, out, "name=other"))
    rows = {row.name: row for row in stored(out).rows}
    assert set(rows) == two[0] | two[1] | other
    assert {name for name, row in rows.items() if not row.runs} == two[0]
    assert all(rows[name].runs == ("other", "toy") for name in two[1] & other)
    for name, row in rows.items():
        folder = out / ".store" / name
        assert row.bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) and row.days < 1
    store(out, **QUIET)
    shown = capsys.readouterr().out
    assert "other, toy" in shown and "no run" in shown and f"used by no run: {len(two[0])} results" in shown
    store(out, **QUIET | {"as_json": True})
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(rows)


def test_what_no_run_uses_is_removed_and_the_rest_stays(project, out, two, ages, capsys):
    before = {name: tree(out / ".store" / name) for name in two[1]}
    (out / ".store" / "of my own").mkdir()
    store(out, **QUIET | {"remove_unused": True})
    assert f"removed: {len(two[0])} results" in capsys.readouterr().out
    assert {path.name for path in (out / ".store").iterdir()} == {"of my own", *two[1]}
    assert {name: tree(out / ".store" / name) for name in two[1]} == before
    assert len(go(project, out).reused) == len(two[1]) and not go(project, out, "seed=3").reused


def test_young_results_stay_until_they_are_asked_for(out, two, capsys):
    """A run that is started again has no record of the results before it reaches them."""
    store(out, **QUIET | {"remove_unused": True})
    told = capsys.readouterr()
    assert "removed: 0 results" in told.out and f"younger than 7 days: {len(two[0])} results" in told.err
    store(out, **QUIET | {"remove_unused": True, "older_than": 0.0})
    assert not unused(stored(out).rows)


def test_what_a_running_process_uses_stays(out, two, ages, capsys):
    first, *_ = sorted(two[0])
    with shared_lock(out / ".store" / f".used-{first}"):
        store(out, **QUIET | {"remove_unused": True})
    assert "in use by a running process: 1 result," in capsys.readouterr().err
    assert {row.name for row in unused(stored(out).rows)} == {first}


def test_a_failed_run_keeps_its_finished_stages(project, out, ages):
    out.mkdir()
    (out / "trouble-prune").write_text("user_error")
    with pytest.raises(UserError, match="E501"):
        go(project, out)
    assert len(stored(out).rows) == 2 and not unused(stored(out).rows)


@pytest.mark.parametrize("name", ["run.json", "pipeline.lock.yaml"])
def test_nothing_is_removed_where_a_run_cannot_be_read(out, two, ages, name):
    (out / "toy" / name).write_text("{")
    before = tree(out / ".store")
    with pytest.raises(UserError, match=rf"E803 .*{name}"):
        store(out, **QUIET | {"remove_unused": True})
    assert tree(out / ".store") == before


def test_caches_and_interrupted_trainings(out, two, ages, capsys):
    cache, training = Store(out / ".store").cache, out / ".store" / ".unfinished-tune-0123456789abcdef"
    cache.mkdir()
    training.mkdir()
    (training / "optimizer.pt").write_bytes(bytes(5))
    (cache / "prices-1.json").write_bytes(b"{}")
    (cache / "prices-1.sha256").write_bytes(sealed(b"{}", "prices-1.json"))
    assert {(row.kind, row.name, row.bytes) for row in stored(out).rows if row.kind != "artifact"} == {
        ("cache", "prices-1.json", 2 + len(sealed(b"{}", "prices-1.json"))),
        ("interrupted training", "tune-0123456789abcdef", 5),
    }
    store(out, **QUIET | {"remove_unused": True})
    assert not training.exists() and (cache / "prices-1.json").is_file()
    capsys.readouterr()
    store(out, **QUIET | {"remove_caches": True, "as_json": True})
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["prices-1.json"] and not os.listdir(cache)


def test_a_trial_of_a_sweep_is_a_run(out, two):
    trial = out / "toy-sweep" / "seed-0"
    trial.parent.mkdir()
    (out / "toy").rename(trial)
    assert {row.runs for row in stored(out).rows if row.name in two[1]} == {("toy-sweep/seed-0",)}


def test_mistakes(out, tmp_path, two):
    with pytest.raises(UserError, match="E112 --older-than"):
        store(out, **QUIET | {"older_than": 3.0})
    with pytest.raises(UserError, match=r"E805 .*no store of runs here"):
        store(tmp_path / "nowhere", **QUIET)


def as_another_user(out, action):
    """What `action` raises of a folder, as text; root, who may do anything, asks as nobody does."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = ""
        os.chdir(out)  # the folders above may be root's alone
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            action()
        except BaseException as error:
            told = str(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        return told.read()


@pytest.mark.parametrize("place", ["toy", "toy-sweep/trial", "toy-sweep"])
def test_a_run_that_cannot_be_entered_may_use_anything(out, two, ages, place):
    closed = out / place
    if place != "toy":
        closed.parent.mkdir(exist_ok=True)
        (out / "toy").rename(closed)
    (out / "lost+found").mkdir()
    (out / "lost+found").chmod(0)
    closed.chmod(0)
    clean = lambda: store(Path(), **QUIET | {"remove_unused": True, "older_than": 0.0})  # noqa: E731
    told = as_another_user(out, clean)
    listed = as_another_user(out, lambda: store(Path(), **QUIET))
    closed.chmod(0o755)
    assert re.match(rf"E801 {place}(/run\.json)?: cannot be read \(Permission denied\)", told)
    assert not listed and not as_another_user(out, lambda: store(Path(), **QUIET))


@pytest.mark.parametrize("sweep", [False, True])
def test_a_run_whose_disk_is_away_may_use_anything(out, two, ages, tmp_path, capsys, sweep):
    place = out / "toy-sweep" / "trial" if sweep else out / "toy"
    place.parent.mkdir(exist_ok=True)
    (out / "toy").rename(tmp_path / "disk")
    place.symlink_to(tmp_path / "disk")
    assert {row.name for row in unused(stored(out).rows)} == two[0]
    (tmp_path / "disk").rename(tmp_path / "away")
    store(out, **QUIET)
    assert f"{place.name}: cannot be read (a link to what is not there)" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"E801 .*a link to what is not there"):
        store(out, **QUIET | {"remove_unused": True})


def test_another_users_result_stays_where_it_is_and_ones_own_go(out, two, ages):
    root, first = out / ".store", sorted(two[0])[0]
    root.chmod(0o777)
    for name in two[0] - {first}:
        for path in (root / name, *(root / name).rglob("*")):
            path.chmod(0o777)
    (root / first).chmod(0o555)
    old = unused(stored(out).rows)
    told = as_another_user(out, lambda: print_all(remove(Path(), old)))
    (root / first).chmod(0o755)
    assert told == f"{first}: Permission denied: its owner may remove it"
    assert {path.name for path in root.iterdir()} == {first, *two[1]}


def print_all(results):
    raise RuntimeError(", ".join(f"{row.name}: {reason}" for row, reason in results if reason))


def test_what_goes_while_it_is_counted(out, two, monkeypatch):
    """A training removes its older checkpoints, a run what it has published."""
    training = out / ".store" / ".unfinished-tune-0123456789abcdef"
    (training / "checkpoint-1" / "deep").mkdir(parents=True)
    listed = os.scandir

    def scandir(path="."):
        if str(path).endswith("checkpoint-1"):
            shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert {row.name for row in stored(out).rows} == {*two[0], *two[1], "tune-0123456789abcdef"}


@pytest.mark.parametrize("use", ["used", "served"])
def test_what_is_used_or_served_stays(out, two, ages, use):
    first, *_ = sorted(two[0])
    with shared_lock(out / ".store" / f".{use}-{first}"):
        assert [(row.name, reason) for row, reason in remove(out, unused(stored(out).rows)) if reason] == [
            (first, "in use by a running process")
        ]


def test_the_folder_of_runs_may_lie_in_a_store(project, tmp_path):
    inner = tmp_path / ".store" / "runs"
    go(project, inner)
    assert not unused(stored(inner).rows)


def checkpoint(_config, inputs, workspace):
    """The base with another weight, in place of the work of a stage."""
    shutil.copytree(inputs.base.folder, workspace.folder, dirs_exist_ok=True)
    toys.flip_weight(workspace.folder)
    return {"seed": inputs.seed}


@pytest.fixture
def on_a_run(project, out):
    """The name of the model of the run `first`; the run `toy` has that as its base, and `second.yaml` is its pipeline."""

    with pytest.MonkeyPatch.context() as patch:
        toys.replace(patch, "prune", checkpoint)
        base = go(project, out, "name=first").artifacts["prune"].id
    second = project.with_name("second.yaml")
    second.write_text(project.read_text().replace("./model", f"{out / 'first'}"))
    go(second, out)
    return base, second


@pytest.mark.parametrize("record", ["run.json", "pipeline.lock.yaml"])
def test_the_base_of_a_run_is_used_by_it(out, on_a_run, ages, record):
    """Also where the run that made it is gone, and the last attempt at this run had another base, or left no account."""
    base, _ = on_a_run
    shutil.rmtree(out / "first")
    (out / "toy" / record).unlink()
    (row,) = (row for row in stored(out).rows if row.name == base)
    assert row.runs == ("toy",)
    if record == "run.json":
        assert open_run(out / "toy").model == str(out / ".store" / base)


@pytest.mark.parametrize("place", ["runs/.store/mine", f"others/.store/tune-{16 * '0'}"])
def test_a_base_that_no_run_made_in_this_store_is_no_artifact(project, out, place):
    """The user's own in it, and an artifact of another store."""
    base = shutil.copytree(project.parent / "model", out.parent / place)
    project.write_text(project.read_text().replace("./model", str(base)))
    assert "artifact" not in open_run(go(project, out).folder).lock["model"]


@pytest.mark.parametrize("key", ["base", "teacher"])
def test_a_running_process_uses_its_base_and_its_teachers(project, out, on_a_run, ages, monkeypatch, key):
    base, second = on_a_run
    removed = []

    def looking(_config, inputs, workspace):
        removed.extend(why for _, why in remove(out, [row for row in stored(out).rows if row.name == base]))
        return {}

    if key == "teacher":
        toys.replace(monkeypatch, "select", beside=NamedInputs(models=("text",)))
        project.write_text(project.read_text().replace("places", str(out / "first")))
    toys.replace(monkeypatch, "tune", looking)
    go(second if key == "base" else project, out, "tune.files=3")
    assert removed == ["in use by a running process"]


def test_a_run_makes_anew_what_its_own_teacher_is(project, out, on_a_run, monkeypatch):
    """The last model of an earlier run is the artifact of a stage that both share: the run does not wait for itself."""
    teacher, _ = on_a_run

    toys.replace(monkeypatch, "prune", checkpoint)
    toys.replace(monkeypatch, "report", beside=NamedInputs(models=("text",)))
    project.write_text(project.read_text().replace("text: all", f"text: {out / 'first'}"))
    made = run_pipeline(load_pipeline(project, ["name=third"]), out, force=["prune"])
    assert made.artifacts["prune"].id == teacher and "prune" not in made.reused


def test_a_run_that_has_finished_since_the_list_keeps_its_results(project, out, two, ages):
    old = unused(stored(out).rows)
    used = ids(go(project, out, "seed=3", "name=late"))
    kept = {row.name: why for row, why in remove(out, old) if why}
    assert kept == dict.fromkeys(used & two[0], "used again by late") and len(kept) == 3
    late = open_run(out / "late")
    assert {late.verify(stage).id for stage in late.lock["stages"]} == used


def test_a_run_that_cannot_be_read_since_the_list_may_use_anything(out, two, ages):
    old = unused(stored(out).rows)
    (out / "toy" / "run.json").write_text("{")
    assert {why for _, why in remove(out, old)} == {f"{out / 'toy' / 'run.json'}: unreadable or damaged"}


def test_what_was_made_anew_since_the_list_stays(out, two, ages):
    first, *rest = unused(stored(out).rows)
    os.utime(out / ".store" / first.name, (time.time(), time.time()))
    assert dict((row.name, why) for row, why in remove(out, [first, *rest], days=7) if why) == {
        first.name: "younger than 7 days by now"
    }


def test_what_killed_processes_left_is_counted_and_removed(out, two, capsys):
    """Whatever its age: nothing goes on from it."""
    root = out / ".store"
    left = {".work-export-0123456789abcdef": 7, ".work-merge-0123456789abcdef": 5, ".old-tune-0123456789abcdef-xyz": 3}
    for name, size in left.items():
        (root / name).mkdir()
        (root / name / "model.onnx").write_bytes(bytes(size))
    rows = {row.name: row.bytes for row in stored(out).rows if row.kind == "unfinished work"}
    assert rows == left
    with lock(root / ".lock-merge-0123456789abcdef"):
        store(out, **QUIET | {"remove_unused": True})
    assert "removed: 2 results, 10 B" in capsys.readouterr().out
    assert [path.name for path in root.glob(".[ow]*")] == [".work-merge-0123456789abcdef"]


def test_what_another_process_sweeps_away_meanwhile_is_removed(out, two, ages, monkeypatch):
    """A run that begins sweeps what was set aside."""
    real = shutil.rmtree

    def rmtree(path, *rest, **options):
        if ".old-" in str(path):
            real(path)
        real(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert {why for _, why in remove(out, unused(stored(out).rows))} == {""}
