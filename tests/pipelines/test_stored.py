"""`compress store`: what a store holds, whose it is, and that only what nobody uses is removed."""

import json
import os
import time

import pytest

from compressor.errors import UserError
from pipelines.cli.work.store_work import store
from pipelines.engine.runner import run_pipeline
from pipelines.engine.store import Store, sealed, shared_lock
from pipelines.file.config import load_pipeline
from pipelines.runs.stored import stored, unused
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
    rows = {row.name: row for row in stored(out)}
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
    assert not unused(stored(out))


def test_what_a_running_process_uses_stays(out, two, ages, capsys):
    first, *_ = sorted(two[0])
    with shared_lock(out / ".store" / f".used-{first}"):
        store(out, **QUIET | {"remove_unused": True})
    assert "in use by a running process: 1 result," in capsys.readouterr().err
    assert {row.name for row in unused(stored(out))} == {first}


def test_a_failed_run_keeps_its_finished_stages(project, out, ages):
    out.mkdir()
    (out / "trouble-prune").write_text("user_error")
    with pytest.raises(UserError, match="E501"):
        go(project, out)
    assert len(stored(out)) == 2 and not unused(stored(out))


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
    assert {(row.kind, row.name, row.bytes) for row in stored(out) if row.kind != "artifact"} == {
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
    assert {row.runs for row in stored(out) if row.name in two[1]} == {("toy-sweep/seed-0",)}


def test_mistakes(out, tmp_path, two):
    with pytest.raises(UserError, match="E112 --older-than"):
        store(out, **QUIET | {"older_than": 3.0})
    with pytest.raises(UserError, match=r"E805 .*no store of runs here"):
        store(tmp_path / "nowhere", **QUIET)
