"""A run that fails leaves an account that can be shown, and what the last good run made; readers are told which is which."""

import errno
import fcntl
import json
import os
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from compressor.errors import CheckError, UserError
from compressor.run_store import LOCK_FILE
from pipelines.engine.attempt import last_attempt
from pipelines.engine.runner import run_pipeline
from pipelines.engine.store import Locked, Store, lock, served_lock, shared_lock
from pipelines.file.config import load_pipeline
from pipelines.runs.finished import FinishedRun, open_run
from pipelines.runs.served import find_repository, kept_while_served, repository_in_use
from pipelines.runs.verify import require_quality, verify
from pipelines.sweeps.sweep import sweep
from pipelines.sweeps.sweep_preview import preview
from pipelines.sweeps.sweep_trials import SweepPlan
from pipelines.sweeps.trial_run import TrialJob
from serving.server_registry import log_folder
from tests.pipelines import toys
from tests.pipelines.toys import tree
from tests.tiny import write_pipeline

PROOF = {
    "hop": "deltas -> merged",
    "kind": "merged",
    "rows": 7,
    "max_difference": 0.25,
    "mean_difference": 0.125,
    "agreement": 0.5,
    "metric_reference": 0.9,
    "metric_candidate": 0.8,
    "metric_interval": [-0.2, 0.0],
    "worst_row": 3,
    "passed": False,
}
FAILURE = {"code": "E610", "what": "int8 lost 3 points", "fix": "Keep fp32"}


def proving(*, fails: bool = False, **metadata):
    """A toy stage that compares, and may fail afterwards."""

    def run(config, inputs, workspace):
        workspace.proven(PROOF)
        if fails:
            raise CheckError("E610", "logits differ", "Look at row 3")
        return {**toys.run(config, inputs, workspace), **metadata}

    return run


def go(path, out, *overrides, **options):
    return run_pipeline(load_pipeline(path, overrides), out, **options)


def test_a_failed_rerun_leaves_the_last_good_results(project, out, compress):
    run = go(project, out).folder
    good = {path.name: path.read_bytes() for path in run.iterdir() if path.name in (LOCK_FILE, "report.json")}
    artifact = next((out / ".store").glob("prune-*"))
    (artifact / "deep" / "er" / "0.bin").write_bytes(b"damaged")
    assert compress("run", project, "--out", out)[2].startswith("E803")
    assert {name: (run / name).read_bytes() for name in good} == good
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["stage"], facts["error"]["code"]) == ("failed", "prune", "E803")
    code, shown, error = compress("verify", run)
    assert code == 3 and "prune: the last attempt" in shown and "E808" in error and "E803" in error
    code, shown, _ = compress("report", run)
    assert code == 0 and shown.startswith("the last attempt failed in stage 'prune'")
    assert "stages finished: select, tune\n" in shown
    assert "the run before it, which finished:" in shown and shown.splitlines()[-1] == f"report: {run / 'report.json'}"
    assert compress("run", project, "--out", out, "--force", "prune")[0] == 0
    assert {name: (run / name).read_bytes() for name in good} == good
    assert not [one for one in verify(run) if one.hop == "the last attempt"]
    assert not compress("report", run)[1].startswith("the last attempt")


def test_a_flipped_manifest_fails_the_run_and_is_written_down(project, out):
    folder = go(project, out).artifacts["prune"].folder
    path = folder / "artifact.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(UserError, match=r"E803 .*'artifact.json' has changed"):
        go(project, out)
    assert last_attempt(out / "toy").error.code == "E803"
    with pytest.raises(UserError, match="E803"):
        go(project, out, dry_run=True)


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(project, out):
    artifact, draw = go(project, out).artifacts["tune"], random.Random(0)
    store, mark = Store(out / ".store"), json.loads((artifact.folder / "artifact.json").read_text())["fingerprint"]
    for name in ("artifact.json", "artifact.sha256"):
        path = artifact.folder / name
        content = path.read_bytes()
        for bit in draw.sample(range(8 * len(content)), 200):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(UserError, match="E803"):
                store.find("tune", mark, "tune")
        path.write_bytes(content)
    store.verify(store.find("tune", mark, "tune"))


