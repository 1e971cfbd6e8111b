"""What the runner promises: reuse, atomic publish, locks, quiet, and the same store however often it is killed."""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from compressor.account import Plan
from compressor.cost import LayerShape, ModelShape
from compressor.errors import CheckError, CompressError, UserError
from pipelines.engine import stage_inputs
from pipelines.engine.environment import accelerator
from pipelines.engine.preflight import check_environment, server_fault
from pipelines.engine.runner import IN_USE, prepare, run_pipeline, settle
from pipelines.engine.stage import Artifact, Entry, Stage, dense_of, load_stage
from pipelines.engine.stage_inputs import fingerprint_of
from pipelines.engine.store import KEEP_UNFINISHED, Store, lock, shared_lock
from pipelines.file.config import load_pipeline
from pipelines.runs.finished import open_run
from pipelines.stages.benchmark.config import BenchmarkConfig
from pipelines.stages.deploy.config import DeployConfig
from serving import shared_memory
from tests.foreign import for_reading_alone
from tests.pipelines import toys
from tests.pipelines.processes import start, until, wait
from tests.pipelines.toys import tree
from tests.tiny import write_pipeline

IDS = ("select", "tune", "prune", "report")


def calls(out):
    """The stages that really ran since the last look."""
    path = out / "calls"
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def go(project, out, *overrides, **options):
    return run_pipeline(load_pipeline(project, overrides), out, **options)


def test_a_second_run_reuses_everything_and_changes_nothing(project, out):
    first = go(project, out)
    assert (calls(out), first.reused) == (list(IDS), ())
    before = tree(out / ".store")
    second = go(project, out)
    assert (calls(out), second.reused) == ([], IDS)
    assert tree(out / ".store") == before
    assert first.report == out / "toy" / "report.json"
    assert sorted(path.name for path in (out / "toy").iterdir()) == ["logs", "pipeline.lock.yaml", "report.json", "run.json"]


def test_two_folders_get_equal_bytes(project, tmp_path):
    stores = [tree(go(project, tmp_path / name).folder.parent / ".store") for name in ("first", "second")]
    assert stores[0] == stores[1]
    assert str(tmp_path).encode() not in b"".join(stores[0].values())


def test_the_lock_file_names_every_artifact(project, out):
    began = time.monotonic()
    result = go(project, out, "seed=3")
    took = time.monotonic() - began
    lock = yaml.safe_load((out / "toy" / "pipeline.lock.yaml").read_text())
    assert (lock["seed"], lock["model"]["reference"], len(lock["data"])) == (3, "./model", 2)
    assert [stage["artifact"] for stage in lock["stages"]] == [result.artifacts[name].id for name in IDS]
    for stage in lock["stages"]:
        assert Store(out / ".store").find(stage["stage"], stage["fingerprint"], stage["id"]).files == stage["files"]
    facts = json.loads((out / "toy" / "run.json").read_text())
    assert facts["status"] == "done" and facts["machine"]["memory_bytes"] > 0 and 0 < facts["seconds"] <= took
    assert [stage["id"] for stage in facts["stages"]] == list(IDS)


def test_memory_that_will_not_do_is_told_before_the_first_stage(project, out, monkeypatch, compress):
    """On stderr, once, and it stops nothing; nor is it said where nothing is to be made."""
    shape = ModelShape(32, (LayerShape(4, 8, 24),), other=1000, head=66, head_macs=64)
    monkeypatch.setattr("pipelines.engine.runner.make_plans", lambda ready: [Plan(shape, shape, None)] * len(IDS))
    monkeypatch.setattr("pipelines.check.estimate.free_memory", lambda: 10**9)
    monkeypatch.setattr("pipelines.check.estimate.resident_memory", lambda: 0)
    line = "warning: about 1.20 GB of memory are needed, 1.00 GB are free\n"
    for more, made in ((["--dry-run"], []), ([], list(IDS))):
        code, _, error = compress("run", project, "--out", out, *more)
        assert (code, error, calls(out)) == (0, line, made)
    for more in ([], ["--dry-run"]):
        code, _, error = compress("run", project, "--out", out, *more)
        assert (code, error, calls(out)) == (0, "", [])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_stage_computes_with_the_threads_of_its_run(threads):
    """They are in its fingerprint."""
    before = torch.get_num_threads()
    settle(load_stage("tune"), 0, threads)
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == threads


