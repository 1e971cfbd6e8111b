"""The embedded server: starts, stops without a trace, and says why it cannot start."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from triton_parts import QuickServer, processes_of

from compressor.errors import UserError
from serving import server, server_registry
from serving.layout.knobs import Knobs
from serving.repository import read_config, write_repository
from serving.repository_safety import refuse_unsafe
from serving.server import EmbeddedServer
from serving.triton_process import TritonProcess, diagnose

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder of the test's own: what a server leaves behind shows."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


@pytest.fixture
def launched(monkeypatch):
    """Every process that is started: the guard, then Triton."""
    processes, popen = [], subprocess.Popen

    def record(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    return processes


def gone(group, seconds=10):
    deadline = time.monotonic() + seconds
    while processes_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_of(group)


def answers(embedded, model):
    with urllib.request.urlopen(f"http://{embedded.url}/v2/models/{model}/ready") as response:
        return response.status == 200


def lock(folder):
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def listening():
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


@pytest.mark.usefixtures("triton")
def test_stop_leaves_no_process_no_file_and_no_note(repository, tmp_path, temporary):
    embedded = EmbeddedServer(repository, log_path=tmp_path / "log", models=["reviews"])
    with embedded:
        group, port, grpc_port = embedded.triton.process.pid, embedded.ports["http"], embedded.ports["grpc"]
        assert {"tritonserver", "triton_python_b"} <= set(processes_of(group))
        assert {server_registry.served_repository("localhost", number) for number in (port, grpc_port)} == {repository}
        regions = f"{embedded.stage.name}-*"
        assert list(Path("/dev/shm").glob(regions))
        with pytest.raises(BlockingIOError):  # systemd-tmpfiles takes it before it deletes what is old in a folder
            lock(embedded.stage)
    assert gone(group)
    assert not list(temporary.iterdir()) and not list(Path("/dev/shm").glob(regions))
    assert not server_registry.registry_file(port).exists() and not server_registry.registry_file(grpc_port).exists()
    server_registry.announce(port, repository, os.getpid())
    embedded.stop()
    assert server_registry.registry_file(port).exists(), "by now it is the record of another server on that port"
    server_registry.withdraw(port)


@pytest.mark.usefixtures("triton")
def test_a_killed_parent_takes_the_server_with_it(repository, tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from serving.server import EmbeddedServer
with EmbeddedServer(Path({str(repository)!r}), log_path=Path({str(tmp_path / "log")!r}), models=["bare"]) as server:
    print(server.triton.process.pid, server.guard.process.pid, flush=True)
    time.sleep(60)
"""
    variables = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as parent:
        groups = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(groups) == 2 and all(map(processes_of, groups))
        parent.kill()
        parent.wait()
        (stage,) = tmp_path.glob("compress-triton-*")
        lock(stage)  # at once: none of its processes holds it
    assert all(map(gone, groups))


@pytest.mark.usefixtures("triton")
def test_a_refused_model_gives_tritons_reason_and_leaves_nothing(tmp_path, classifier, temporary, launched):
    config = write_repository(tmp_path / "repository", "renamed", classifier) / "config.pbtxt"
    config.write_text(config.read_text().replace("attention_mask", "mask"))
    with pytest.raises(UserError) as caught:
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()
    assert caught.value.code == "E707" and caught.value.exit_code == 2
    assert "'renamed'" in str(caught.value) and "unexpected inference input 'mask', allowed inputs are" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert all(gone(process.pid) for process in launched) and not list(temporary.iterdir())


@pytest.mark.usefixtures("triton")
def test_a_port_lost_to_a_race_is_chosen_again_and_a_crash_is_reported(repository, tmp_path, temporary, launched, monkeypatch):
    listener, taken = listening()
    choose, choices = server.free_port, []

    def lose_the_first(port):
        choices.append(choose(port) if choices else taken)
        return choices[-1]

    monkeypatch.setattr(server, "free_port", lose_the_first)
    with listener, EmbeddedServer(repository, log_path=tmp_path / "log", models=()) as embedded:
        assert embedded.ports["grpc"] == choices[1] != taken
        assert embedded.fault() is None
        launched[-1].kill()
        launched[-1].wait()
        assert "E709 the Triton server was killed by SIGKILL" in str(embedded.fault())
        with socket.create_server(("127.0.0.1", choices[1])):
            embedded.restart()
            assert embedded.fault() is None and embedded.ports["grpc"] == choices[2] not in choices[:2]
    assert len(launched) == 5 and all(gone(process.pid) for process in launched)


