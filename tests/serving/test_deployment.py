"""compress deploy on a live server: versions published beside the running one, proven, and taken back if they fail."""

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from triton_parts import NAME, Readiness, Traffic, ready_status

from compressor.errors import CheckError, UserError
from pipelines.cli.commands import main
from pipelines.cli.work.deploy_work import header_of, table
from pipelines.runs.served import find_repository
from serving.deployment.answers import differences, read_answers, write_answers
from serving.deployment.publish import Options, deploy, roll_back, status
from serving.deployment.target import CONFIG, LOCK, STAGED, Target, new_record
from serving.deployment.triton_control import Control, Refused

ROOT = Path(__file__).parents[2]


def logits(control, answer, version=None):
    return control.infer(NAME, answer.inputs, version)[0]["data"]


@pytest.mark.parametrize("changes", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_versions_come_and_go_without_a_failed_request(make_run, target, control, changes):
    runs = [make_run(seed) for seed in range(changes + 1)]
    answer = read_answers(runs[0] / NAME / "1")[3]
    deploy(runs[0], target, control, Options("first"))
    with Readiness(control) as readiness, Traffic(control, answer) as traffic:
        for number, run in enumerate(runs[1:], 2):
            (done,) = deploy(run, target, control, Options(f"run {number}"))
            assert (done.version, done.before, done.fresh) == (number, number - 1, True) and done.ms > 0
            assert not differences(read_answers(run / NAME / "1"), lambda answer: control.ask(NAME, answer))
        (back,) = roll_back([NAME], target, control, Options(""))
        time.sleep(0.2)
    assert (back.version, target.versions(NAME)[-1]) == (changes, changes)
    assert logits(control, answer) == logits(control, answer, changes)
    assert not traffic.failures and traffic.requests > 20 and readiness.statuses == {200}
    states = {state.version: state for state in status(target, control)}
    last = states[changes]
    assert last.ready and last.proven and last.run == f"run {changes}" and not states[changes - 1].ready
    assert not [path for path in target.files.ls(target.root) if "candidate" in str(path)]


def test_a_version_that_answers_wrong_never_serves(make_run, target, control):
    deploy(make_run(0), target, control, Options("good"))
    answer = read_answers(make_run(0, answered=0) / NAME / "1")[2]
    before = logits(control, answer)
    with (
        Traffic(control, answer) as traffic,
        pytest.raises(CheckError, match=r"E758.*4 of 4 recorded answers differ") as failure,
    ):
        deploy(make_run(1, answered=2), target, control, Options("wrong"))
    assert failure.value.exit_code == 3
    assert not traffic.failures and logits(control, answer) == before and target.versions(NAME) == [1]
    assert not control.ready(f"{NAME}-candidate")


@pytest.mark.slow
def test_a_version_that_does_not_load_never_serves(make_run, target, control):
    deploy(make_run(0), target, control, Options("good"))
    broken = make_run(1)
    (broken / NAME / "1" / "model.onnx").write_bytes(b"no model")
    with pytest.raises(CheckError, match=r"E758.*does not load"):
        deploy(broken, target, control, Options("broken"))
    assert control.ready(NAME, 1) and target.versions(NAME) == [1]
    assert ready_status(control) == 200


@pytest.mark.slow
def test_other_labels_come_and_go_with_their_version(make_run, target, control):
    """They are in files beside the versions, which all share."""
    deploy(make_run(0), target, control, Options("first"))
    before = target.files.cat_file(target.path(NAME, CONFIG))
    deploy(make_run(1, labels=("one", "two", "three")), target, control, Options("second"))
    assert target.files.cat_file(target.path(NAME, "labels.txt")) == b"one\ntwo\nthree\n"
    roll_back([NAME], target, control, Options(""))
    assert target.files.cat_file(target.path(NAME, "labels.txt")) == b"bad\nfair\ngood\n"
    assert target.files.cat_file(target.path(NAME, CONFIG)) == before and control.ready(NAME, 1)


@pytest.mark.slow
def test_what_fails_after_it_was_published_is_taken_back(make_run, target, control, monkeypatch):
    """Here: the server, asked for the version itself, answers something else than as a candidate."""
    deploy(make_run(0), target, control, Options("first"))
    before = target.files.cat_file(target.path(NAME, CONFIG))
    real = Control.infer
    monkeypatch.setattr(Control, "infer", lambda self, name, inputs, version=None: real(self, name, inputs, version and 1))
    with pytest.raises(CheckError, match="E758"):
        deploy(make_run(1), target, control, Options("second"))
    monkeypatch.undo()
    assert target.versions(NAME) == [1] and control.ready(NAME, 1)
    assert target.files.cat_file(target.path(NAME, CONFIG)) == before


def test_the_same_version_is_not_published_twice(make_run, target, control):
    run = make_run(0)
    deploy(run, target, control, Options("first"))
    (again,) = deploy(run, target, control, Options("again"))
    assert (again.version, again.fresh, target.versions(NAME)) == (1, False, [1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda version: (version / "model.onnx").write_bytes(b""),
        lambda version: (version / "tokenizer" / "tokenizer.json").unlink(),
        lambda version: (version / "serving.json").write_text((version / "serving.json").read_text().replace("good", "best")),
    ],
    ids=["emptied", "deleted", "changed"],
)
def test_a_damaged_version_is_not_taken_for_published(make_run, tmp_path, damage):
    """As after a loss of power: the same run becomes the next version."""
    run, target = make_run(0), Target.at(str(tmp_path / "target"))
    deploy(run, target, None, Options("first"))
    damage(tmp_path / "target" / NAME / "1")
    (again,) = deploy(run, target, None, Options("again"))
    assert (again.version, again.before, again.fresh) == (2, 1, True) and target.holds(NAME, 2, run / NAME / "1")
    assert not deploy(run, target, None, Options("again"))[0].fresh


def test_other_labels_of_the_same_model_are_another_version(make_run, tmp_path):
    run, target = make_run(0), Target.at(str(tmp_path / "target"))
    deploy(run, target, None, Options("first"))
    (run / NAME / "labels.txt").write_text("one\ntwo\nthree\n")
    (again,) = deploy(run, target, None, Options("second"))
    assert again.fresh and target.versions(NAME) == [1, 2]


def test_a_run_is_recorded_by_the_name_of_its_folder_wherever_one_is(make_run, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(make_run(0))
    monkeypatch.chdir(tmp_path / "link")
    for place, run, name in (("here", ".", "repository"), ("there", str(tmp_path / "link"), "link")):
        with pytest.raises(SystemExit) as end:
            main(["deploy", run, "--to", str(tmp_path / place)], prog_name="compress")
        assert not end.value.code
        assert {state.run for state in status(Target.at(str(tmp_path / place)), None)} == {name}


def test_the_newest_version_of_a_repository_goes_to_another(make_run, tmp_path):
    """With what stands beside the versions, and nothing of the other versions or of its own record."""
    first, second = (Target.at(str(tmp_path / name)) for name in ("staging", "production"))
    runs = [make_run(seed) for seed in (0, 1)]
    for seed, run in enumerate(runs):
        deploy(run, first, None, Options(str(seed), keep=1))
        first.mark(NAME, seed + 1, proven=True)
    for seed in (2, 3, 4):
        deploy(make_run(seed, labels=("bad", "fair", f"good {seed}")), second, None, Options(str(seed)))
    (tmp_path / "staging" / NAME / ".staged-0123abcd").mkdir()
    (tmp_path / "staging" / NAME / ".staged-0123abcd" / "half").touch()
    before = {version: contents(tmp_path / "production" / NAME / version) for version in "23"}
    (done,) = deploy(tmp_path / "staging", second, None, Options("staging"))
    assert (done.version, done.before, second.versions(NAME)) == (4, 3, [2, 3, 4])
    assert {version: contents(tmp_path / "production" / NAME / version) for version in "23"} == before
    record = second.record(NAME, 4)
    assert (record["run"], record["proven"], record["finished"]) == ("staging", False, True)
    record = Path("published.json")
    newest, published = (contents(tmp_path / place) for place in (f"staging/{NAME}/2", f"production/{NAME}/4"))
    assert newest.pop(record) != published.pop(record) and newest == published
    assert (tmp_path / "production" / NAME / "labels.txt").read_text() == "bad\nfair\ngood\n"
    assert not (tmp_path / "production" / NAME / ".staged-0123abcd").exists()
    for again in (tmp_path / "staging", runs[1]):
        assert not deploy(again, second, None, Options("again"))[0].fresh, "it is this very one"
    first.mark(NAME, 2, finished=False)
    with pytest.raises(UserError, match=r"E756 .*version 2 of .* is being deployed here, or its deployment was killed"):
        deploy(tmp_path / "staging", second, None, Options("staging"))


@pytest.mark.parametrize("name", ["1/libtriton_onnxruntime.so", "triton_python_backend_stub"])
def test_what_is_not_served_is_not_deployed(make_run, tmp_path, name):
    """Nor is it when it comes later: a server of this repository would run it."""
    run, target = make_run(0), Target.at(str(tmp_path / "target"))
    (run / NAME / name).touch()
    with pytest.raises(UserError, match=rf"E724 .*{NAME}/{name}: Triton would load or run this file"):
        deploy(run, target, None, Options("first"))
    assert target.models() == []


@pytest.mark.parametrize("name", ["labels.txt", "notes.txt", "1/model.onnx", "1/tokenizer/vocab.txt"])
def test_a_link_publishes_nothing_from_outside(make_run, tmp_path, name):
    run, target = make_run(0), Target.at(str(tmp_path / "target"))
    (tmp_path / "secret.txt").write_text("secret\n")
    link = run / NAME / name
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=rf"E724 .*{NAME}/.*(link out of|leads out of) the repository"):
        deploy(run, target, None, Options("first"))
    assert target.models() == []
    link.unlink()
    (run / NAME / "kept").write_text("its own\n")
    link.symlink_to(run / NAME / "kept")
    assert deploy(run, target, None, Options("first"))[0].fresh
    assert (tmp_path / "target" / NAME / name).read_text() == "its own\n"


def test_a_version_that_is_a_link_is_named_and_not_a_file_in_it(make_run, tmp_path):
    version = make_run(0) / NAME / "1"
    version.symlink_to(version.rename(tmp_path / "first"))
    with pytest.raises(UserError, match=rf"E724 .*{NAME}/1: a link out of the repository.*\. Put the target in its place"):
        deploy(version.parent.parent, Target.at(str(tmp_path / "target")), None, Options("first"))


@pytest.mark.parametrize("outside", [False, True])
def test_a_linked_folder_in_a_version_is_not_left_out(make_run, tmp_path, outside):
    """Without its files, such as weights beside a graph, the version published would not load."""
    run = make_run(0)
    place = (tmp_path if outside else run / NAME) / ".weights"
    place.mkdir()
    (place / "weights.bin").touch()
    (run / NAME / "1" / "weights").symlink_to(place)
    with pytest.raises(UserError, match=rf"E724 .*{NAME}/1/weights: a link to a folder, whose files would not be published"):
        deploy(run, Target.at(str(tmp_path / "target")), None, Options("first"))


def test_old_versions_are_removed(make_run, target):
    for seed in range(4):
        deploy(make_run(seed), target, None, Options(str(seed), keep=2))
    assert target.versions(NAME) == [3, 4]


def test_what_a_kill_leaves_of_an_old_version_is_no_version(make_run, tmp_path, monkeypatch):
    """A later rollback would come to it."""
    target = Target.at(str(tmp_path / "target"))
    runs = [make_run(seed) for seed in range(3)]
    for seed in (0, 1):
        deploy(runs[seed], target, None, Options(str(seed)))

    def killed(self, path):
        shutil.rmtree(f"{path}/published")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Target, "remove", killed)
        deploy(runs[2], target, None, Options("2", keep=2))
    assert target.versions(NAME) == [2, 3]
    deploy(runs[2], target, None, Options("2", keep=2))
    assert not list((tmp_path / "target" / NAME).glob(f"{STAGED}*"))