def test_what_is_proven_before_a_failure_is_kept_and_shown(project, out, compress, monkeypatch):
    toys.replace(monkeypatch, "tune", run=proving(parity=[{**PROOF, "hop": "masked -> removed", "passed": True}]))
    toys.replace(monkeypatch, "prune", run=proving(fails=True))
    code, _, error = compress("run", project, "--out", out)
    assert code == 3 and error == "E610 logits differ. Look at row 3\n"
    run = out / "toy"
    facts = json.loads((run / "run.json").read_text())
    assert facts["error"] == {
        "code": "E610",
        "what": "logits differ",
        "fix": "Look at row 3",
        "where": "",
        "stage": "prune",
        "log": str(run / "logs" / "prune.log"),
    }
    assert [(one["stage"], one["hop"]) for one in facts["parity"]] == [
        ("tune", "masked -> removed"),
        ("prune", "deltas -> merged"),
    ]
    code, shown, _ = compress("report", run)
    assert code == 0 and "E610 logits differ. Look at row 3" in shown and f"log: {run / 'logs' / 'prune.log'}" in shown
    assert "prune: deltas -> merged" in shown and "2.5e-01" in shown and "90.0 > 80.0" in shown and "-20.0 to +0.0" in shown
    assert "stages finished: select, tune\n" in shown
    # nothing has ever finished here
    assert (compress("verify", run)[0], compress("serve", run)[0], compress("report", run, "--plan")[0]) == (3, 2, 2)
    # reused stages say what they proved again
    assert compress("run", project, "--out", out)[0] == 3
    assert json.loads((run / "run.json").read_text())["parity"] == facts["parity"]


def test_a_run_that_was_killed_is_told(project, out, compress):
    run = go(project, out).folder
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "status": "running", "stage": "tune"}))
    code, _, error = compress("verify", run)
    assert code == 3 and "did not end in stage 'tune': it is still running, or it was killed" in error
    assert "did not end" in compress("report", run)[1]
    code, _, error = compress("serve", run)
    assert code == 2 and "E805" in error


def test_a_run_that_goes_on_names_its_stage(project, out, monkeypatch):
    """As it stands where the process is killed in a stage."""
    seen = []

    def looking(config, inputs, workspace):
        seen.append(json.loads((out / "toy" / "run.json").read_text()))
        return toys.run(config, inputs, workspace)

    toys.replace(monkeypatch, "tune", run=looking)
    go(project, out)
    assert [(facts["status"], facts["stage"]) for facts in seen] == [("running", "tune")]


@pytest.mark.parametrize("reused", [False, True])
def test_a_failed_check_that_does_not_stop_the_run(project, out, compress, monkeypatch, reused):
    toys.replace(monkeypatch, "tune", run=proving(failures=[FAILURE]))
    for _ in range(1 + reused):
        code, shown, error = compress("run", project, "--out", out)
    run = out / "toy"
    assert code == 3 and error.startswith("E615 1 check failed: E610 in tune.") and len(error.splitlines()) == 1
    assert "FAILED E610 int8 lost 3 points. Keep fp32" in shown and f"report: {run / 'report.json'}" in shown
    assert ("reused" in shown) == reused
    assert "report       reuse" in compress("run", project, "--out", out, "--dry-run")[1]
    assert preview(TrialJob("toy", load_pipeline(project), out, "report", ())).finished
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["failures"]) == ("failed checks", [{"stage": "tune", **FAILURE}])
    assert yaml.safe_load((run / LOCK_FILE).read_text())["failures"] == facts["failures"]
    code, shown, error = compress("verify", run)
    assert code == 3 and "tune: as the run found" in shown and "E610 int8 lost 3 points" in error
    code, shown, _ = compress("report", run)
    assert code == 0 and shown.startswith("FAILED tune: E610") and "accuracy" in shown


PIPELINE = toys.PIPELINE.replace("  - report", "  - deploy:\n  - report")