@pytest.mark.usefixtures("triton")
def test_a_triton_that_aborts_while_it_starts_is_started_again(repository, tmp_path, launched, monkeypatch):
    """Triton 2.51 does so now and then where its models start on busy cores; each start after it is as likely to work."""
    wait, waits = TritonProcess.wait_until_ready, []

    def abort_the_first(triton, seconds):
        waits.append(seconds)
        if len(waits) < 3:
            triton.process.send_signal(signal.SIGABRT)
        wait(triton, seconds)

    monkeypatch.setattr(TritonProcess, "wait_until_ready", abort_the_first)
    # with model control Triton is told what to load, which it must be told anew
    with EmbeddedServer(repository, log_path=tmp_path / "log", models=["bare"], token="a-token-of-sixteen") as embedded:
        assert len(waits) == 3 and embedded.fault() is None
        assert answers(embedded, "bare")
        launched[-1].kill()
        launched[-1].wait()
        embedded.ready_timeout = 0
        with pytest.raises(UserError, match="E708"):
            embedded.restart()
        embedded.ready_timeout = 60
        embedded.restart()
        assert answers(embedded, "bare")
    assert all(gone(process.pid) for process in launched)


@pytest.mark.usefixtures("triton")
def test_a_server_that_is_not_ready_in_time_is_stopped(repository, tmp_path, temporary, launched):
    with pytest.raises(UserError, match=r"E708 .* not ready within 0 s\. See why in .*log; free memory"):
        EmbeddedServer(repository, log_path=tmp_path / "log", ready_timeout=0).start()
    assert all(gone(process.pid) for process in launched) and not list(temporary.iterdir())


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("service", server.SERVICES)
def test_a_port_in_use_is_named(repository, tmp_path, launched, service):
    listener, port = listening()
    with listener, pytest.raises(UserError, match=rf"E705 port {port} of 127.0.0.1 cannot be used \(Address already in use\)"):
        EmbeddedServer(repository, log_path=tmp_path / "log", **{f"{service}_port": port}).start()
    assert not launched


@pytest.mark.usefixtures("triton")
def test_a_repository_without_the_models_is_refused(repository, tmp_path):
    for folder, models, words in (
        (tmp_path / "nowhere", None, "does not exist"),
        (tmp_path, None, "holds no model"),
        (repository, ["reviews", "views"], "no model 'views'. Models: bare, reviews"),
    ):
        with pytest.raises(UserError, match=f"E706 .*{words}"):
            EmbeddedServer(folder, log_path=tmp_path / "log", models=models).start()


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'backend: "onnxruntime"',
            'backend: "python"',
            r"the backend is 'python', not one of .*onnxruntime, openvino\. Move that model out of the repository; no code",
        ),
        ('backend: "onnxruntime"', "", "the backend is '', not one of"),
        ("", 'parameters {{key: "EXECUTION_ENV_PATH" value {{string_value: "{code}"}}}}', "EXECUTION_ENV_PATH loads a Python"),
        ("", 'parameters {{key: "TRITON_BATCH_STRATEGY_PATH" value {{string_value: "{code}/x"}}}}', "PATH loads a library"),
        ("", 'runtime: "libx.so"', "runtime loads a library"),
        ("", 'model_operations {{ op_library_filename: "{code}/x" }}', "model_operations loads a library"),
        ("", 'model_repository_agents {{ agents {{ name: "x" }} }}', "model_repository_agents loads a library"),
        ("", 'instance_group {{ name: "a$(touch ran)" }}', r"an instance group is 'a\$\(touch ran\)', and Triton .* shell"),
        ("", 'default_model_filename: "a;touch ran"', "default_model_filename is 'a;touch ran', and Triton .* shell"),
        ('name: "reviews"', 'name: "rev+x"', r"the model's name is 'rev\+x', which clients quote .*\. Use letters a to z"),
        ('name: "reviews"', 'name: "a b"', "the model's name is 'a b', and Triton .* shell"),
        ('name: "reviews"', 'name: "a\\ntouch ran"', r"the model's name is 'a\\ntouch ran', and Triton .* shell"),
    ],
)
def test_a_repository_that_brings_code_is_not_served(tmp_path, classifier, launched, old, new, words):
    """Triton's Python backend would run the model.py of a run folder that somebody else made."""
    model = write_repository(tmp_path / "repository", "reviews", classifier)
    (model / "1" / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace(old, new.format(code=model), 1))
    model.rename(model.with_name(read_config(model).name))
    with pytest.raises(UserError, match=rf"E724 .*/config\.pbtxt: .*{words}"):
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()
    assert not launched and not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "name",
    [
        "libtriton_onnxruntime.so",
        "1/libtriton_onnxruntime.so",
        "1/libtriton_python.so.1",
        "1/batchstrategy.so",
        "triton_python_backend_stub",
    ],
)
def test_a_library_or_program_in_a_repository_is_not_loaded(tmp_path, classifier, launched, name):
    """Triton takes these before its own, whatever the config says."""
    model = write_repository(tmp_path / "repository", "reviews", classifier)
    (model / name).touch()
    with pytest.raises(UserError, match=rf"E724 .*reviews/{name}: Triton would load or run this file"):
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()
    assert not launched