def test_a_limit_on_latency(make_run, target, control):
    with pytest.raises(CheckError, match=r"E758.* ms, allowed 1e-06"):
        deploy(make_run(0), target, control, Options("slow", most_ms=1e-6))
    assert target.versions(NAME) == []


def test_a_server_whose_control_is_closed_says_so(make_run, target, server):
    with pytest.raises(UserError, match="E755"):
        deploy(make_run(0), target, Control.at(server.url), Options("run"))
    assert target.models() == []  # a server that polls would serve the candidate


@pytest.mark.parametrize("line", ["töken-€", "X-Key: a\x01b", "X Key: a", ": a", "urn:a-token", "X-Key:a"])
def test_a_token_file_that_no_header_can_hold(tmp_path, line):
    (tmp_path / "token").write_text(line, encoding="utf-8")
    with pytest.raises(UserError, match="E711"):
        header_of(tmp_path / "token")


@pytest.mark.parametrize("text", ["", "[]", '"text"', "<html>", '{"outputs": [{}]}', '{"outputs": 1}'])
def test_responses_of_another_server(ending, text):
    with pytest.raises(UserError, match=r"E712 .*no outputs"):
        ending("none", text).infer(NAME, [])


def test_no_server(make_run, target):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(UserError, match="E712"):
        deploy(make_run(0), target, Control.at(f"127.0.0.1:{port}"), Options("run"))