def test_memory_is_released_after_every_stage_that_ran(project, out, monkeypatch):
    released = []
    monkeypatch.setattr("pipelines.engine.runner.release_memory", released.append)
    monkeypatch.setattr("pipelines.engine.runner.resident_memory", lambda: 5)
    for _ in range(2):
        go(project, out)
        assert released == [5] * len(IDS)


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("prune.text=y", ["prune", "report"]),
        ("tune.files=3", ["tune", "prune", "report"]),
        ("seed=1", list(IDS)),
        ("threads=2", list(IDS)),
        ("task.max_length=64", list(IDS)),
        ("name=other", ["report"]),
        ("prune.id=cut", ["report"]),  # only what sees the names
    ],
)
def test_only_what_changed_runs_again(project, out, change, again):
    go(project, out)
    calls(out)
    go(project, out, change)
    assert calls(out) == again


@pytest.mark.parametrize(
    "says",
    [
        {"version": 2},
        {"extras": lambda config: ("rich",)},
        {"surroundings": lambda config: {"card": 1}},
    ],
    ids=lambda says: next(iter(says)),
)
def test_what_a_stage_says_of_itself_makes_it_again(project, out, monkeypatch, says):
    go(project, out)
    calls(out)
    toys.replace(monkeypatch, "tune", **says)
    go(project, out)
    assert calls(out) == ["tune", "report"]


@pytest.mark.parametrize(
    ("name", "found", "traits"),
    [
        ("scored_by", lambda tasks: {"sacrebleu": "9"}, {"scores_tests": True}),
        ("scored_by", lambda tasks: {"sacrebleu": "9"}, {"scores_texts": True}),
        ("launched", lambda: 2, {"trains": True}),
        ("further_ends", lambda folder: [7], {}),
    ],
    ids=["metrics of test files", "metrics of texts", "processes", "ends of texts"],
)
def test_what_affects_some_stages_is_in_their_fingerprints_alone(project, out, monkeypatch, name, found, traits):
    """Ends of texts are in those of every stage of a task that generates, the others where the stage has that trait."""
    toys.replace(monkeypatch, "tune", **traits)
    toys.replace(monkeypatch, "select", **dict.fromkeys(traits, False))
    if name == "further_ends":
        monkeypatch.setattr(stage_inputs, "kind_of", lambda kind: SimpleNamespace(generates=True))
    run = prepare(load_pipeline(project), out)
    before = [fingerprint_of(run, number, ()) for number in (1, 0)]
    monkeypatch.setattr(stage_inputs, name, found)
    after = [fingerprint_of(run, number, ()) for number in (1, 0)]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, name == "further_ends"]


def test_another_python_makes_everything_again(project, out, monkeypatch):
    go(project, out)
    monkeypatch.setattr("pipelines.engine.stage_inputs.sys", SimpleNamespace(version_info=(3, 99)))
    assert go(project, out).reused == ()


def test_a_graphics_card_decides_what_torch_computes(project, out, monkeypatch):
    monkeypatch.setattr("pipelines.engine.stage_inputs.accelerator", lambda: None)
    toys.replace(monkeypatch, "tune", packages=("click", "torch"))
    go(project, out)
    calls(out)
    monkeypatch.setattr("pipelines.engine.stage_inputs.accelerator", lambda: "NVIDIA H200")
    go(project, out)
    assert calls(out) == ["tune", "report"]  # it made the same here, so what follows is reused: the report names it


def test_the_driver_and_torch_name_the_same_card():
    if accelerator() and not torch.version.cuda:
        pytest.skip("a card, and a torch that cannot use it")
    assert accelerator() == (torch.cuda.get_device_name(0) if torch.cuda.is_available() else None)


