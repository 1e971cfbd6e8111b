"""24 real trials on two workers: killed and resumed, shared stages run once, and a node that joins a cluster takes trials.
Toy trials whose worker or node is lost.

Ray runs in processes of its own: its client would reach this machine by another address than loopback.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.sweeps.sweep_files import FILES
from tests.tiny import write_pipeline

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'compress-pipeline[sweep]'"
)
STAGES = [
    {"select": {"score": "rpca", "scope": "matrix", "count": 16, "modules": ["query", "value"]}},
    # long enough for a trial to be found in its training
    {"tune": {"method": "dsee", "rank": 2, "epochs": 6, "learning_rate": 1e-2}},
]
PLAN = ("--over", "tune.rank=1,2,3,4", "--over", "tune.learning_rate=0.01,0.02", "--subsets", "3", "--threads", "1")
"""24 trials that share one select: it does not read the rows, so two workers want it at the same time."""
RAY = ("--engine", "ray", "--workers", "2")
LOCAL = ("--workers", "2")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("project"), stages=STAGES, rows=60)


@pytest.fixture(scope="module")
def undisturbed(project, tmp_path_factory) -> dict[str, bytes]:
    """The files of the sweep, run in turn."""
    out = tmp_path_factory.mktemp("undisturbed")
    process = start(project, out)
    assert process.wait(600) == 0, (out / "said").read_text()
    assert made(out, "select") == 1 and made(out, "tune") == 24
    assert json.loads((out / "tiny-sweep" / "sweep.json").read_text())["artifacts"] == {"select": 1, "tune": 24}
    return files(out)


def start(project: Path, out: Path, *options: str) -> subprocess.Popen:
    """The command in a process of its own, what it says in `out`/said."""
    command = [sys.executable, "-m", "pipelines.cli", "sweep", project, *PLAN, *options, "--out", out]
    out.mkdir(exist_ok=True)
    with (out / "said").open("w") as said:
        return subprocess.Popen([*map(str, command)], stdout=said, stderr=said)


def files(out: Path) -> dict[str, bytes]:
    return {name: (out / "tiny-sweep" / name).read_bytes() for name in FILES}


def made(out: Path, stage: str) -> int:
    """How many trials ran a stage themselves: each leaves its log."""
    return len(list((out / "tiny-sweep").glob(f"*/logs/{stage}.log")))


def finished(out: Path) -> int:
    return len(list((out / ".store").glob("tune-*")))


def wait_for(found, process: subprocess.Popen, out: Path):
    """What `found` returns, once it is something."""
    deadline = time.monotonic() + 300
    while not (value := found()):
        assert process.poll() is None and time.monotonic() < deadline, (out / "said").read_text()
        time.sleep(0.05)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("engine", [LOCAL, pytest.param(RAY, marks=needs_ray)], ids=["local", "ray"])
def test_a_sweep_killed_twice_and_once_a_worker_gives_the_same_bytes(project, undisturbed, tmp_path, engine):
    out = tmp_path / "runs"
    for count in (3, 9):
        process = start(project, out, *engine)
        wait_for(lambda least=count: finished(out) >= least, process, out)
        process.kill()
        process.wait()
        assert finished(out) < 24 and not (out / "tiny-sweep" / "sweep.json").exists()
    process = start(project, out, *engine)
    os.kill(wait_for(lambda: worker_of(process, out), process, out), signal.SIGKILL)
    assert process.wait(600) == 0, (out / "said").read_text()
    said = (out / "said").read_text()
    assert "the trial starts once more" in said and "FAILED" not in said
    assert files(out) == undisturbed
    assert made(out, "select") == 1 and finished(out) == 24
    reused = re.search(r"reused: select 24, tune (\d+)", said)
    assert reused and int(reused[1]) >= 9, said


def worker_of(process: subprocess.Popen, out: Path) -> int | None:
    """The process of a trial that is in its tune, started after `process`: those of a killed sweep may still be ending."""
    for record in (out / "tiny-sweep").glob("*/run.json"):
        state, lock = json.loads(record.read_bytes()), record.with_name("run.lock")
        if (state["status"], state["stage"]) == ("running", "tune") and lock.exists():
            pid = int(lock.read_text() or 0)
            if started(pid) > started(process.pid):
                return pid
    return None


def started(pid: int) -> int:
    """When a process started, in ticks since the boot; 0 where there is none."""
    status = Path(f"/proc/{pid}/stat")
    return int(status.read_text().rpartition(")")[2].split()[19]) if status.exists() else 0


CLUSTER = """
import sys, time, subprocess
from pathlib import Path
from ray.cluster_utils import Cluster
out, command = Path(sys.argv[1]), sys.argv[2:]
node = {"num_cpus": 1, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
try:
    process = subprocess.Popen([*command, "--address", cluster.address])
    while process.poll() is None and len(list((out / ".store").glob("tune-*"))) < 3:
        time.sleep(0.05)
    cluster.add_node(**node)
    sys.exit(process.wait())
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
@needs_ray
def test_a_node_that_joins_takes_trials(project, undisturbed, tmp_path):
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "pipelines.cli", "sweep", project, *PLAN, "--engine", "ray", "--out", out]
    script = [sys.executable, "-c", CLUSTER, out, *command]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([*map(str, script)], capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = re.findall(r"^trial \d+ of 24: .* \(node (\w+), process \d+\)$", done.stdout, flags=re.M)
    assert len(nodes) == 24 and len(set(nodes)) == 2, "both nodes ran trials"
    assert len(set(nodes[:3])) == 1, "the first trials were on the first node"
    assert files(out) == undisturbed and made(out, "select") == 1


@pytest.mark.slow
@needs_ray
def test_a_sweep_on_ray_that_is_stopped_says_so(project, tmp_path):
    out = tmp_path / "runs"
    process = start(project, out, *RAY)
    wait_for(lambda: finished(out), process, out)
    process.terminate()
    assert process.wait(60) == 143
    last = (out / "said").read_text().splitlines()[-1]
    assert re.fullmatch(r"Stopped by SIGTERM: \d+ of 24 trials are finished and kept. The same command continues.", last)


LOSSES = """
import os, re, signal, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from pipelines.engine.invocation import stopping
from pipelines.sweeps.ray_engine import on_ray
from pipelines.sweeps.trial_run import TrialJob, TrialOutcome

def perform(job, console):
    first = job.out / f"{job.name}-started"
    if not first.exists():
        first.touch()
        with stopping():
            console.print("hanging")
            time.sleep(600)
    return TrialOutcome()

def node():
    return cluster.add_node(num_cpus=1, include_dashboard=False)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
try:
    nodes = [node(), node()]
    jobs = [TrialJob(name, None, Path(sys.argv[1]), "", ()) for name in ("stopped", "lost")]
    where = {}
    for event in on_ray(jobs, perform, workers=1, threads=1, address=cluster.address):
        print(event.kind, event.trial, event.text, event.outcome and event.outcome.error, flush=True)
        where |= {event.trial: event.where} if event.kind == "started" else {}
        if event.text == "hanging" and event.trial == "stopped":
            os.kill(int(re.search(r"process (\\d+)", where["stopped"])[1]), signal.SIGTERM)
        if event.text == "hanging" and event.trial == "lost":
            for lost in nodes:
                cluster.remove_node(lost)
            node()
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
@needs_ray
def test_trials_outlive_their_worker_and_their_node(tmp_path):
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    script = [sys.executable, "-c", LOSSES, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "said stopped the worker was stopped; the trial starts once more None" in said
    assert "said lost the worker died (NodeDiedError); the trial starts once more None" in said
    assert "ended stopped  None" in said and "ended lost  None" in said