def test_a_server_that_does_not_answer_in_time(monkeypatch):
    monkeypatch.setattr("serving.deployment.triton_control.LONG_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections wait in its queue
        control = Control.at(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=r"E712 .*does not answer within 0\.2 s"):
            control.infer(NAME, [])


class Ending(BaseHTTPRequestHandler):
    """A Triton that loads every model but `last`: with that one it ends."""

    last, text, ended, refuses = "", "", False, False

    def do_GET(self):
        self.respond()

    def do_POST(self):
        is_last = self.path.endswith(f"/models/{self.last}/load")
        type(self).ended |= is_last and not self.refuses
        self.respond(400 if is_last else 200)
        type(self).last = "" if is_last else self.last  # it refuses once

    def respond(self, status=200):
        if self.ended:
            return  # the connection is closed without a response
        self.send_response(status)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def ending():
    """Starts a server that ends when it is to load a model."""
    with contextlib.ExitStack() as servers:

        def start(last, text="", refuses=False):
            text = '{"error": "unknown"}' if refuses else text
            handler = type("Handler", (Ending,), {"last": last, "text": text, "refuses": refuses})
            server = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.callback(server.shutdown)
            return Control.at(f"127.0.0.1:{server.server_address[1]}")

        yield start


@pytest.fixture
def two_models(make_run):
    """Runs of two models each, without recorded answers."""

    def make(seed):
        folder = make_run(seed, labels=("bad", "fair", f"good {seed}"), interfaces=("tokens", "text"))
        for name in (NAME, f"{NAME}-text"):
            write_answers(folder / name / "1", [])
        return folder

    return make


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("last", [NAME, f"{NAME}-text", f"{NAME}-candidate", f"{NAME}-text-candidate"])
def test_a_server_that_ends_leaves_the_repository_as_it_was(two_models, ending, tmp_path, last):
    target = Target.at(str(tmp_path / "target"))
    deploy(two_models(0), target, None, Options("first"))
    before = contents(tmp_path / "target")
    with pytest.raises(UserError, match="E712"):
        deploy(two_models(1), target, ending(last), Options("second"))
    assert contents(tmp_path / "target") == before


def test_what_cannot_be_published_whole_is_taken_back(two_models, tmp_path, monkeypatch):
    target = Target.at(str(tmp_path / "target"))
    deploy(two_models(0), target, None, Options("first"))
    before, real = contents(tmp_path / "target"), Target._replace

    def full(self, path, content):
        if b"good 1" in content:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, path, content)

    monkeypatch.setattr(Target, "_replace", full)
    with pytest.raises(OSError, match="No space"):
        deploy(two_models(1), target, None, Options("second"))
    assert contents(tmp_path / "target") == before