@pytest.mark.usefixtures("triton", "launched")
def test_logs_may_lie_where_there_are_no_locks(tmp_path, classifier, monkeypatch):
    """A log is only marked as in use, and a run may lie on a share of NFS 3."""
    flock = fcntl.flock

    def refused(handle, operation):
        if os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}").startswith(str(tmp_path)):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(TritonProcess, "wait_until_ready", lambda triton, seconds: None)
    write_repository(tmp_path / "repository", "reviews", classifier)
    with QuickServer(tmp_path / "repository", log_path=tmp_path / "log") as embedded:
        assert embedded.triton.log_path.is_file()


@pytest.mark.usefixtures("triton")
def test_nor_is_one_that_comes_before_a_restart(tmp_path, classifier, launched, monkeypatch):
    """Triton would run it when it is started again, which the server does by itself after a crash."""

    def crash(triton, seconds):
        triton.process.kill()
        triton.process.wait()

    monkeypatch.setattr(TritonProcess, "wait_until_ready", crash)
    model = write_repository(tmp_path / "repository", "reviews", classifier)
    with QuickServer(tmp_path / "repository", log_path=tmp_path / "log") as embedded:
        (model / "triton_python_backend_stub").touch()
        with pytest.raises(UserError, match=r"E724 .*reviews/triton_python_backend_stub: Triton would load or run this file"):
            embedded.restart()
        assert len(launched) == 2
        (model / "triton_python_backend_stub").unlink()
        embedded.restart()
        assert len(launched) == 3


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("config", "file"),
    [
        ('output {{ label_filename: "../../secret.txt" }}', r"\.\./\.\./secret\.txt"),
        ('output {{ label_filename: "link.txt" }}', r"link\.txt"),
        ('output {{ label_filename: "labels.txt\\000/x" }}', r"labels\.txt\\x00/x"),
        ('default_model_filename: "../../../secret.txt"', r"\.\./\.\./\.\./secret\.txt"),
        ('default_model_filename: "{secret}"', ".*/secret.txt"),
        ('cc_model_filenames {{ key: "8.0" value: "../../secret.txt" }}', r"\.\./\.\./secret\.txt"),
        (
            'model_warmup {{ inputs {{ key: "x" value {{ input_data_file: "../../../secret.txt" }} }} }}',
            r"warmup/\.\./\.\./\.\./secret\.txt",
        ),
        (
            'sequence_batching {{ state {{ initial_state {{ data_file: "../../../secret.txt" }} }} }}',
            r"initial_state/\.\./\.\./\.\./secret\.txt",
        ),
    ],
)
def test_a_config_names_no_file_outside_the_repository(tmp_path, classifier, launched, config, file):
    """Triton would answer with lines of such a file as labels."""
    model = write_repository(tmp_path / "repository", "reviews", classifier)
    secret = tmp_path / "secret.txt"
    secret.touch()
    (model / "link.txt").symlink_to(secret)
    with (model / "config.pbtxt").open("a") as written:
        written.write(config.format(secret=secret))
    with pytest.raises(UserError, match=rf"E724 .*reviews/config\.pbtxt: it names '{file}', which leads out of the repository"):
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()
    assert not launched


