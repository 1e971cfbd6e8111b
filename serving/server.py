"""A real Triton Inference Server on 127.0.0.1, running for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compressor.errors import UserError, UserErrors
from serving import running
from serving.bundle import Bundle, environment, find_bundle, stage_backends
from serving.repository import model_names, refuse_code

HOST = "127.0.0.1"
SERVICES = ("http", "grpc", "metrics")
ATTEMPTS = 5
STOP_SECONDS = 10

CLOSED = "model-repository,shared-memory,trace,logging"
"""Triton's names of the protocols that are closed: load, unload or list models, attach memory, change traces and log."""
CLOSED_HEADER = "Closed: no request can"
"""Header that a request to CLOSED would need. Neither protocol allows such a header: a colon ends a header name in HTTP, and
gRPC refuses names with colons, spaces and capitals. (A secret would not suffice: every user can read a command line.)"""

# Triton must not outlive us, even when we are killed: PR_SET_PDEATHSIG = 1. Set between fork and exec by a small Python of its
# own, because a preexec_fn may deadlock in a process with threads.
LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {signal})
if os.getppid() == {parent}:
    os.execv(sys.argv[1], sys.argv[1:])
"""

# What Triton 2.51 writes in its log; a reason ends before the Python stack that follows it.
IN_USE = re.compile(r"Socket '[\d.]+:(\d+)' already in use")
STUB_DIED = re.compile(r"error while loading shared libraries: .+|.*'_recursion_count'|Stub process .*is not healthy")
NOT_LOADED = re.compile(r"(?:failed to load|Poll failed for model directory) '(.+?)'(?: version \d+)?: (.*?)(?:\\n|\"?$)", re.M)


class PortTaken(UserError):
    """E705: `port` is in use or not permitted."""

    def __init__(self, port: int, reason: str = os.strerror(errno.EADDRINUSE)):
        self.port = port
        fix = "Stop its owner, or choose another port (0: any free one)"
        super().__init__("E705", f"port {port} of {HOST} cannot be used ({reason})", fix)


class EmbeddedServer:
    """Serve the model repository `repository` with the Triton of the nvidia-pytriton wheel.

        with EmbeddedServer(repository, log_path=log) as server: ...   # server.url is "127.0.0.1:PORT"

    Port 0 takes any free one. `models` are the names to load, None for all of them. `ready_timeout` is in seconds. Triton's
    own output goes to `log_path`. The server ends with the thread that starts it, at the latest.

    It listens on 127.0.0.1 alone and serves the models that it started with: no request can load, unload or upload one, attach
    memory, or change traces and log. Inference, metadata, configs, statistics, health and metrics are open.
    """

    def __init__(
        self,
        repository: Path,
        *,
        log_path: Path,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        models: Sequence[str] | None = None,
        ready_timeout: float = 60,
    ):
        self.repository, self.log_path = Path(repository), Path(log_path)
        self.models, self.ready_timeout = models, ready_timeout
        self._requested_ports = (http_port, grpc_port, metrics_port)
        self.ports: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.stage: Path | None = None

    @property
    def url(self) -> str:
        """host:port of the HTTP endpoint; `ports` has those of all SERVICES."""
        return f"{HOST}:{self.ports['http']}"

    def start(self) -> EmbeddedServer:
        """Start and wait until every model is ready; on failure nothing is left behind.

        Raises UserError E701 to E704 (environment), E705 (port), E706 (repository), E724 (a model contains its own
        code), E707 (a model does not load), E708 (not ready in time), E709 (the server died), E710 (the server's record for
        clients cannot be written).
        """
        bundle, models = find_bundle(), models_to_load(self.repository, self.models)
        for attempt in itertools.count(1):
            try:
                return self._start(bundle, models)
            except PortTaken as error:
                # the chosen port can be taken before Triton binds it
                if error.port in self._requested_ports or attempt == ATTEMPTS:
                    raise

    def _start(self, bundle: Bundle, models: Sequence[str]) -> EmbeddedServer:
        try:
            self.ports = dict(zip(SERVICES, choose_ports(self._requested_ports), strict=True))
            self.stage = Path(tempfile.mkdtemp(prefix="compress-triton-"))
            stage_backends(bundle, self.stage / "backends")
            self._link(models)
            self._launch(bundle)
            self._wait_until_ready()
            running.announce(self.ports["http"], self.repository, self.process.pid)
        except BaseException:
            self.stop()
            raise
        return self

    def _link(self, models: Sequence[str]) -> None:
        """Create links to the models to load, and no others: without model control Triton loads a whole repository."""
        self._linked.mkdir()
        for name in models:
            (self._linked / name).symlink_to((self.repository / name).resolve(), target_is_directory=True)

    @property
    def _linked(self) -> Path:
        return self.stage / "models"

    def _launch(self, bundle: Bundle) -> None:
        lock = f"{CLOSED}:{CLOSED_HEADER}={secrets.token_hex()}"
        options = [
            f"--model-repository={self._linked}",
            f"--backend-directory={self.stage / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self.stage.name}-",
            "--model-control-mode=none",
            f"--http-restricted-api={lock}",
            f"--grpc-restricted-protocol={lock}",
            # environment variables of cloud platforms enable these endpoints on all addresses and disable the others
            "--allow-sagemaker=false",
            "--allow-vertex-ai=false",
            *(f"--allow-{service}=true" for service in SERVICES),
            *(f"--{service}-address={HOST}" for service in SERVICES),
            *(f"--{service}-port={port}" for service, port in self.ports.items()),
            f"--exit-timeout-secs={STOP_SECONDS // 2}",
        ]
        launch = LAUNCH.format(signal=signal.SIGTERM.value, parent=os.getpid())
        command = [sys.executable, "-IS", "-c", launch, str(bundle.server), *options]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(bundle), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.ready_timeout
        while not is_ready(self.ports["http"]):
            ended = self.process.poll() is not None
            if ended or STUB_DIED.search(self._log()):  # Triton keeps waiting for a dead stub
                raise diagnose(self._log(), self.log_path)
            if time.monotonic() > deadline:
                fix = f"Raise the timeout, or see why in {self.log_path}"
                raise UserError("E708", f"the Triton server was not ready within {self.ready_timeout:g} s", fix)
            time.sleep(0.05)

    def wait(self) -> None:
        """Block while the server runs. Raises UserError E709 (or a more specific one, from its log) when it ends by itself."""
        self.process.wait()
        raise diagnose(self._log(), self.log_path)

    def _log(self) -> str:
        """Triton's log, with links into the repository replaced by its own path."""
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return log.replace(str(self._linked), str(self.repository))

    def stop(self) -> None:
        """Stop the server and its child processes, and remove its files. Has no effect when it is not running."""
        if self.process is not None:
            running.withdraw(self.ports["http"])
            try:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # the stubs are in the server's process group
                self.process.wait()
                self.process = None
        if self.stage is not None:
            for region in Path("/dev/shm").glob(f"{self.stage.name}-*"):
                region.unlink(missing_ok=True)
            shutil.rmtree(self.stage)
            self.stage = None

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()