def test_data_decides_the_stages_that_read_it(project, out):
    go(project, out)
    calls(out)
    with (project.parent / "train.tsv").open("a") as file:
        file.write("a fine film\tyes\n")
    go(project, out)
    assert calls(out) == ["tune", "prune", "report"]


def test_the_files_place_does_not_matter(project, out, tmp_path):
    go(project, out)
    calls(out)
    moved = project.parent.rename(tmp_path / "moved")
    go(moved / "pipeline.yaml", out)
    assert calls(out) == []


AGAIN = """
import sys
from pathlib import Path
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
pipeline, out = map(Path, sys.argv[1:])
done = run_pipeline(load_pipeline(pipeline), out, until="select")
assert done.reused == ("select",), done.reused
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_a_run_that_reuses_everything_imports_no_torch(tmp_path):
    """Nothing is planned."""
    stages = [{"select": {"count": 4}}, {"tune": {"method": "dsee"}}]
    pipeline, out = write_pipeline(tmp_path / "project", stages=stages, rows=8), tmp_path / "runs"
    run_pipeline(load_pipeline(pipeline), out, until="select")
    subprocess.run([sys.executable, "-c", AGAIN, str(pipeline), str(out)], check=True, timeout=100)


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_what_a_merge_copies_of_the_base_decides_it(name, project, out, monkeypatch):
    """It is no part of the base's sha256: a delta fits the base whatever stands there."""
    merge = Stage("merge", "", toys.ToyConfig, "model", toys.RUN, needs=("model",), packages=("click",), merges=True)
    toys.add(monkeypatch, merge)
    project.write_text(project.read_text().replace("  - report", "  - merge:\n  - report"))
    made = []
    for penalty in (None, 1.2, 1.2, 1.5):
        if penalty:
            (project.parent / "model" / name).write_text(json.dumps({"repetition_penalty": penalty}))
        go(project, out)
        made.append(calls(out))
    assert made == [[*IDS[:3], "merge", "report"], ["merge", "report"], [], ["merge", "report"]]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"from_": "prune"}, ["prune", "report"]),
        ({"until": "tune"}, []),
        ({"force": ["tune"]}, ["tune"]),  # what it made is equal, so what follows is reused
        ({"force": ["select", "report"]}, ["select", "report"]),
        ({"from_": "select", "until": "tune"}, ["select", "tune"]),
    ],
)
def test_from_until_and_force(project, out, options, again):
    go(project, out)
    before = tree(out / ".store")
    calls(out)
    result = go(project, out, **options)
    assert calls(out) == again
    assert list(result.artifacts) == list(IDS[: 2 if "until" in options else 4])
    assert tree(out / ".store") == before


def test_two_stages_that_do_the_same_are_made_once_forced_or_not(project, out):
    """The second would wait forever for the first, which uses what it is to replace."""
    project.write_text(project.read_text().replace("  - report", "  - deploy:\n  - deploy: {id: again}\n  - report"))
    assert go(project, out).reused == ("again",)
    calls(out)
    assert go(project, out, from_="deploy").reused == ("select", "tune", "prune", "again")
    assert calls(out) == ["deploy", "report"]
    assert go(project, out, force=["again"]).reused == ("select", "tune", "prune", "deploy", "again", "report")


def test_what_another_run_made_again_is_told_and_then_taken(project, out, monkeypatch):
    numbers = itertools.count()
    toys.replace(monkeypatch, "prune", run=lambda config, inputs, workspace: {"measured": next(numbers)})
    go(project, out)
    go(project, out, "name=other", force=["prune"])

    def stored():
        run = open_run(out / "toy")
        return run.recorded(next(stage for stage in run.lock["stages"] if stage["id"] == "prune"))

    with pytest.raises(UserError, match=r"E803 .*is not that of this run: it was made again \(--force in another run\)"):
        stored()
    go(project, out)
    assert stored().metadata["measured"] == 1