def test_what_others_may_write_into_a_repository(tmp_path, classifier):
    """Such as names that a shell takes as they are, subfolders, links to blobs of the hub, and the user's own links to a model
    and a version elsewhere."""
    repository, blob, name = tmp_path / "snapshots" / "0123", tmp_path / "blobs" / "4567", "_a.b-1"
    model = write_repository(repository, "reviews", classifier).rename(repository / name)
    for file in (blob, model / "labels.txt", model / "1" / "sub" / "model.something", model / "warmup" / "sample"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    (model / "blob.txt").symlink_to(blob)
    (model / "same.txt").symlink_to("labels.txt")
    labels = " ".join(f'output {{ label_filename: "{file}" }}' for file in ("labels.txt", "blob.txt", "same.txt"))
    (model / "config.pbtxt").write_text(
        f'name: "{name}" backend: "onnxruntime" runtime: "model.py" default_model_filename: "sub/model.something" {labels}'
        'instance_group { name: "_a+b=c:d@e%f,g.h-1" }'
        'model_warmup { inputs { key: "x" value { input_data_file: "sample" } } }'
    )
    refuse_unsafe(repository, [name])
    model.rename(tmp_path / name).joinpath("1").rename(tmp_path / "first")
    model.symlink_to(tmp_path / name)
    (model / "1").symlink_to(tmp_path / "first")
    refuse_unsafe(repository, [name])


@pytest.mark.usefixtures("triton")
def test_folders_with_spaces(tmp_path, classifier, monkeypatch):
    """Triton writes paths into a shell command as they are."""
    (tmp_path / "a b;c").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b;c"))
    repository = tmp_path / "my models"
    write_repository(repository, "bare", classifier, knobs=Knobs(instances=1, max_batch_size=0))
    with QuickServer(repository, log_path=tmp_path / "log", ready_timeout=20) as embedded:
        assert answers(embedded, "bare")


def test_a_missing_extra_names_the_extra(repository, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytriton", None)
    with pytest.raises(UserError, match=r"E701 .*needs pytriton. Run: pip install 'compress-pipeline\[triton\]'"):
        EmbeddedServer(repository, log_path=tmp_path / "log").start()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"E710 .*Set XDG_CACHE_HOME"):
        server_registry.announce(8000, tmp_path, pid=1)
    server_registry.withdraw(8000)  # a server that could not be announced is stopped all the same


@pytest.mark.usefixtures("triton")
def test_a_log_that_cannot_be_written_is_named(repository, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"E710 .*the server's log cannot be written .*Set XDG_CACHE_HOME"):
        EmbeddedServer(repository, log_path=tmp_path / "file" / "log").start()


@pytest.mark.usefixtures("triton")
def test_an_environment_that_cannot_run_the_stub_is_refused(repository, tmp_path, monkeypatch):
    embedded = EmbeddedServer(repository, log_path=tmp_path / "log")
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"E702 .*no stub for Python 3\.7.* 3\.11, 3\.12"):
        patch.setattr(sys, "version_info", (3, 7))
        embedded.start()
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"E703 .*needs libpythonNONE\.so\.1\.0"):
        patch.setattr(sysconfig, "get_config_var", lambda name: "NONE")
        embedded.start()
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"E704 .*numpy 2\.1\.0"):
        patch.setattr("importlib.metadata.version", lambda name: "2.1.0")
        embedded.start()


@pytest.mark.parametrize(
    ("code", "log", "words"),
    [
        ("E703", "/x/stub: error while loading shared libraries: libpython3.11.so.1.0: cannot open", "libpython3.11.so.1.0"),
        (
            "E703",
            "failed to load 'm' version 1: AttributeError: '_thread.RLock' object has no attribute '_recursion_count'",
            "'_recursion_count'",
        ),
        (
            "E707",
            "Poll failed for model directory 'm': failed to read text proto from /r/m/config.pbtxt\"",
            "'m': failed to read text proto from /r/m/config.pbtxt. Fix",
        ),
        (
            "E707",
            "failed to load 'a' version 1: one\\n\\nAt:\\n x\"\nE 1] \"failed to load 'b' version 1: two\"",
            "triton.log\nE707 Triton refused model 'b': two. Fix",
        ),
        (
            "E739",
            "failed to load 'm' version 1: Internal: Unable to initialize shared memory key 'x': No space left on device. Fix",
            "--shm-size=256m",
        ),
        ("E709", 'fine"\nterminate called: out of memory\n\n', "terminate called: out of memory"),
    ],
)
def test_the_log_says_why_a_server_ended(code, log, words):
    error = diagnose(f'E1121 05:12:56.744623 4829 model_lifecycle.cc:642] "{log}', Path("triton.log"))
    assert error.code == code and words in str(error) and (code == "E739" or "triton.log" in str(error))
