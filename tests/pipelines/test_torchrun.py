"""Commands under torchrun: what is refused before anything starts. The runs themselves: tests/end_to_end/test_torchrun.py."""

import json
import signal

import pytest
import torch

from compressor.training import processes
from pipelines.engine.invocation import Stopped
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.pipelines import toys


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables of torchrun."""

    def launch(world: int, here: int, rank: int = 0) -> None:
        names = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here, "RANK": rank, "MASTER_ADDR": "localhost"}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.mark.parametrize(
    ("command", "world", "here", "cards", "said"),
    [
        ("check", 2, 2, 0, "E906 compress check runs in one process"),
        ("deploy --to x", 2, 2, 0, "E906 compress deploy runs in one process"),
        ("delta info", 2, 2, 0, "E906 compress delta info runs in one process"),
        ("run", 4, 2, 0, "E906 torchrun started processes on several machines"),
        ("run", 4, 4, 2, "E906 4 processes, but 2 GPUs: each process needs its own. Use --nproc-per-node 2"),
    ],
)
def test_what_cannot_run_so_is_refused(command, world, here, cards, said, project, compress, launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    launched(world, here)
    code, printed, error = compress(*command.split(), project)
    assert (code, printed) == (2, "") and error.startswith(said)


def test_one_process_of_torchrun_is_as_none(project, out, compress, launched):
    launched(1, 1)
    code, printed, _ = compress("run", project, "--out", out)
    assert code == 0 and "done in" in printed and not processes.helping()
    assert processes.agreed(lambda: {"a": 1}) == {"a": 1}


def test_a_process_that_failed_in_an_earlier_attempt_is_not_the_reason_of_an_interruption(project, out, monkeypatch):
    """This one is stopped before any training."""

    def interrupted(config, inputs, workspace):
        raise Stopped(signal.SIGINT)

    toys.replace(monkeypatch, "select", run=interrupted)
    monkeypatch.setattr("pipelines.engine.runner.launched", lambda: 2)
    (out / "toy" / "logs").mkdir(parents=True)
    (out / "toy" / "logs" / "process-1.log").write_text("MemoryError: nothing left here\n")
    with pytest.raises(Stopped):
        run_pipeline(load_pipeline(project), out)
    assert json.loads((out / "toy" / "run.json").read_text())["status"] == "stopped"