def test_an_optional_stage_whose_check_fails_is_left_out(tmp_path, project, out, compress, monkeypatch):
    project.write_text(PIPELINE)
    whole = go(project, tmp_path / "whole").artifacts
    toys.replace(monkeypatch, "deploy", optional=True)
    out.mkdir()
    (out / "trouble-deploy").write_text("check_error")
    code, shown, error = compress("run", project, "--out", out)
    assert code == 3 and "E615 1 check failed: E601 in deploy" in error
    assert "FAILED E601 logits differ. Look at row 3" in shown
    lock = yaml.safe_load((out / "toy" / LOCK_FILE).read_text())
    assert [stage["id"] for stage in lock["stages"]] == ["select", "tune", "prune", "report"]
    assert lock["failures"][0]["stage"] == "deploy"
    given = json.loads((out / "toy" / "report.json").read_text())
    assert given["run"]["failures"] == lock["failures"]
    assert [one[1] for one in given["artifacts"]] == [
        "select",
        "tune",
        "prune",
    ]
    assert ("deploy", "E601") in [(one.stage, one.code) for one in verify(out / "toy") if not one.passed]
    # the check is made again, and the same report is reused
    code, shown, _ = compress("run", project, "--out", out)
    assert code == 3 and shown.count("reused") == 4
    (out / "trouble-deploy").unlink()
    result = go(project, out)
    assert not result.failures and result.artifacts["report"].id == whole["report"].id


def test_of_two_deploys_the_one_that_failed_is_told_with_what_the_other_deployed(project, out, monkeypatch):
    """It is another model, which is served and deployed from this run."""
    project.write_text(PIPELINE.replace("  - deploy:\n", "  - deploy:\n  - deploy: {id: pruned, text: other}\n"))

    def failing(config, inputs, workspace):
        if config.text == "other":
            raise CheckError("E610", "the served model differs", "Look at row 3")
        return toys.run(config, inputs, workspace)

    toys.replace(monkeypatch, "deploy", optional=True, run=failing)
    run = go(project, out)
    served = find_repository(run.folder)
    assert served.repository.parent == run.artifacts["deploy"].folder
    assert served.outdated == "note: 'pruned' failed (E610); this is what 'deploy' deployed"


@pytest.mark.parametrize(("trouble", "code"), [("user_error", "E501"), ("bug", "E899"), ("full_disk", "E804")])
def test_an_optional_stage_may_only_fail_a_check(project, out, monkeypatch, trouble, code):
    project.write_text(PIPELINE)
    toys.replace(monkeypatch, "deploy", optional=True)
    out.mkdir()
    (out / "trouble-deploy").write_text(trouble)
    with pytest.raises(Exception, match=code):
        go(project, out)
    assert last_attempt(out / "toy").status == "failed"


def test_a_run_until_a_stage_is_a_run_of_fewer_stages(project, out, compress):
    run = go(project, out).folder
    assert go(project, out, until="tune").report is None
    assert len(yaml.safe_load((run / LOCK_FILE).read_text())["stages"]) == 2
    assert last_attempt(run).status == "done" and not (run / "report.json").exists()
    assert not [one for one in verify(run) if one.hop == "the last attempt"]


