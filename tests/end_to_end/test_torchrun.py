"""A pipeline in two processes of torchrun: the same result as in one, one set of artifacts, one voice, one end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.tiny import write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8, "dropout": False}
STAGES = [
    {"select": {"score": "magnitude", "scope": "matrix", "count": 8, "modules": ["query", "value"]}},
    {"tune": {"method": "dsee", "rank": 2, "epochs": 3, "keep_best": True, "evaluate_every": 4, **FAST}},
    {"prune": [{"structure": "heads", "criterion": "random", "remove": 1}]},
    {"recover": {"method": "lora", "rank": 2, "epochs": 1, "distill": "logits", **FAST}},
    {"merge": {}},
    {"export": {"precision": ["fp32"]}},
]
ROWS = 45
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pipelines.cli"]
ALONE = [sys.executable, "-m", "pipelines.cli"]


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}


def call(launcher: list, *arguments: object) -> subprocess.CompletedProcess:
    command = [*launcher, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


def artifacts(out: Path) -> dict[str, dict]:
    """stage -> manifest and folder of everything in the store, each stage once."""
    store = out / ".store"
    folders = [path for path in store.iterdir() if not path.name.startswith(".")]
    made = {
        folder.name.split("-")[0]: {**json.loads((folder / "artifact.json").read_text()), "at": folder} for folder in folders
    }
    assert len(made) == len(folders), "one set"
    assert not [path for path in store.iterdir() if path.name.startswith((".work", ".unfinished", ".lock"))]
    return made


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("project"), stages=STAGES, rows=ROWS)


@pytest.mark.slow
def test_two_processes_are_one(pipeline, tmp_path):
    done = call(TORCHRUN, "run", pipeline, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    alone = call(ALONE, "run", pipeline, "--out", tmp_path / "one")
    assert alone.returncode == 0, alone.stderr
    said = [[line.split("done")[0] for line in run.stdout.splitlines() if "done in" in line] for run in (done, alone)]
    assert said[0] == said[1] and len(said[0]) == len(STAGES), "one voice"
    two, one = artifacts(tmp_path / "two"), artifacts(tmp_path / "one")
    assert two.keys() == one.keys()
    for stage in ("tune", "recover"):
        assert two[stage]["fingerprint"] != one[stage]["fingerprint"]
        assert two[stage]["metadata"]["quality"] == one[stage]["metadata"]["quality"]
        losses = [[step["loss"] for step in made[stage]["metadata"]["losses"]] for made in (one, two)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)
        files = [name for name in one[stage]["files"] if name.endswith(".safetensors") and "predicted" not in name]
        assert any(name.startswith("control/") for name in files) == (stage == "recover")
        for name in files:
            expected, values = load_file(one[stage]["at"] / name), load_file(two[stage]["at"] / name)
            assert expected.keys() == values.keys()
            assert all(values[key] == pytest.approx(expected[key], abs=1e-5) for key in expected), name
    assert two["select"]["fingerprint"] == one["select"]["fingerprint"], "the threads of all other stages are the same"
    again = call(TORCHRUN, "run", pipeline, "--out", tmp_path / "two")
    assert again.returncode == 0 and again.stdout.count("reused") == len(STAGES)


LONG = ["--set", "tune.epochs=500", "--set", "tune.evaluate_every=1000", "--until", "tune"]


@pytest.mark.slow
def test_an_interruption_ends_all(pipeline, tmp_path):
    """Ctrl-C comes twice: from the terminal, and from torchrun."""
    command = [*TORCHRUN, "run", str(pipeline), "--out", str(tmp_path), *LONG]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    log, deadline = tmp_path / "tiny" / "logs" / "tune.log", time.monotonic() + 120
    while not log.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    time.sleep(4.0)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "Stopped by SIGINT: 1 of 2 stages are finished" in said
    assert json.loads((tmp_path / "tiny" / "run.json").read_text())["status"] == "stopped"
    assert not [*(tmp_path / ".store").glob(".work*"), *(tmp_path / ".store").glob(".lock*"), *tmp_path.glob("tiny/run.lock")]


FAILING = """\
import sys
from compressor.training import processes
from compressor.training.trainer import TaskTrainer
from pipelines.cli.commands import main

compute, calls = TaskTrainer.compute_loss, []

def fail(self, *arguments, **options):
    calls.append(1)
    if processes.helping() and len(calls) == 3:
        raise MemoryError("nothing left here")
    return compute(self, *arguments, **options)

TaskTrainer.compute_loss = fail
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_process_that_fails_is_reported_by_the_first(pipeline, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = call([*TORCHRUN[:-2], str(script)], "run", pipeline, "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("E899 process 1 failed while training (MemoryError: nothing left here)") == 1
    assert "nothing left here" in (tmp_path / "tiny" / "logs" / "process-1.log").read_text()
    assert json.loads((tmp_path / "tiny" / "run.json").read_text())["error"]["code"] == "E899"


@pytest.mark.slow
def test_other_commands_run_in_one_process(pipeline, tmp_path):
    done = call(TORCHRUN, "check", pipeline)
    assert done.returncode == 1 and done.stderr.count("E906 compress check runs in one process") == 1 and done.stdout == ""
