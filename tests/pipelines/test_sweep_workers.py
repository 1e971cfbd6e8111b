"""Trials in worker processes, what a worker's death does, what is shown meanwhile, and how Ray is refused; none needs torch."""

import io
import os
import pickle
import re
import signal
import sys
import types
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from compressor.errors import UserError, UserErrors
from pipelines.sweeps.ray_engine import on_ray
from pipelines.sweeps.sweep import sweep
from pipelines.sweeps.sweep_trials import SweepPlan
from pipelines.sweeps.trial_board import TrialBoard
from pipelines.sweeps.trial_events import TrialEvent
from pipelines.sweeps.trial_run import TrialConsole, TrialJob, TrialOutcome, named
from pipelines.sweeps.worker_processes import _start, in_processes
from pipelines.terminal.console_table import table
from serving.client import Refusal
from tests.pipelines.processes import start, wait
from tests.pipelines.trial_parts import toy


def jobs(out: Path, *names: str) -> list[TrialJob]:
    return [TrialJob(name, None, out, "tune", ("tune",)) for name in names]


def test_workers_share_the_trials_and_a_dead_one_is_replaced(tmp_path):
    said = []
    board = TrialBoard(4, said.append)
    events = list(in_processes(jobs(tmp_path, "a", "once", "b", "always"), toy, workers=2))
    for event in events:
        board.on(event)
    ended = {event.trial: event.outcome for event in events if event.kind == "ended"}
    assert [name for name, outcome in ended.items() if outcome.error] == ["always"] and len(ended) == 4
    assert str(ended["always"].error).startswith("E811 trial always: its worker was ended by SIGKILL, 2 times")
    assert [event.where for event in events[:2]] == ["worker 1", "worker 2"] and events[0].kind == "started"
    assert len(list(tmp_path.glob("once-*"))) == len(list(tmp_path.glob("always-*"))) == 2
    assert "once: the worker was ended by SIGKILL; the trial starts once more" in said
    assert {"trial 1 of 4: a on worker 1", "trial 2 of 4: once on worker 2"} < set(said)
    assert board.counts["done"] == 3 and any(line.startswith("FAILED E811 trial always") for line in said)


def test_a_sweep_that_stops_ends_its_workers(tmp_path):
    events = in_processes(jobs(tmp_path, "hang"), toy, workers=1)
    worker = next(int(event.text) for event in events if event.kind == "said")
    os.kill(worker, 0)
    events.close()  # as an exception in the sweep does
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.slow
def test_ctrl_c_stops_a_worker_once(tmp_path):
    """The terminal sends SIGINT to the workers, too: with the sweep's own SIGTERM it would break into the orderly end."""
    events = in_processes(jobs(tmp_path, "tidy"), toy, workers=1)
    worker = next(int(event.text) for event in events if event.kind == "said")
    os.kill(worker, signal.SIGINT)
    events.close()
    assert (tmp_path / "tidied").exists()


def test_a_worker_that_starts_hears_no_ctrl_c(tmp_path):
    """A traceback of each would stand on the terminal."""
    worker = _start(1, toy)
    os.kill(worker.process.pid, signal.SIGINT)
    worker.connection.close()
    worker.process.join(60)
    assert worker.process.exitcode == 0


@pytest.mark.slow
def test_idle_workers_end_by_themselves(tmp_path):
    """Killed ones leave the semaphores of their progress bars, of which Python warned at the end of every sweep."""
    events = list(in_processes(jobs(tmp_path, "a", "b"), toy, workers=2))
    assert sum(event.kind == "ended" for event in events) == 2
    workers = {path.name.split("-")[1] for path in tmp_path.glob("[ab]-*")}
    assert workers == {path.name.split("-")[1] for path in tmp_path.glob("ended-*")}


def test_an_error_that_is_made_from_something_else_keeps_its_code(tmp_path):
    """A Triton's refusal, named after its trial, and sent by the process of a worker."""
    refusal = Refusal("no memory", "reviews", wrong=False)
    for error in (named(refusal, "rank-4"), pickle.loads(pickle.dumps(refusal))):
        assert isinstance(error, UserError) and error.code == "E715" and "no memory" in error.what
    assert named(refusal, "rank-4").where == "trial rank-4, reviews"


def test_places_in_files_are_no_emoji(capsys):
    said = []
    TrialConsole(lambda kind, line: said.append(line)).print("p.yaml:100: stages", markup=False)
    table(("place",), [["p.yaml:100: stages"]])
    assert said == ["p.yaml:100: stages"] and "p.yaml:100: stages" in capsys.readouterr().out