def test_a_report_names_the_artifacts_of_this_run(project, out, monkeypatch):
    """A stage that is made again, of equal bytes, has another: those behind it are reused, but for the report."""
    go(project, out)
    toys.replace(monkeypatch, "tune", version=2)
    again = go(project, out)
    assert again.reused == ("select", "prune")
    given = json.loads((again.artifacts["report"].folder / "report.json").read_text())["run"]
    assert given["artifacts"] == [again.artifacts[name].id for name in IDS[:3]]


@pytest.mark.parametrize(
    ("name", "renamed", "reused"),
    [("train.tsv", "renamed.tsv", IDS[:3]), ("./model", "./bert", IDS[:3]), ("train.tsv", "train.csv", IDS[:1])],
)
def test_a_report_names_the_files_and_the_model_of_this_run(project, out, name, renamed, reused):
    """Equal content under another name: all but the report is reused. Under another ending it is read in another way."""
    go(project, out)
    (project.parent / name).rename(project.parent / renamed)
    project.write_text(project.read_text().replace(name, renamed))
    assert go(project, out).reused == reused


def test_a_stage_that_computes_on_a_gpu_needs_one_before_anything_runs(project, out, monkeypatch):
    toys.replace(monkeypatch, "deploy", device=lambda config: "cuda")
    monkeypatch.setattr("pipelines.engine.preflight.accelerator", lambda: None)
    project.write_text(project.read_text().replace("  - report", "  - deploy:\n  - report"))
    with pytest.raises(UserError, match="E904 stage 'deploy' computes on CUDA, and no GPU is offered here"):
        go(project, out)
    assert calls(out) == [] and not (out / "toy").exists()


def test_a_benchmark_on_a_gpu_needs_a_torch_that_finds_it(monkeypatch):
    """The driver and ONNX Runtime may offer one to a build of torch for the CPU."""
    monkeypatch.setattr("pipelines.engine.preflight.accelerator", lambda: "a card")
    monkeypatch.setattr("pipelines.engine.preflight.DEFAULT", SimpleNamespace(offers=lambda device: True, title="ONNX Runtime"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    entry = Entry("benchmark", "benchmark", BenchmarkConfig(device="cuda"))
    with pytest.raises(UserError, match="E904 stage 'benchmark' times the dense model in PyTorch on CUDA, and the torch"):
        check_environment([entry])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_environment([entry])


@pytest.mark.skipif(find_spec("pytriton") is None, reason="nvidia-pytriton is not installed")
def test_too_little_shared_memory_for_the_server_is_told_before_a_run(monkeypatch):
    """A small /dev/shm (Docker's default is 64 MiB) would end the run at the deploy, after the training."""
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=1024, f_frsize=4096))
    told = r"E739 stage 'deploy' starts a server: /dev/shm has 4\.0 MiB free.*--shm-size=256m"
    with pytest.raises(UserError, match=told) as error:
        check_environment([Entry("deploy", "deploy", DeployConfig())])
    assert "--max-body" not in str(error.value), "an option of `compress serve`"


@pytest.mark.skipif(find_spec("pytriton") is None, reason="nvidia-pytriton is not installed")
@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({}, 16 + 2 * 2),
        ({"interfaces": ["text"]}, 16 + 2),
        ({"instances": 8}, 16 + 2 * 2 * 8),
        ({"runtime": "onnxruntime"}, 16 + 2 * 2 * 2),
    ],
)
def test_shared_memory_is_needed_for_every_process_of_a_model(monkeypatch, config, needed):
    """Two models of two instances each, where the runtime is known; at least one each, where it is not."""
    for pages, fits in ((needed * 256 - 1, False), (needed * 256, True)):
        monkeypatch.setattr("os.statvfs", lambda path, pages=pages: SimpleNamespace(f_bavail=pages, f_frsize=4096))
        fault = nullcontext() if fits else pytest.raises(UserError, match=f"these models need {needed} MiB")
        with fault:
            check_environment([Entry("deploy", "deploy", DeployConfig(**config))])