@pytest.mark.parametrize("last", [NAME, f"{NAME}-text"])
def test_models_return_together_or_not_at_all(two_models, ending, tmp_path, last):
    target = Target.at(str(tmp_path / "target"))
    for seed in (0, 1):
        deploy(two_models(seed), target, None, Options(str(seed)))
    before = contents(tmp_path / "target")
    with pytest.raises(UserError, match="E712"):
        roll_back([NAME, f"{NAME}-text"], target, ending(last), Options(""))
    assert contents(tmp_path / "target") == before
    with pytest.raises(CheckError, match=rf"E758 '{last}': version 1, which served before, does not load: unknown"):
        roll_back([NAME, f"{NAME}-text"], target, ending(last, refuses=True), Options(""))
    assert contents(tmp_path / "target") == before
    roll_back([NAME, f"{NAME}-text"], target, None, Options(""))
    assert [target.versions(model) for model in target.models()] == [[1], [1]]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("target")) == ["target"]


@pytest.mark.parametrize("lost", ["config.pbtxt", "labels.txt", "warmup/short_input_ids", ""])
def test_a_version_whose_labels_or_config_are_lost_is_not_returned_to(two_models, tmp_path, lost):
    """It would serve with those of the version that goes. Of several models none returns."""
    target, folder = Target.at(str(tmp_path / "target")), tmp_path / "target"
    for seed in (0, 1):
        deploy(two_models(seed), target, None, Options(str(seed)))
    place = folder / NAME / "1" / "published" / lost
    place.unlink() if lost else shutil.rmtree(place)
    before = contents(folder)
    with pytest.raises(UserError, match=rf"E757 .*/{NAME}/1: version 1 of '{NAME}' cannot come back .*published/{lost}"):
        roll_back([f"{NAME}-text", NAME], target, None, Options(""))
    assert contents(folder) == before
    shutil.rmtree(folder / NAME / "2" / "published")  # of the newest version it stands beside: kept before another comes
    deploy(two_models(2), target, None, Options("2"))
    roll_back([NAME], target, None, Options(""))
    assert target.versions(NAME) == [1, 2] and (folder / NAME / "labels.txt").read_text() == "bad\nfair\ngood 1\n"


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from serving.deployment.publish import Options, deploy, roll_back
from serving.deployment.target import Target
folder, source, name, count = sys.argv[1:]
real, calls = getattr(Target, name), itertools.count(1)
def last(*arguments, **named):
    if next(calls) == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