def test_the_table_of_what_runs_where(tmp_path):
    board = TrialBoard(3, print, Console())
    for event in (
        TrialEvent("started", "rank-4", "worker 1"),
        TrialEvent("said", "rank-4", "worker 1", "[1/2] tune  training: 40 %"),
        TrialEvent("started", "rank-8", "worker 2"),
        TrialEvent("ended", "rank-8", "worker 2", outcome=TrialOutcome()),
    ):
        board.on(event)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(board.table())
    shown = console.export_text()
    assert "1 of 3 trials done, 0 failed, 1 running, 1 waiting" in shown and "rank-8" not in shown
    assert "[1/2] tune  training: 40 %" in next(line for line in shown.splitlines() if "rank-4" in line)


def sweep_until(number: int, project: Path, out: Path, error: UserError | None) -> None:
    """A sweep that a signal stops behind its first trial; the engine raises another exception in place of the one for it."""

    def engine(jobs, perform):
        yield TrialEvent("ended", next(iter(jobs)).name, "ray", outcome=TrialOutcome(error=error))
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as ray.wait does

    sweep(project, SweepPlan(seeds=2), out, say=partial(print, flush=True), engine=engine)


@pytest.mark.parametrize(
    ("number", "exit_code", "error", "told"),
    [
        (signal.SIGINT, 130, None, "1 of 2 trials are finished and kept"),
        (signal.SIGTERM, 143, UserError("E501", "too much", "Less"), "0 of 2 trials are finished and kept; 1 failed"),
    ],
)
def test_a_stop_that_an_engine_hides_is_told(project, out, tmp_path, number, exit_code, error, told):
    said = tmp_path / "said"
    assert wait(start(said, sweep_until, number, project, out, error)) == exit_code
    last = said.read_text().splitlines()[-1]
    assert last == f"Stopped by {number.name}: {told}. The same command continues."


def test_failed_checks_and_targets_out_of_reach_are_told_of_trials_elsewhere():
    """A trial in this process has told its checks itself; neither is a failure of the trial."""
    said = []
    board = TrialBoard(3, said.append, out_of_reach=lambda error: error.code == "E520")
    checked = TrialOutcome(
        failures=({"trial": "a", "stage": "export", "code": "E610", "what": "int8 is left out", "fix": "Leave it"},)
    )
    unreached = TrialOutcome(error=UserError("E520", "0.1 of the FLOPs is out of reach", "Lower the target", "trial b"))
    for name, where, outcome in (("a", "worker 1", checked), ("here", "", checked), ("b", "", unreached)):
        board.on(TrialEvent("ended", name, where, outcome=outcome))
    assert said == [
        "[1/3] a  done in 0.0 s",
        "E610 export (a): int8 is left out.",
        "E520 trial b: 0.1 of the FLOPs is out of reach. Lower the target",
    ]
    assert board.table().title == "2 of 3 trials done, 1 out of reach, 0 failed, 0 running, 0 waiting"


def test_warnings_of_trials_elsewhere_stay():
    """And so does what a trial that learnt nothing says: the table shows a line only until the next one."""
    said, told = [], []
    TrialConsole(lambda kind, line: told.append((kind, line))).warn("warning: about 9.00 GB of memory are needed")
    assert told == [("warned", "warning: about 9.00 GB of memory are needed")]
    board = TrialBoard(3, said.append)
    board.on(TrialEvent("warned", "a", "worker 1", told[0][1]))
    for name, where, tasks in (("a", "worker 1", ("",)), ("here", "", ("",)), ("b", "worker 1", ("x", "y"))):
        board.on(TrialEvent("ended", name, where, outcome=TrialOutcome(unlearnt=tasks)))
    assert said == [
        "a: warning: about 9.00 GB of memory are needed",
        "[1/3] a  done in 0.0 s",
        "a: the model is no better than a constant prediction",
        "[3/3] b  done in 0.0 s",
        "b: x: the model is no better than a constant prediction",
        "b: y: the model is no better than a constant prediction",
    ]


