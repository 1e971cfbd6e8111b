"""What a server does when a process of it ends, when it is told to stop, and with the memory and the logs of earlier ones."""

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from triton_parts import processes_of
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from compressor.errors import UserError
from pipelines.cli.work.serve_work import _tell
from serving import shared_memory, watch
from serving.layout.knobs import Knobs
from serving.repository import read_config, write_config, write_repository
from serving.server import EmbeddedServer
from serving.server_log import open_log

ROOT = Path(__file__).parents[2]
BODY = json.dumps(
    {"inputs": [{"name": n, "shape": [1, 2], "datatype": "INT64", "data": [1, 1]} for n in ("input_ids", "attention_mask")]}
)


def respond(port, path="/v2/models/bare/infer", body=BODY):
    """Status and body of the response to a request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST" if body else "GET", path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def respond_grpc(port):
    """The shape of the output of a gRPC request."""
    request = messages.ModelInferRequest(model_name="bare")
    for name in ("input_ids", "attention_mask"):
        request.inputs.add(name=name, datatype="INT64", shape=[1, 2]).contents.int64_contents.extend([1, 1])
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return list(GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20).outputs[0].shape)


class Over(BaseException):
    """Ends `watch` as Ctrl-C would."""


def watched(server, harm):
    """`watch` from `harm` until the server works again: its lines, and the changes of readiness with their seconds."""
    lines, changes, deadline = [], [], time.monotonic() + 60

    def look():
        state = 200
        while (not changes or state != 200) and time.monotonic() < deadline:
            if (now := respond(server.ports["http"], "/v2/health/ready", None)[0]) != state:
                changes.append((now, time.monotonic() - start))
                state = now
            time.sleep(0.02)

    def tell(line):
        lines.append(line)
        if line.startswith("serving again"):
            raise Over

    start = time.monotonic()
    looking = threading.Thread(target=look)
    looking.start()
    harm()
    with pytest.raises(Over):
        watch.watch(server, tell)
    looking.join()
    return lines, changes


@pytest.mark.usefixtures("triton")
def test_a_killed_process_is_named_and_started_again(repository, tmp_path):
    log = tmp_path / "logs" / "log"
    with EmbeddedServer(repository, log_path=log, models=["bare"]) as server:
        ports, first = dict(server.ports), server.triton.process.pid
        (stub,) = server.triton.stubs

        def harm():
            shutil.rmtree(log.parent)  # what cleans a cache does not ask whether a server writes there
            os.kill(stub, signal.SIGKILL)
            while server.fault() is None:
                time.sleep(0.01)
            assert server.fault().code == "E743"

        lines, changes = watched(server, harm)
        assert lines[0] == "the process of model 'bare' was killed by SIGKILL; starting again" and len(lines) == 2
        (gone, when_gone), (back, when_back) = changes
        assert (gone, back) == (503, 200) and when_gone < 2 and when_back < 30  # some 2 s on an idle machine
        assert server.ports == ports and respond(ports["http"])[0] == 200
        assert not processes_of(first)

        assert log.stat().st_mode & 0o777 == 0o600
        log.rename(tmp_path / "rotated")
        lines = watched_guard(server)
        assert lines[0] == "the process in front of Triton was killed by SIGKILL; starting again"
        assert respond(ports["http"])[0] == 200 and log.stat().st_mode & 0o777 == 0o600


def watched_guard(server):
    """The same for the guard: nothing answers meanwhile, and requests wait for it."""
    lines = []

    def tell(line):
        lines.append(line)
        if line.startswith("serving again"):
            raise Over

    server.guard.process.kill()
    server.guard.process.wait()
    assert server.fault().code == "E742"
    with pytest.raises(Over):
        watch.watch(server, tell)
    return lines


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_a_restart_that_failed_is_not_taken_for_a_server(repository, tmp_path):
    with EmbeddedServer(repository, log_path=tmp_path / "log", models=["bare"]) as server:
        server.triton.process.kill()
        server.triton.process.wait()
        server.ready_timeout = 0
        with pytest.raises(UserError, match="E708"):
            server.restart()
        assert server.fault()
        server.ready_timeout = 60
        server.restart()
        assert respond(server.ports["http"])[0] == 200


def test_a_crash_loop_ends_with_a_coded_error(monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    fault = UserError("E709", "the Triton server was killed by SIGSEGV", "See its log")
    restarts, lines = [], []
    server = SimpleNamespace(ports={}, fault=lambda: fault, restart=lambda: restarts.append(1), token=None)
    with pytest.raises(UserError, match=r"E738 the server failed 4 times within 60 s; the last time: .*SIGSEGV"):
        watch.watch(server, lines.append)
    assert len(restarts) == watch.RESTARTS == 3

    def refuse():
        raise UserError("E707", "Triton refused model 'm'", "Deploy it again")

    server.restart = refuse
    with pytest.raises(UserError, match=r"E738 .*the last time: Triton refused model 'm'\. Deploy it again"):
        watch.watch(server, lines.append)


def test_a_repository_that_is_refused_at_a_restart_is_told_at_once_with_its_place():
    fault = UserError("E709", "the Triton server was killed by SIGSEGV", "See its log")
    tried, lines = [], []

    def refuse():
        tried.append(1)
        raise UserError("E724", "Triton would load or run this file", "Move that model out", "repository/m/libtriton_m.so")

    server = SimpleNamespace(ports={}, fault=lambda: fault, restart=refuse, token=None)
    with pytest.raises(UserError, match=r"E724 repository/m/libtriton_m\.so: Triton would load or run this file"):
        watch.watch(server, lines.append)
    assert tried == [1] and lines == ["the Triton server was killed by SIGSEGV; starting again"]


def serving(repository, tmp_path, *options, stderr=None):
    """A `compress serve` of a repository, and its ports for HTTP and gRPC."""
    # a process that was started in the background ignores SIGINT, and so do its children
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{listen}; from pipelines.cli.commands import main; main()"
    command = [sys.executable, "-c", start, "serve", str(repository), *options]
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    outputs = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    process = subprocess.Popen([*command, *ports], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, **outputs)
    lines = []
    while (line := process.stdout.readline()) and "Ctrl-C" not in line:
        lines.append(line)
    return process, *(int(line.split(":")[1]) for line in lines[:2])


@pytest.fixture(scope="module")
def slow(tmp_path_factory, classifier):
    """A repository whose model waits 1.5 s for further requests to join a batch."""
    folder = tmp_path_factory.mktemp("slow")
    model = write_repository(folder, "bare", classifier, knobs=Knobs(max_batch_size=4))
    config = read_config(model)
    config.dynamic_batching.max_queue_delay_microseconds = 1_500_000
    write_config(config, model)
    return folder


def child(process, words):
    """The child of a process whose command line has these words: its process id."""
    children = Path("/proc", str(process.pid), "task", str(process.pid), "children").read_text().split()
    return next(int(pid) for pid in children if words in Path("/proc", pid, "cmdline").read_text())


@pytest.mark.usefixtures("triton")
def test_sigterm_answers_what_is_in_flight_and_refuses_the_rest(slow, tmp_path):
    """Also where the guard gets it, too: systemd sends it to every process of a service."""
    process, port, grpc_port = serving(slow, tmp_path)
    answers = []
    requests = [
        threading.Thread(target=lambda: answers.append(respond(port)[0])),
        threading.Thread(target=lambda: answers.append(respond_grpc(grpc_port))),
    ]
    for request in requests:
        request.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    os.kill(child(process, "guard_main"), signal.SIGTERM)
    assert "answering the requests in flight" in process.stdout.readline()
    status, body = respond(port)
    assert status == 503 and "E737" in body
    for request in requests:
        request.join()
    assert sorted(answers, key=str) == [200, [1, 3]]
    # Triton itself may need its whole --exit-timeout-secs where the cores are busy: 30 s by default, and what follows
    assert process.wait(60) == 0 and process.stdout.read() == "stopped\n"
    assert not list(tmp_path.glob("compress-triton-*"))


def reader_gone(kind):
    """The handle of a pipe, or of a terminal, whose other end is closed."""
    other, writer = os.pipe() if kind == "pipe" else os.openpty()
    os.close(other)
    return writer


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_that_nobody_reads_is_no_error(monkeypatch, stream, kind):
    """Neither at once, nor when the stream is closed at the end."""
    with os.fdopen(reader_gone(kind), "w") as broken:
        monkeypatch.setattr(sys, stream, broken)
        for _ in range(2):
            _tell("answering the requests in flight", err=stream == "stderr")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_on_a_full_disk_is_left_out_and_later_ones_come(monkeypatch, tmp_path, stream):
    with open("/dev/full", "w") as log, open(tmp_path / "log", "w") as space:
        monkeypatch.setattr(sys, stream, log)
        _tell("Triton ended; starting again", err=stream == "stderr")
        assert os.path.samestat(os.fstat(log.fileno()), os.stat("/dev/full")), "what it is written to stays"
        os.dup2(space.fileno(), log.fileno())
        _tell("serving again", err=stream == "stderr")
    assert (tmp_path / "log").read_text() == "serving again\n"


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_a_server_whose_lines_nobody_reads_serves_on_and_ends_in_order(slow, tmp_path):
    """As with `| head`, or `| tee log` that the same Ctrl-C ends."""
    process, port, _ = serving(slow, tmp_path, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stderr.close()
    os.kill(child(process, "tritonserver"), signal.SIGKILL)
    end = time.monotonic() + 60
    while respond(port, "/v2/health/ready", None)[0] == 200 and time.monotonic() < end:
        time.sleep(0.02)
    while respond(port, "/v2/health/ready", None)[0] != 200 and time.monotonic() < end:
        time.sleep(0.1)
    answers = []
    request = threading.Thread(target=lambda: answers.append(respond(port)[0]))
    request.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    request.join()
    assert answers == [200] and process.wait(60) == 0


def cut_off(port):
    with contextlib.suppress(OSError, http.client.HTTPException):
        respond(port)


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_a_second_ctrl_c_stops_at_once(slow, tmp_path):
    process, port, _ = serving(slow, tmp_path, "--drain", "60")
    request = threading.Thread(target=cut_off, args=[port])
    request.start()
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(25) == 130  # and not after the 30 s that requests in flight would have
    request.join()
    assert not list(tmp_path.glob("compress-triton-*"))


def test_too_little_shared_memory_is_told_before_the_start(repository, tmp_path, monkeypatch, triton):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=128, f_frsize=4096))
    with pytest.raises(UserError, match=r"E739 /dev/shm has 0\.5 MiB free, and these models need .*--shm-size=256m"):
        EmbeddedServer(repository, log_path=tmp_path / "log").start()


def test_what_killed_servers_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    living, killed = (tmp_path / f"compress-triton-{name}" for name in ("living", "killed"))
    claims = {}
    for stage in (living, killed):
        (stage / "models").mkdir(parents=True)
        claims[stage] = shared_memory.claim(stage)
        (tmp_path / "shm" / f"{stage.name}-region").touch()
    (tmp_path / "shm" / "compress-triton-older-region").touch()
    claims[killed].close()
    shared_memory.remove_left_overs()
    left = {path.name for path in (tmp_path / "shm").iterdir()}
    assert left == {f"{living.name}-region", f"{living.name}.lock", "compress-triton-older-region"}
    assert living.exists() and not killed.exists()


def test_what_another_user_put_into_shared_memory_is_neither_opened_nor_changed(tmp_path, monkeypatch):
    """To open a pipe waits until somebody writes into it."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    mine = tmp_path / "mine"
    mine.touch(0o644)
    for name in ("compress-triton-1.lock", "compress-triton-1-pipe"):
        os.mkfifo(tmp_path / name, 0o644)
    (tmp_path / "compress-triton-1-link").symlink_to(mine)
    (tmp_path / "compress-triton-1-folder").mkdir(0o755)
    (tmp_path / "compress-triton-1-region").touch(0o644)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    shared_memory.remove_left_overs()
    shared_memory.close_to_others("compress-triton-1")
    after = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert after == modes | {"compress-triton-1-region": 0o600}
    monkeypatch.setattr(os, "geteuid", lambda: mine.stat().st_uid + 1)
    (tmp_path / "compress-triton-1-region").chmod(0o644)
    shared_memory.close_to_others("compress-triton-1")
    assert (tmp_path / "compress-triton-1-region").stat().st_mode & 0o777 == 0o644