setattr(Target, name, last)
target = Target.at(folder)
deploy(Path(source), target, None, Options("killed")) if source else roll_back(target.models(), target, None, Options(""))
"""


def kill(folder, source, name, count):
    """Deploy `source`, or roll back, in a process that is killed in the `count`-th call of a method of `Target`."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(source), name, str(count)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


def without_times(folder):
    """The contents, with the times of publication left out of the records."""
    times = re.compile(rb'"published": "[^"]*"')
    return {path: times.sub(b"", content) for path, content in contents(folder).items()}


@pytest.mark.parametrize(
    ("name", "count", "versions"),
    [
        ("set_beside", 1, [[1, 2], [1]]),
        pytest.param("set_beside", 2, [[1, 2], [1, 2]], marks=pytest.mark.slow),
        pytest.param("mark", 1, [[1, 2], [1, 2]], marks=pytest.mark.slow),
        pytest.param("put", 2, [[1, 2], [1]], marks=pytest.mark.slow),
    ],
)
def test_a_deployment_that_was_killed_is_told_and_taken_back(two_models, tmp_path, name, count, versions):
    """Files of one version beside the config of another: the next deployment must not take them for deployed."""
    folder, models = tmp_path / "target", [NAME, f"{NAME}-text"]
    runs, target = [two_models(seed) for seed in range(3)], Target.at(str(folder))
    deploy(runs[0], target, None, Options("first"))
    before = contents(folder)
    kill(folder, runs[1], name, count)
    assert [target.versions(model) for model in models] == versions
    states = status(target, None)
    assert {(state.model, state.version) for state in states if not state.finished} == {
        (model, 2) for model, of in zip(models, versions, strict=True) if 2 in of
    }
    assert "unfinished" in table(states) and table(states).splitlines()[-1].endswith("--rollback takes it away")
    killed = shutil.copytree(folder, tmp_path / "killed")
    said = []
    roll_back(models, target, None, Options("", say=said.append))
    assert contents(folder) == before and f"{NAME}: version 2, whose deployment was interrupted, is taken back" in said
    for run in runs[1:]:
        whole, again = (shutil.copytree(of, tmp_path / f"{run.parent.name}-{of.name}") for of in (folder, killed))
        for place in (whole, again):
            deploy(run, Target.at(str(place)), None, Options("killed"))
        assert without_times(again) == without_times(whole)


@pytest.mark.slow
def test_a_first_deployment_that_was_killed_is_told_and_taken_back(two_models, tmp_path):
    folder, target = tmp_path / "target", Target.at(str(tmp_path / "target"))
    kill(folder, two_models(0), "set_beside", 1)
    assert [(state.model, state.version, state.finished) for state in status(target, None)] == [(NAME, 1, False)]
    roll_back([NAME], target, None, Options(""))
    assert target.models() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("set_aside", 1), ("set_aside", 2), *(("remove_aside", number) for number in range(1, 5))]
)
def test_a_rollback_that_was_killed_is_finished_by_the_next(two_models, tmp_path, name, count):
    folder, target = tmp_path / "target", Target.at(str(tmp_path / "target"))
    deploy(two_models(0), target, None, Options("first"))
    before = contents(folder)
    deploy(two_models(1), target, None, Options("second"))
    kill(folder, "", name, count)
    assert not any(state.finished for state in status(target, None) if state.version == 2)
    roll_back(target.models(), target, None, Options(""))
    assert contents(folder) == before


