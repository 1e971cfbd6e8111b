"""One process of Triton and its model processes (stubs): its command line, its end, and the reason for it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from compressor.errors import UserError, UserErrors
from compressor.locking import lock_where_possible
from serving.bundle import Bundle, environment
from serving.child_status import status_of
from serving.server_log import open_log
from serving.shared_memory import MORE_MEMORY, close_to_others

STOP_SECONDS = 10
STACK_BYTES = 64 << 20
"""Of each of Triton's threads, in address space: its HTTP server puts lists of a body's pieces there. See guard.proxy."""

# A server must not outlive us, even when we are killed: PR_SET_PDEATHSIG = 1. Set between fork and exec by a small Python of
# its own, because a preexec_fn may deadlock in a process with threads.
LAUNCH = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(1, {signal})
for limit, wanted in ((resource.RLIMIT_STACK, {stack}), (resource.RLIMIT_NOFILE, None)):
    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (most if wanted is None or 0 <= most < wanted else wanted, most))
if os.getppid() == {parent}:
    os.execv(sys.argv[1], sys.argv[1:])
"""

# What Triton 2.51 writes in its log; a reason ends before the Python stack that follows it.
IN_USE = re.compile(r"Socket '[\d.]+:(\d+)' already in use")
NO_MEMORY = re.compile(r"Unable to initialize shared memory key .*No space left on device")
STUB_DIED = re.compile(r"error while loading shared libraries: .+|.*'_recursion_count'|Stub process .*is not healthy")
NOT_LOADED = re.compile(r"(?:failed to load|Poll failed for model directory) '(.+?)'(?: version \d+)?: (.*?)(?:\\n|\"?$)", re.M)
NOISE = re.compile(r"NODELAY NOT SUPPORTED|^\s*$|^ *\d+# 0x")
"""Lines that say nothing: about Unix sockets, and the addresses of a stack."""
STUB = re.compile(r"[^\0]+\0[^/\0]+/(?P<model>[^/\0]+)/\d+/")
"""A stub's command line begins with the program and a file of the version, in the folder of models. The name of the instance,
which it has as well, may be of the config's choice."""
UNNAMED = "?"
"""The model of a process that shows no arguments, because it has ended."""


class PortTaken(UserError):
    """E705: `port` is in use or not permitted."""

    def __init__(self, port: int, reason: str = "Address already in use"):
        self.port = port
        fix = "Stop its owner, or choose another port (0: any free one)"
        super().__init__("E705", f"port {port} of 127.0.0.1 cannot be used ({reason})", fix)

    def __reduce__(self) -> tuple:
        return type(self), (self.port,)