def test_a_run_removes_no_file_of_the_user(project, out):
    run = go(project, out).folder
    mine = [run / "report.pdf", *(run / "tasks" / name for name in ("notes.txt", "a.safetensors", "a.generated.jsonl"))]
    mine[1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    go(project, out, until="tune")
    assert all(path.is_file() for path in mine) and not (run / "report.json").exists()


def test_a_model_that_only_a_failed_attempt_had(project, out):
    run = go(project, out).folder
    assert open_run(run).model == str(project.parent / "model")
    other = project.parent / "other"
    (project.parent / "model").rename(other)
    toys.flip_weight(other)
    (out / "trouble-tune").write_text("user_error")
    with pytest.raises(UserError, match="E501"):
        go(project, out, f"model={other}")
    assert open_run(run).model == "./model"


def test_a_run_is_not_verified_with_another_base_or_other_data(project, out):
    go(project, out)

    def faults():
        return {(check.stage, check.code) for check in verify(out / "toy", serve=False) if not check.passed}

    told = faults()
    toys.flip_weight(project.parent / "model")
    assert faults() - told == {("base", "E306")}
    with (project.parent / "train.tsv").open("a") as file:
        file.write("a fine film\tyes\n")
    assert faults() - told == {("base", "E306"), ("data", "E201")}
    (project.parent / "train.tsv").unlink()
    fault = next(check.fault for check in verify(out / "toy", serve=False) if check.stage == "data")
    assert fault.endswith("is gone. Restore it, or run the pipeline again where its data are now: what is finished is kept")


@pytest.mark.parametrize(("value", "grain", "same"), [(0.864, 0.001, True), (0.87, 0.001, False), (0.87, 0.01, True)])
def test_a_quality_is_the_recorded_one_within_half_a_point_or_one_answer(value, grain, same):
    with nullcontext() if same else pytest.raises(CheckError, match=r"E613 accuracy 0\.8700, recorded 0\.8600"):
        require_quality("accuracy", value, 0.86, grain)


def test_an_artifact_of_another_kind_is_not_that_of_the_run(project, out):
    go(project, out)
    run = open_run(out / "toy")
    for stage in run.lock["stages"]:
        assert run.artifact(stage).entry == stage["id"]
        with pytest.raises(UserError, match=r"E803 .* does not match its artifact"):
            run.artifact({**stage, "kind": "other"})


def test_a_run_is_opened_through_a_link_and_from_inside(project, out, tmp_path, monkeypatch):
    run = go(project, out).folder
    (tmp_path / "latest").symlink_to(run)
    monkeypatch.chdir(run / "logs")
    for place in (run, tmp_path / "latest", Path("..")):
        finished = open_run(place)
        assert [finished.verify(stage).entry for stage in finished.lock["stages"]] == ["select", "tune", "prune", "report"]
    moved = run.rename(tmp_path / "other_disk")
    run.symlink_to(moved)
    assert open_run(run).store.root == out / ".store"


def test_what_is_verified_is_not_replaced_meanwhile(project, out, monkeypatch):
    """`--force` in another run waits for it, and a store that cannot be written is read all the same."""
    run = open_run(go(project, out).folder)
    row = run.lock["stages"][1]

    def replace() -> None:
        with run.store.making(row["stage"], row["fingerprint"], lambda pid: None) as work:
            run.store.publish(work, row["stage"], row["fingerprint"], "model", {})

    tried = []

    def checked(self, stage):
        with pytest.raises(Locked):
            replace()
        tried.append(stage["id"])

    with monkeypatch.context() as patch:
        patch.setattr(FinishedRun, "verify", checked)
        verify(run.folder, serve=False)
    assert "tune" in tried
    with monkeypatch.context() as patch:
        patch.setattr(Store, "in_use", lambda *_: shared_lock(out / "no_folder" / "file"))
        with run.in_use():
            replace()
    with monkeypatch.context() as patch:  # a file system without locks
        patch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
        with run.in_use():
            pass


def test_what_is_served_or_deployed_is_not_replaced_while_it_is_read(project, out, monkeypatch):
    toys.replace(monkeypatch, "report", produces="repository")
    run = open_run(go(project, out).folder)
    row = run.lock["stages"][-1]

    def replace() -> None:
        with run.store.making(row["stage"], row["fingerprint"], lambda pid: None) as work:
            run.store.publish(work, row["stage"], row["fingerprint"], row["kind"], {})

    with monkeypatch.context() as patch, repository_in_use(run.folder) as served:
        assert served.logs == run.folder / "logs"
        patch.setattr(os, "access", lambda path, mode: False)  # another user's run, or on a read-only disk
        assert find_repository(run.folder).logs == log_folder()
    (run.folder / "tuned").mkdir()
    (run.folder / "tuned" / "config.pbtxt").touch()  # compress loadtest . MODEL --tune, in this folder
    with repository_in_use(run.folder) as served:
        assert served.run == run.folder
        with pytest.raises(Locked):
            replace()
    replace()


def test_what_is_served_is_kept_in_its_store_and_may_be_replaced(project, out, monkeypatch):
    """For as long as it is served, and also where its folder is given in place of the run's."""
    toys.replace(monkeypatch, "report", produces="repository")
    run = open_run(go(project, out).folder)
    row = run.lock["stages"][-1]
    kept = served_lock(out / ".store", row["artifact"])
    with kept_while_served(out / ".store" / row["artifact"] / "repository"):
        run.store.sweep()
        with pytest.raises(Locked), lock(kept):
            pass
        with run.store.making(row["stage"], row["fingerprint"], lambda pid: None) as work:
            run.store.publish(work, row["stage"], row["fingerprint"], row["kind"], {})
    assert not kept.exists()
    kept.touch()  # as a killed server leaves it
    run.store.sweep()
    assert not kept.exists()
    with kept_while_served(project.parent):  # a repository of no store
        pass
    # as in a store on a read-only disk
    monkeypatch.setattr("pipelines.runs.served.served_lock", lambda *_: out / "no_folder" / "file")
    with kept_while_served(out / ".store" / row["artifact"] / "repository"):
        pass


def test_a_sweep_tells_failed_checks_behind_its_table(project, out, monkeypatch):
    quality = {"quality": {"accuracy": 0.5}, "failures": [FAILURE]}
    toys.replace(monkeypatch, "tune", run=proving(**quality))
    found = sweep(project, SweepPlan(seeds=2), out, until="tune", say=lambda text: None)
    assert [(one["stage"], one["trial"]) for one in found.failures] == [("tune", "seed-0"), ("tune", "seed-1")]
    assert found.rows and (found.folder / "sweep.md").is_file()


def test_a_full_stop_of_run_json_hides_no_error(project, out, monkeypatch, compress):
    """Where not even run.json can be written, the error is told all the same."""
    from pipelines.engine import results

    def full(folder, facts):
        if facts["status"] == "failed":
            raise OSError(28, "No space left on device")
        written(folder, facts)

    written = results.write_attempt
    monkeypatch.setattr(results, "write_attempt", full)
    out.mkdir()
    (out / "trouble-tune").write_text("user_error")
    code, _, error = compress("run", project, "--out", out)
    assert code == 2 and error.startswith("E501") and len(error.splitlines()) == 1


def test_equal_stores_whether_or_not_attempts_failed_before(project, tmp_path):
    whole = tree(go(project, tmp_path / "whole").folder.parent / ".store")
    for trouble in ("bug", "full_disk", "check_error"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "trouble-prune").write_text(trouble)
        with pytest.raises(Exception, match=r"E\d{3}"):
            go(project, tmp_path / "out")
    (tmp_path / "out" / "trouble-prune").unlink()
    go(project, tmp_path / "out")
    assert tree(tmp_path / "out" / ".store") == whole


def test_what_a_merge_copied_of_the_base_is_verified(tmp_path):
    stages = [{"tune": {"method": "bitfit", "steps": 1}}, {"merge": None}]
    path, settings = write_pipeline(tmp_path, stages=stages, rows=8), tmp_path / "model/generation_config.json"
    settings.write_text('{"repetition_penalty": 1.2}')
    chat = settings.with_name("chat_template.jinja")
    chat.write_text("{{ messages }}")
    run_pipeline(load_pipeline(path), tmp_path / "out")

    def faults():
        return [check.fault[:33] for check in verify(tmp_path / "out/tiny", serve=False) if not check.passed]

    assert faults() == []
    chat.write_text("{{ other }}")
    (fault,) = faults()
    assert fault.startswith("E612 its chat_template.jinja: ")
    chat.write_text("{{ messages }}")
    settings.write_text('{"repetition_penalty": 1.5}')
    assert faults() == ["E612 its generation_config.json: "]
    settings.unlink()
    assert faults() == ["E612 its generation_config.json: "]