def test_a_killed_rollback_whose_version_does_not_load_keeps_the_other(two_models, ending, tmp_path):
    """The next commands go on as before it, and do not fail at it for ever."""
    folder, target = tmp_path / "target", Target.at(str(tmp_path / "target"))
    for seed in (0, 1):
        deploy(two_models(seed), target, None, Options(str(seed)))
    before = without_times(folder)
    kill(folder, "", "remove_aside", 1)
    with pytest.raises(CheckError, match=rf"E758 '{NAME}': version 1, .* does not load"):
        roll_back(target.models(), target, ending(NAME, refuses=True), Options(""))
    with pytest.raises(CheckError, match=rf"E758 '{NAME}-text': version 1, .* does not load"):
        roll_back([f"{NAME}-text"], target, ending(f"{NAME}-text", refuses=True), Options(""))
    assert without_times(folder) == before and [target.versions(one) for one in target.models()] == [[1, 2]] * 2


def test_a_rollback_that_was_killed_while_an_object_store_copied_is_finished(make_run, tmp_path):
    """Both folders are there: the one that is copied, and the copy."""
    folder, target = tmp_path / "target", Target.at(str(tmp_path / "target"))
    deploy(make_run(0), target, None, Options("first"))
    before = contents(folder)
    deploy(make_run(1), target, None, Options("second"))
    kill(folder, "", "remove_aside", 1)
    (folder / NAME / "2").mkdir()
    (folder / NAME / "2" / "model.onnx").write_bytes(b"a part")
    roll_back(target.models(), target, None, Options(""))
    assert contents(folder) == before


def test_what_a_kill_leaves_of_the_removed_version_is_cleared_away(make_run, tmp_path, monkeypatch):
    """The rollback had ended: no server is asked whether the version that serves loads."""
    folder, target = tmp_path / "target", Target.at(str(tmp_path / "target"))
    deploy(make_run(0), target, None, Options("first"))
    before, remove = contents(folder), Target.remove
    deploy(make_run(1), target, None, Options("second"))

    def killed(self, path):
        if path.endswith("2"):
            remove(self, f"{path}/model.onnx")
            raise KeyboardInterrupt
        remove(self, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Target, "remove", killed)
        roll_back([NAME], target, None, Options(""))
    roll_back([NAME], target, Control.at("127.0.0.1:1"), Options(""))
    assert contents(folder) == before and not target.versions_aside(NAME)


def test_nothing_half_written_stays(make_run, tmp_path, monkeypatch):
    """A file that could not be replaced, and what killed deployments left in the repository and beside it."""
    run, folder, replaced = make_run(0), tmp_path / "target", Path.replace
    target = Target.at(str(folder))

    def fail(self, place):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Input"):
        deploy(run, target, None, Options("first"))
    monkeypatch.setattr(Path, "replace", replaced)
    assert [path.name for path in folder.rglob("*")] == [".deploy.lock"]
    deploy(run, target, None, Options("first"))
    before = contents(folder)
    for model in (NAME, "another"):
        (folder / model / ".staged-0123abcd" / "tokenizer").mkdir(parents=True)
    for name in (".config.pbtxt.deploying", "1/.published.json.deploying", "../.staged-0123abcd.0"):
        (folder / NAME / name).write_text("half")
    deploy(run, target, None, Options("first"))
    assert contents(folder) == before and not [path for path in folder.rglob("*") if STAGED in path.name]
    assert not (folder / "another").exists(), "Triton would take it for a model"


def test_nothing_is_moved_into_the_repository_or_out_of_it(make_run, tmp_path, monkeypatch):
    """It may be a mount of its own. And a server that polls takes a folder without a version in it for a model that fails, and
    loads a model whose folder changes again."""
    folder, rename, write = tmp_path / "target", os.rename, Target._write
    target = Target.at(str(folder))

    def within(place, other):
        assert Path(place).is_relative_to(folder) and Path(other).is_relative_to(folder)
        rename(place, other)

    def seen(self, path, content):
        write(self, path, content)
        assert STAGED not in path or Path(path).parent == folder
        assert all(target.versions(model.name) for model in folder.iterdir() if model.is_dir())

    monkeypatch.setattr(os, "rename", within)
    monkeypatch.setattr(Target, "_write", seen)
    for seed in (0, 1):
        deploy(make_run(seed), target, None, Options(str(seed)))
    roll_back([NAME], target, None, Options(""))
    assert target.versions(NAME) == [1] and not [path for path in folder.rglob("*") if STAGED in path.name]


def test_a_version_that_cannot_be_moved_leaves_no_folder(make_run, tmp_path, monkeypatch):
    def fail(self, place):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input"):
        deploy(make_run(0), Target.at(str(tmp_path / "target")), None, Options("first"))
    assert [path.name for path in (tmp_path / "target").rglob("*")] == [".deploy.lock"]