@pytest.mark.skipif(find_spec("pytriton") is None, reason="nvidia-pytriton is not installed")
def test_what_a_killed_server_left_in_shared_memory_stops_no_run(tmp_path, monkeypatch):
    """Its deploy would remove it, and no command before that does."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    stage = tmp_path / "folder" / "compress-triton-killed"
    stage.mkdir(parents=True)
    shared_memory.claim(stage).close()
    left = tmp_path / f"{stage.name}-region"
    left.touch()
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=1024 if left.exists() else 16384, f_frsize=4096))
    assert server_fault() is None and not stage.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"from_": "tun"},
        {"until": "x"},
        {"force": ["x"]},
        {"from_": "prune", "until": "tune"},
        {"force": ["tune", "prune"], "until": "tune"},
    ],
)
def test_unknown_stages_in_options_and_those_that_would_not_run_write_nothing(project, out, options):
    with pytest.raises(UserError) as error:
        go(project, out, **options)
    assert error.value.code == "E111"
    assert not out.exists()


def test_a_new_stage_runs_is_reused_and_is_named_in_the_lock_file(project, out, monkeypatch):
    toys.add(monkeypatch, Stage("embed", "", toys.ToyConfig, "embeddings", toys.RUN, needs=("model",), packages=("click",)))
    project.write_text(project.read_text().replace("  - prune:\n", "  - embed:\n  - prune:\n"))
    result = go(project, out)
    assert result.artifacts["embed"].kind == "embeddings" and calls(out) == ["select", "tune", "embed", "prune", "report"]
    assert go(project, out).reused == ("select", "tune", "embed", "prune", "report")
    lock = yaml.safe_load((out / "toy" / "pipeline.lock.yaml").read_text())
    assert [stage["stage"] for stage in lock["stages"]] == ["select", "tune", "embed", "prune", "report"]


def test_a_stage_sees_only_what_it_declares(project, out):
    artifacts = go(project, out).artifacts
    seen = {name: artifacts[name].metadata["given"] for name in IDS}
    assert [one[0] for one in seen["tune"]["artifacts"]] == ["omega"]
    assert [one[1] for one in seen["prune"]["artifacts"]] == ["tune"]
    assert [one[1] for one in seen["report"]["artifacts"]] == ["select", "tune", "prune"]
    assert seen["prune"]["dense"]["text"] == "x" and seen["report"]["dense"] is None
    told = seen["report"]["run"]
    assert (told["name"], told["stages"]) == ("toy", ["select", "tune", "prune"]) and seen["prune"]["run"] == {}
    assert told["command"] == "compress run pipeline.yaml" and told["product"].startswith("compress-pipeline")


def linked(path: Path) -> None:
    """Move a file out of the store, and put a link to it in its place."""
    path.symlink_to(path.rename(path.parents[4] / "elsewhere"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "deep/er/1.bin").write_bytes(b"y1"), "'deep/er/1.bin' has changed"),
        (lambda folder: (folder / "deep/er/1.bin").write_bytes(b"x"), "'deep/er/1.bin' has 1 bytes instead of 2"),
        (lambda folder: (folder / "deep/er/1.bin").unlink(), "'deep/er/1.bin' is missing"),
        (lambda folder: (folder / "new").touch(), "'new' does not belong there"),
        (lambda folder: (folder / "deep/linked").symlink_to(folder.parent), "'deep/linked' does not belong there"),
        (lambda folder: (folder / "nowhere").symlink_to("none"), "'nowhere' does not belong there"),
        (lambda folder: linked(folder / "deep/er/1.bin"), "'deep/er/1.bin' is a link, which no stage writes"),
        (lambda folder: (folder / "artifact.json").write_text("{"), "'artifact.json' has changed"),
        (lambda folder: (folder / "artifact.json").unlink(), "'artifact.json' is missing"),
        (lambda folder: (folder / "artifact.sha256").unlink(), "'artifact.sha256' is missing"),
        (lambda folder: (folder / "artifact.sha256").write_text("0"), "'artifact.json' has changed, or its seal"),
    ],
)
def test_a_damaged_artifact_is_named_and_force_mends_it(project, out, damage, says):
    before_folder = go(project, out).artifacts["tune"].folder
    before = tree(out / ".store")
    damage(before_folder)
    with pytest.raises(UserError) as error:
        go(project, out)
    assert str(error.value).startswith("E803") and says in str(error.value)
    remedy = "Remove it" if "belong" in says else "Delete this folder"
    assert error.value.fix == f"{remedy}, or run again with --force tune"
    go(project, out, force=["tune"])
    assert tree(out / ".store") == before
    damage(before_folder)
    shutil.rmtree(before_folder)  # the trials of a sweep have no --force
    go(project, out)
    assert tree(out / ".store") == before


@pytest.mark.parametrize(
    ("trouble", "kind", "code", "exit_code"),
    [
        ("user_error", UserError, "E501", 2),
        ("check_error", CheckError, "E601", 3),
        ("full_disk", UserError, "E804", 2),
        ("wrapped_full_disk", UserError, "E804", 2),
        ("denied", UserError, "E801", 2),
        ("full_card", UserError, "E908", 2),
        ("used_card", UserError, "E908", 2),
        ("full_memory", UserError, "E908", 2),
        ("bug", CompressError, "E899", 1),
    ],
)
def test_a_failure_is_never_cached(project, out, trouble, kind, code, exit_code):
    out.mkdir()
    (out / "trouble-tune").write_text(trouble)
    with pytest.raises(kind) as error:
        go(project, out)
    assert (error.value.code, error.value.exit_code) == (code, exit_code)
    assert code not in ("E501", "E908") or f"{project}:7: stages[1].tune" in str(error.value)
    log = (out / "toy" / "logs" / "tune.log").read_text()
    assert ("ZeroDivisionError: a bug of ours" in log) == (code == "E899")
    assert code != "E899" or str(out / "toy" / "logs" / "tune.log") in str(error.value)
    assert json.loads((out / "toy" / "run.json").read_text())["status"] == "failed"
    assert [path.name.split("-")[0] for path in (out / ".store").iterdir()] == ["select"]
    (out / "trouble-tune").unlink()
    assert go(project, out).reused == ("select",)


def test_noise_goes_to_the_stages_log_and_order_to_the_console(project, out, capfd):
    out.mkdir()
    (out / "trouble-tune").write_text("noise")
    go(project, out)
    shown = capfd.readouterr()
    lines = [line.split("done in")[0].rstrip() for line in shown.out.splitlines()]
    assert lines == ["[1/4] select", "[2/4] tune", "[3/4] prune", "[4/4] report"]
    assert shown.err == ""
    log = (out / "toy" / "logs" / "tune.log").read_text()
    sources = ("print", "stderr", "native code", "a child", "logging", "warnings")
    assert [source for source in sources if f"from {source}" not in log] == []
    assert "from" not in (out / "toy" / "logs" / "prune.log").read_text()
    go(project, out)
    assert [line.split()[2] for line in capfd.readouterr().out.splitlines()] == ["reused"] * 4


def test_a_dry_run_writes_nothing(project, out):
    result = go(project, out, dry_run=True)
    assert (result.reused, result.plan) == ((), None)
    assert not out.exists()
    go(project, out)
    before = tree(out)
    assert go(project, out, "prune.text=y", dry_run=True).reused == ("select", "tune")
    assert tree(out) == before


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_goes_on_where_it_was(project, out, tmp_path, number, exit_code):
    out.mkdir()
    (out / "trouble-tune").write_text("hang")
    process = start(tmp_path / "said", go, project, out)
    until(out / "hanging", process)
    with pytest.raises(UserError) as error:
        go(project, out)
    assert error.value.code == "E802" and f"process {process.pid} " in str(error.value)
    os.kill(process.pid, number)
    assert wait(process) == exit_code
    said = (tmp_path / "said").read_text()
    assert f"Stopped by {number.name}: 1 of 4 stages are finished and kept. The same command continues." in said
    assert [path.name.split("-")[0] for path in (out / ".store").iterdir()] == ["select"]
    assert json.loads((out / "toy" / "run.json").read_text())["status"] == "stopped"
    (out / "trouble-tune").unlink()
    assert go(project, out).reused == ("select",)


def test_two_runs_that_share_a_store_make_each_artifact_once(project, out, tmp_path):
    out.mkdir()
    (out / "trouble-tune").write_text("hang")
    process = start(tmp_path / "said", go, project, out)
    until(out / "hanging", process)
    said = tmp_path / "said-by-other"
    other = start(said, go, project, out, "name=other")
    until(said, other, f"waiting for process {process.pid}")
    for used in (out / ".store").glob(".used-tune-*"):
        with lock(used):  # a third, forced one that had its turn first would wait for both of them, and the second for it
            pass
    (out / "trouble-tune").unlink()
    assert wait(process) == wait(other) == 0
    assert sorted(calls(out)) == sorted([*IDS, "report"])
    records = json.loads((out / "other" / "run.json").read_text())["stages"]
    assert [record["reused"] for record in records[:2]] == [True, True], "what another process made was waited for"


def test_an_artifact_that_another_run_uses_is_not_replaced_before_its_end(project, out, tmp_path):
    out.mkdir()
    (out / "trouble-prune").write_text("hang")
    process = start(tmp_path / "said", go, project, out)
    until(out / "hanging", process)
    said = tmp_path / "said-by-other"
    [made] = (out / ".store").glob("tune-*")
    before = made.stat().st_ino
    other = start(said, go, project, out, "name=other", force=["tune"], until="tune")
    until(said, other, IN_USE)
    assert made.stat().st_ino == before
    (out / "trouble-prune").unlink()
    assert wait(process) == wait(other) == 0
    assert made.stat().st_ino != before and calls(out).count("tune") == 2
    assert not [*(out / ".store").glob(".*")]


def watch(out, report):
    """Call `report` before every file-system operation below `out`, for the rest of this process's life."""

    def hook(event, arguments):
        if arguments and isinstance(arguments[0], str | os.PathLike) and os.fspath(arguments[0]).startswith(str(out)):
            report()

    sys.addaudithook(hook)