class TritonProcess:
    """Triton with the command-line `options`, in the folder `stage`; its output is appended to `log_path`.

    `shown` are strings of the log and what to show in their place. Raises UserError E710 where the log cannot be written.
    """

    def __init__(self, bundle: Bundle, stage: Path, options: Sequence[str], log_path: Path, shown: Mapping[str, str]):
        self.stage, self.log_path, self.shown = stage, log_path, shown
        self._log_start = log_path.stat().st_size if log_path.is_file() else 0
        self.ready = False
        self.stubs: dict[int, str] = {}
        with open_log(log_path) as log:
            lock_where_possible(log.fileno(), fcntl.LOCK_SH)  # held as long as Triton has the file open: see watch.new_log
            self.process = subprocess.Popen(
                bound_to_us(str(bundle.server), *options),
                cwd=stage,
                env=environment(bundle),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self, seconds: float) -> None:
        """Return when every model is ready, its shared memory closed to other users. Raises UserError E708 after `seconds`, and
        those of `diagnose`."""
        deadline = time.monotonic() + seconds
        while not is_ready(self.stage / "http.sock"):
            close_to_others(self.stage.name)
            ended = status_of(self.process) is not None
            if ended or STUB_DIED.search(self.log()):  # Triton keeps waiting for a dead stub
                raise diagnose(self.log(), self.log_path, self.process.poll())
            if time.monotonic() > deadline:
                fix = f"See why in {self.log_path}; free memory and processors, and try again"
                raise UserError("E708", f"the Triton server was not ready within {seconds:g} s", fix)
            time.sleep(0.05)
        close_to_others(self.stage.name)
        self.find_stubs()
        self.ready = True

    def find_stubs(self) -> None:
        """Record the model processes: more, or others, after a model was loaded or unloaded."""
        found = stubs_of(self.process.pid)
        # one that ended since the last look stays, under the name that it had
        self.stubs = {
            pid: self.stubs.get(pid, UNNAMED) if model == UNNAMED else model
            for pid, model in found.items()
            if pid in self.stubs or not ended_with(pid)
        }

    def fault(self) -> UserError | None:
        """Why the server does not work any more: it, or one of its stubs, has ended. None while all is well."""
        if (status := status_of(self.process)) is not None:
            how = ending(status) or "ended by itself"
            return UserError("E709", f"the Triton server {how}", f"See its log, {self.log_path}")
        for pid, model in self.stubs.items():
            if end := ended_with(pid):
                what = f"the process of model '{model}' {end}"
                return UserError("E743", what, f"If it happens again see {self.log_path}, and the kernel's log for memory")
        return None

    def log(self) -> str:
        """What this process wrote, with paths as the user knows them."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode("utf-8", errors="replace")
        for string, replacement in self.shown.items():
            text = text.replace(string, replacement)
        return text

    def stop(self, seconds: float) -> None:
        """End it and its stubs; what still runs after `seconds` is killed."""
        try:
            if seconds:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the stubs are in the server's process group
            self.process.wait()
            with contextlib.suppress(ChildProcessError):  # its stubs are ours only where we adopt orphans
                while True:
                    os.waitpid(-self.process.pid, 0)


def bound_to_us(*command: str) -> list[str]:
    """The command that runs `command`, a program's path and its arguments, until the thread that starts it ends."""
    launch = LAUNCH.format(signal=signal.SIGTERM.value, parent=os.getpid(), stack=STACK_BYTES)
    return [sys.executable, "-IS", "-c", launch, *command]


def stubs_of(group: int) -> dict[int, str]:
    """The stubs in the process group of a server: model names by process id."""
    stubs = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.name)) == group and int(path.name) != group:
                found = STUB.match((path / "cmdline").read_text(errors="replace"))
                stubs[int(path.name)] = found["model"] if found else UNNAMED
    return stubs


def ended_with(pid: int) -> str:
    """How a process that is not our child has ended, such as 'was killed by SIGKILL'; empty while it runs, or ended well."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:  # reaped by its parent: the model was unloaded
        return ""
    if fields[0] not in "ZX":
        return ""
    status = int(fields[-1])
    return ending(-(status & 127) if status & 127 else status >> 8)


def ending(status: int) -> str:
    """A process's exit status, negative for a signal, in words; empty for 0."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
    return f"ended with exit code {status}" if status else ""


def is_ready(path: Path) -> bool:
    """Whether the server on the Unix socket `path` has started; a model may still load (--strict-readiness=false)."""
    connection = http.client.HTTPConnection("triton", timeout=1)
    try:
        connection.sock = connect(path)
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def connect(path: Path) -> socket.socket:
    """A connection to a Unix socket, whose path may be longer than the 107 bytes that the kernel takes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(1)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def diagnose(log: str, log_path: Path, status: int | None = None) -> UserError:
    """Why the server failed: E705 (port), E703 (stub and libpython), E707 (models) or E709 (other, with its signal)."""
    if in_use := IN_USE.search(log):
        return PortTaken(int(in_use[1]))
    if NO_MEMORY.search(log):
        return UserError("E739", "there is no space left in /dev/shm for the processes of these models", MORE_MEMORY)
    if stub := STUB_DIED.search(log):
        fix = f"Use a Python whose own shared libpython is installed; Triton's log is {log_path}"
        return UserError("E703", f"Triton's Python stub does not run with {sys.executable} ({stub[0]})", fix)
    fix = f"Fix its config.pbtxt or deploy it again; Triton's log is {log_path}"
    refused = [UserError("E707", f"Triton refused model '{name}': {reason}", fix) for name, reason in NOT_LOADED.findall(log)]
    if refused:
        return refused[0] if len(refused) == 1 else UserErrors(refused)
    if status:
        return UserError("E709", f"the Triton server {ending(status)}", f"See its log, {log_path}")
    last = next((line for line in reversed(log.splitlines()) if not NOISE.search(line)), "no output")
    return UserError("E709", f"the Triton server ended by itself; its last line: {last}", f"See its log, {log_path}")