@pytest.mark.parametrize("content", [b"", b'{"run": "fir', b"[]", b"\xff"])
def test_a_damaged_record_is_told(make_run, tmp_path, content):
    run, target = make_run(0), Target.at(str(tmp_path / "target"))
    deploy(run, target, None, Options("first"))
    (tmp_path / "target" / NAME / "1" / "published.json").write_bytes(content)
    for act in (
        lambda: status(target, None),
        lambda: deploy(run, target, None, Options("again")),
        lambda: roll_back([NAME], target, None, Options("")),
    ):
        with pytest.raises(UserError, match=rf"E757 .*{NAME}/1/published.json: the record of a version is damaged"):
            act()


def test_one_deployment_at_a_time(make_run, target):
    with target.locked(), pytest.raises(UserError, match="E756"):
        deploy(make_run(0), target, None, Options("second"))


def test_nothing_to_return_to(make_run, target):
    deploy(make_run(0), target, None, Options("only"))
    with pytest.raises(UserError, match="E759"):
        roll_back([NAME], target, None, Options(""))
    assert target.versions(NAME) == [1]


def test_storage_that_is_no_folder(make_run):
    """fsspec's memory stands for an object store: no rename, no lock."""
    target = Target.at("memory://models")
    for seed in (0, 1):
        deploy(make_run(seed), target, None, Options(str(seed)))
    assert target.versions(NAME) == [1, 2] and target.models() == [NAME]
    roll_back([NAME], target, None, Options(""))
    assert [state.version for state in status(target, None)] == [1]
    assert target.files.cat_file(target.path(NAME, "1", "model.onnx"))


@pytest.fixture
def empty_store(monkeypatch) -> Target:
    """A store in which, as in S3, a folder is no object that could be copied."""
    target = Target.at("memory://objects")
    target.remove(target.root)
    copied = MemoryFileSystem.cp_file

    def cp_file(self, path1, path2, **options):
        if not self.isfile(path1):
            raise FileNotFoundError("The specified key does not exist.")
        copied(self, path1, path2, **options)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", cp_file)
    return target


@pytest.fixture
def object_store(make_run, empty_store) -> Target:
    """A store with two versions."""
    for seed in (0, 1):
        deploy(make_run(seed), empty_store, None, Options(str(seed)))
    return empty_store


def test_a_rollback_in_an_object_store(object_store):
    roll_back([NAME], object_store, None, Options(""))
    assert object_store.versions(NAME) == [1] and not object_store.versions_aside(NAME)
    assert object_store.files.cat_file(object_store.path(NAME, "1", "model.onnx"))


@pytest.mark.parametrize(
    ("act", "allowed"),
    [("cp_file", 1), ("rm_file", 0), ("rm_file", 1), ("rm_file", None)],
    ids=["half a copy", "no deletion", "half deleted", "the copy stays"],
)
def test_a_rollback_that_a_storage_ends_leaves_the_version_that_serves(object_store, make_run, monkeypatch, act, allowed):
    """The storage refuses further copies or deletions after so many; or after the version is moved aside, where the server does
    not load the one to return to."""

    class Server:
        def load(self, model):
            if object_store.versions(model) == [1]:
                raise Refused(400, "no memory")

    def kept():
        return object_store.files.cat(object_store.files.find(object_store.path(NAME, 2)))

    before, calls, act_on = kept(), itertools.count(), getattr(MemoryFileSystem, act)

    def refused(*arguments, **options):
        if next(calls) >= (len(before) if allowed is None else allowed):
            raise PermissionError("Access Denied")
        act_on(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, act, refused)
        with pytest.raises(UserError, match=r"E757 .*Access Denied"), object_store.storage_errors():
            roll_back([NAME], object_store, Server(), Options(""))
    assert kept() == before and object_store.versions_aside(NAME) == ([] if act == "cp_file" else [2])
    assert [(state.version, state.finished) for state in status(object_store, None)] == [(1, True), (2, True)]
    deploy(make_run(2), object_store, None, Options("third"))
    assert object_store.versions(NAME) == [1, 2, 3] and not object_store.versions_aside(NAME) and kept() == before