def go_until(moment, project, out):
    """A run that SIGKILLs itself before its file-system operation number `moment`."""
    left = iter(range(moment, -1, -1))
    watch(out, lambda: next(left) or os.kill(os.getpid(), signal.SIGKILL))
    go(project, out)


def go_counting(count, project, out):
    """A run that writes a dot to the file `count` for every file-system operation."""
    watch(out, lambda: count.open("a").write("."))
    go(project, out)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_run_ends_in_the_same_bytes(project, tmp_path, kills):
    go(project, tmp_path / "whole")
    expected, count, said = tree(tmp_path / "whole" / ".store"), tmp_path / "count", tmp_path / "said"
    assert wait(start(said, go_counting, count, project, tmp_path / "counted")) == 0
    operations = count.stat().st_size
    assert operations > 200
    interrupted = set()
    for moment in sorted(random.Random(0).sample(range(1, operations), kills)):
        folder = tmp_path / f"killed-{moment}"
        assert wait(start(said, go_until, moment, project, folder)) == -signal.SIGKILL
        finished = [path.name.split("-")[0] for path in sorted((folder / ".store").glob("[!.]*"))]
        result = go(project, folder)
        assert sorted(result.reused) == finished
        assert tree(folder / ".store") == expected
        interrupted.add(len(finished))
    assert len(interrupted) > 2, "the moments fall into different stages"