def models_to_load(repository: Path, names: Sequence[str] | None) -> Sequence[str]:
    """The models to load: `names`, or all. Raises UserError E706 when the repository lacks them, E724 when a model contains
    code."""
    available = model_names(repository)
    if not available:
        fault = "holds no model" if repository.is_dir() else "does not exist"
        raise UserError("E706", f"the model repository {fault}", "Give the folder that a deploy stage wrote", str(repository))
    if missing := [name for name in names or () if name not in available]:
        raise UserError("E706", f"no model '{missing[0]}'", f"Models: {', '.join(available)}", str(repository))
    chosen = available if names is None else names
    refuse_code(repository, chosen)
    return chosen


def choose_ports(ports: Sequence[int]) -> list[int]:
    """The requested ports, each 0 replaced by a free one. Raises PortTaken."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in ports]
        for listener, port in zip(sockets, ports, strict=True):
            # as Triton does: a port with lingering connections only is free
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError as error:
                raise PortTaken(port, error.strerror) from error
        return [listener.getsockname()[1] for listener in sockets]


def is_ready(port: int) -> bool:
    """Whether the server on `port` is ready, its models included."""
    connection = http.client.HTTPConnection(HOST, port, timeout=1)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def diagnose(log: str, log_path: Path) -> UserError:
    """The reason why the server failed, from its log: E705 (port), E703 (stub and libpython), E707 (models) or E709 (other)."""
    if in_use := IN_USE.search(log):
        return PortTaken(int(in_use[1]))
    if stub := STUB_DIED.search(log):
        fix = f"Use a Python whose own shared libpython is installed; Triton's log is {log_path}"
        return UserError("E703", f"Triton's Python stub does not run with {sys.executable} ({stub[0]})", fix)
    fix = f"Fix its config.pbtxt or deploy it again; Triton's log is {log_path}"
    refused = [UserError("E707", f"Triton refused model '{name}': {reason}", fix) for name, reason in NOT_LOADED.findall(log)]
    if refused:
        return refused[0] if len(refused) == 1 else UserErrors(refused)
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return UserError("E709", f"the Triton server ended by itself; its last line: {last}", f"See its log, {log_path}")