@pytest.mark.parametrize("moves", [False, True])
def test_what_a_terminal_obeys_in_lines_of_a_sweep_is_shown_as_escapes(moves):
    """And each mistake of a trial is a line of its own."""
    said, console = [], Console(file=io.StringIO(), force_terminal=moves, width=160)
    board = TrialBoard(3, said.append, console)
    faults = UserErrors([UserError("E104", "no 'a\x1b[8m'", "Name it"), UserError("E105", "no 'b'", "Name it, too")])
    check = {"trial": "a", "stage": "export", "code": "E610", "what": "\x1b]52;c;YQ==\x07 is left out", "fix": "Leave it"}
    with board.shown():
        board.on(TrialEvent("started", "c\x1b[8m", "worker 3"))
        board.on(TrialEvent("said", "c\x1b[8m", "worker 3", "\x1b]52;c;YQ==\x07"))
        board.on(TrialEvent("ended", "b", "worker 2", outcome=TrialOutcome(error=faults)))
        board.on(TrialEvent("ended", "a", "worker 1", outcome=TrialOutcome(failures=(check,))))
        console.print(board.table())
    board.close("Stopped by \x1b[8m.")
    shown = "\n".join([console.file.getvalue(), *said])
    assert not re.search(r"\x1b\]|\x1b\[8m|\x07", shown)
    assert re.search(r"FAILED E104 no 'a\\x1b\[8m'\. Name it\nFAILED E105 no 'b'\. Name it, too\n", shown)
    assert r"E610 export (a): \x1b]52;c;YQ==\x07 is left out." in shown and r"Stopped by \x1b[8m." in said
    assert re.search(r"c\\x1b\[8m .*worker 3 .*\\x1b\]52;c;YQ==\\x07", shown)


def test_a_trial_that_starts_once_more_keeps_its_number():
    said = []
    board = TrialBoard(3, said.append)
    for name, where in (("a", "worker 1"), ("b", "worker 2"), ("a", "worker 1"), ("c", "worker 2")):
        board.on(TrialEvent("started", name, where))
    assert [line.partition(" on ")[0] for line in said] == [
        "trial 1 of 3: a",
        "trial 2 of 3: b",
        "trial 1 of 3: a",
        "trial 3 of 3: c",
    ]


def fake_ray(**functions) -> types.SimpleNamespace:
    exceptions = types.SimpleNamespace(RayError=OSError)
    return types.SimpleNamespace(
        **{
            "init": lambda *_, **__: None,
            "shutdown": lambda: None,
            "is_initialized": lambda: False,
            "exceptions": exceptions,
            **functions,
        }
    )


def refuse(*_, **__):
    raise ConnectionError("nobody is there")


def start_too_late(*_, **__):
    raise Exception("The current node timed out during startup. This could happen because ...")


def nodes(*resources) -> list[dict]:
    return [{"Alive": True, "Resources": node} for node in resources]


def fail():
    raise OSError("its server is gone\nNode Id: 1")


@pytest.mark.parametrize(
    ("ray", "address", "says"),
    [
        (None, None, "E901 --engine ray needs the package ray. Run: pip install 'compress-pipeline[sweep]'"),
        (fake_ray(init=refuse), "x:1", "E812 --address x:1: no cluster of Ray at 'x:1' (nobody is there)"),
        (fake_ray(init=refuse), None, "E812 Ray does not start"),
        (fake_ray(init=refuse, is_initialized=lambda: True), None, "E812 Ray does not start"),
        (fake_ray(init=start_too_late), None, "E812 Ray does not start (The current node timed out during startup. This"),
        (
            fake_ray(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 9.0}}]),
            "auto",
            "E812 a trial takes 4 CPUs, and the largest node of the cluster has 2",
        ),
        (
            fake_ray(nodes=lambda: nodes({"CPU": 8.0})),
            "auto",
            "E812 a trial takes a GPU, and no node of the cluster offers one with 4 CPUs. Start a node with",
        ),
        (
            fake_ray(nodes=lambda: nodes({"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0})),
            "auto",
            "E812 a trial takes a GPU, and no node of the cluster offers one with 4 CPUs",
        ),
        (fake_ray(nodes=fail), "x:1", "E812 --address x:1: the cluster of Ray failed (OSError: its server is gone)"),
    ],
)
def test_a_ray_that_cannot_be_used(monkeypatch, tmp_path, ray, address, says):
    stops = []
    monkeypatch.setattr("pipelines.sweeps.ray_engine.accelerator", lambda: "a card")
    monkeypatch.setitem(sys.modules, "ray", ray)
    if ray is not None:
        monkeypatch.setattr(ray, "shutdown", lambda: stops.append("shutdown"))
    with pytest.raises(UserError) as error:
        list(on_ray(jobs(tmp_path, "a"), toy, workers=None, threads=4, address=address))
    assert str(error.value).startswith(says)
    assert len(stops) == (ray is not None and not ray.is_initialized()), "what the caller has connected stays so"


def test_a_sweep_on_ray_keeps_its_handler_of_sigterm(monkeypatch, tmp_path):
    """Ray's own would end the program with another exit code, and silently."""

    def take_over(*_, **__):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(sys.modules, "ray", fake_ray(init=take_over, nodes=list))
    with pytest.raises(UserError, match="E812"):
        list(on_ray(jobs(tmp_path, "a"), toy, workers=1, threads=1))
    assert signal.getsignal(signal.SIGTERM) == before