def test_what_another_run_publishes_meanwhile_does_not_end_this_one(tmp_path, monkeypatch):
    """Its unfinished training is gone between the look into the store and the look at its age."""
    store, gone = Store(tmp_path), tmp_path / ".unfinished-tune-0"
    monkeypatch.setattr(type(tmp_path), "glob", lambda _, pattern: [gone] if pattern.startswith(".unfinished") else [])
    store.sweep()


@pytest.mark.parametrize("left", ["used", "lock"])
def test_a_lock_file_of_another_user_ends_no_run(project, out, monkeypatch, left):
    """Whose killed run left it, or whose run holds an artifact; also where it cannot be removed."""
    made = go(project, out).artifacts["tune"].folder
    path = out / ".store" / f".{left}-{made.name}"
    path.write_text("4711")
    for_reading_alone(monkeypatch, path)
    if left == "used":
        with shared_lock(path):
            assert go(project, out).reused == IDS
    assert go(project, out, force=["tune"]).reused == ("select", "prune", "report")
    unlink = type(path).unlink

    def denied(self, missing_ok=False):
        if self == path:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(self, missing_ok)

    monkeypatch.setattr(type(path), "unlink", denied)
    path.touch()
    assert go(project, out, force=["tune"]).reused == ("select", "prune", "report")