def test_a_log_that_cannot_be_written_is_a_coded_error(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(UserError, match=r"E710 .*logs/log: the server's log cannot be written \(.+\)"):
        open_log(tmp_path / "logs" / "log")


def test_each_server_has_its_log_and_old_ones_are_bounded(tmp_path, monkeypatch):
    for number in range(12):
        (tmp_path / f"serve-{number}.log").touch()
        (tmp_path / f"front-{number}.log").touch()
        os.utime(tmp_path / f"serve-{number}.log", (number, number))
    (tmp_path / "serve-gone.log").symlink_to(tmp_path / "none")  # as one that another process removes meanwhile
    with (tmp_path / "serve-0.log").open("ab") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        first, second = watch.new_log(tmp_path), watch.new_log(tmp_path)
    pattern = rf"serve-\d{{8}}-\d{{6}}-\d{{6}}-{os.getpid()}\.log"
    assert all(re.fullmatch(pattern, log.name) and log.parent == tmp_path for log in (first, second))
    assert first != second, "in a container the server before had the same number of a process"
    (tmp_path / "serve-gone.log").unlink(missing_ok=True)
    assert len(list(tmp_path.glob("serve-*"))) == len(list(tmp_path.glob("front-*"))) == watch.KEPT_LOGS == 10
    assert (tmp_path / "serve-0.log").exists() and (tmp_path / "front-0.log").exists()
    assert not (tmp_path / "serve-2.log").exists() and not (tmp_path / "front-2.log").exists()