@pytest.mark.parametrize(
    ("act", "allowed", "loads", "versions"),
    [
        ("pipe_file", 1, True, [1, 2]),
        ("cp_file", 0, True, [1, 2]),
        ("cp_file", 1, True, [1, 2]),
        ("cp_file", -1, False, [1, 2]),
        ("pipe_file", -1, False, [1, 2]),
        ("rm_file", -1, True, [1]),
    ],
    ids=["one is marked", "no copy", "half a copy", "half undone", "not marked as undone", "half deleted"],
)
def test_a_rollback_killed_in_an_object_store_loses_nothing(empty_store, tmp_path, monkeypatch, act, allowed, loads, versions):
    """Nothing is written after so many writes, copies or deletions, or but for the last. Whether the next rollback has no
    server, or one that does not load version 1: both models have the same versions, each whole, and its labels."""
    models, store, asked = ["a", "b"], empty_store, []
    (tmp_path / "model.onnx").write_bytes(b"weights")
    for version, model in itertools.product((1, 2), models):
        beside = {CONFIG: f'name: "{model}"'.encode(), "labels.txt": f"of {version}".encode()}
        store.put(tmp_path, model, version, beside, new_record("run", str(version)) | {"finished": True})
        store.set_beside(model, beside)

    class Server:
        def load(self, model):
            asked.append(model)
            if not loads and store.versions(model) == [1]:
                raise Refused(400, "no memory")

    def stored(place=store.root):
        return store.files.cat(store.files.find(place))

    def killed(allowed):
        """Roll back, and write nothing from a call of `act` on; returns the number of calls before."""
        calls, dead = [], []

        def until_dead(name, real):
            def write(*arguments, **options):
                dead.extend([name] if name == act and len(calls) == allowed else [])
                if dead:
                    raise PermissionError("Access Denied")
                calls.extend([name] if name == act else [])
                return real(*arguments, **options)

            return write

        with monkeypatch.context() as patch, contextlib.suppress(PermissionError, CheckError):
            for name in ("pipe_file", "cp_file", "rm_file"):
                patch.setattr(MemoryFileSystem, name, until_dead(name, getattr(MemoryFileSystem, name)))
            roll_back(models, store, Server(), Options(""))
        return len(calls)

    def put_back(files):
        store.remove(store.root)
        store.files.pipe(files)

    before = stored()
    count = killed(None)
    put_back(before)
    killed(allowed % count)
    left, loads = stored(), False
    for server, there in ((None, [1]), (Server(), versions)):
        put_back(left)
        asked.clear()
        with contextlib.suppress(CheckError):
            roll_back(models, store, server, Options(""))
        assert bool(asked) == (there == [1, 2])
        for model in models:
            assert store.versions(model) == there and all(store.returned(model, one) for one in store.versions_aside(model))
            whole = [store.path(model, version) for version in there]
            assert all(content == before[path] for place in whole for path, content in stored(place).items())
            assert all(path in stored() for path in before if path.startswith(tuple(f"{place}/" for place in whole)))
            labels = store.path(model, "labels.txt"), store.path(model, there[-1], "published", "labels.txt")
            assert store.files.cat_file(labels[0]) == store.files.cat_file(labels[1])


def test_an_error_with_a_number_is_a_storages_where_its_package_raises_it(object_store):
    """As s3fs turns SlowDown into a busy device, and an internal error of the server into one of input and output."""
    package = {"__name__": "s3fs.core"}
    exec("def translated(error): raise error", package)
    with pytest.raises(UserError, match=r"E757 .*Please reduce your request rate"), object_store.storage_errors():
        package["translated"](OSError(16, "Please reduce your request rate."))
    with pytest.raises(FileNotFoundError), object_store.storage_errors():
        package["translated"](FileNotFoundError(2, "No such file or directory", "/a/file/of/this/machine"))


def test_an_error_that_is_no_storages_is_left_as_it_is(object_store):
    for error in (KeyError("a bug"), OSError(28, "No space left on device")):
        with pytest.raises(type(error)), object_store.storage_errors():
            raise error


@pytest.mark.parametrize("location", ["nothing-of-the-kind://models", "memory://models::memory", "", " "])
def test_a_location_that_cannot_be_opened(location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="E757"):
        Target.at(location)


def test_an_empty_folder_is_a_repository_where_models_come_later(tmp_path):
    with pytest.raises(UserError, match="E805"):
        find_repository(tmp_path)
    assert find_repository(tmp_path, empty=True).repository == tmp_path
    (tmp_path / LOCK).touch()  # a first deployment that failed leaves it
    assert find_repository(tmp_path, empty=True).repository == tmp_path
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="E805"):
        find_repository(tmp_path, empty=True)