def test_a_folder_that_cannot_be_written_is_told_before_the_plan_which_imports_torch(project, out, monkeypatch):
    monkeypatch.setattr("pipelines.engine.runner.make_plans", lambda *_: pytest.fail("a plan is made"))
    out.touch()
    with pytest.raises(UserError, match=r"E801 .*: a file, where a folder is needed"):
        go(project, out)


def test_a_folder_that_another_users_killed_run_left_is_told_where_it_is_needed(project, out, monkeypatch):
    made, remove = go(project, out).artifacts["tune"].folder, shutil.rmtree
    left = out / ".store" / f".work-{made.name}"
    left.mkdir()

    def denied(path, *arguments, **options):
        if path == left:
            raise PermissionError(errno.EACCES, "Permission denied", str(left))
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", denied)
    assert go(project, out).reused == IDS
    with pytest.raises(UserError, match=rf"E801 {left}: cannot be written"):
        go(project, out, force=["tune"])


def test_checkpoints_stay_for_a_week_after_the_last_of_them(tmp_path):
    """Whenever their training began: the folder of a recovery does not change while its control is trained below it."""
    past = time.time() - KEEP_UNFINISHED - 60
    for name, newest in (("recover-0", past), ("recover-1", past + 120)):
        folder = tmp_path / f".unfinished-{name}"
        checkpoint = folder / "control" / "checkpoint-8" / "state.json"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.touch()
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (past, newest if path == checkpoint else past))
    Store(tmp_path).sweep()
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-recover-1"]


@pytest.mark.parametrize("again", [(), ["tune"]])
def test_a_run_leaves_the_checkpoints_that_it_resumes_however_old(project, out, monkeypatch, again):
    """Behind stages that are reused, and of one that is forced; those of other runs go."""
    if again:
        go(project, out)
    store, past, found = Store(out / ".store"), time.time() - KEEP_UNFINISHED - 60, []
    mark = fingerprint_of(prepare(load_pipeline(project), out), 1, [*go(project, out, until="select").artifacts.values()])
    resumed, other = store.unfinished("tune", mark), store.unfinished("tune", "0" * 64)
    for folder in (resumed, other):
        (folder / "checkpoint-8").mkdir(parents=True)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (past, past))

    def resume(config, inputs, workspace):
        found.extend(path.name for path in workspace.unfinished.iterdir())
        return toys.run(config, inputs, workspace)

    toys.replace(monkeypatch, "tune", run=resume)
    go(project, out, force=again)
    assert found == ["checkpoint-8"] and not other.exists()


@pytest.mark.parametrize(
    ("stages", "dense"),
    [
        ("select tune prune recover merge", "tune"),
        ("tune prune select recover prune recover merge", "tune"),
        ("tune recover prune recover", "recover"),  # trained on before anything is removed
        ("tune recover merge", "recover"),
        ("select", None),
    ],
)
def test_dense_is_the_last_model_trained_before_anything_is_removed(stages, dense, tmp_path):
    artifacts = [Artifact(tmp_path, str(number), "", name, name, {}, {}) for number, name in enumerate(stages.split())]
    found = dense_of(artifacts)
    assert (found and found.stage) == dense
    assert found is None or int(found.id) == stages.split().index(dense)
