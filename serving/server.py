"""A real Triton Inference Server on 127.0.0.1, running for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from compressor.errors import UserError
from compressor.locking import lock_where_possible
from serving import server_registry, shared_memory
from serving.bundle import Bundle, find_bundle, stage_backends
from serving.child_status import status_of
from serving.guard.guard_process import GuardProcess
from serving.guard.model_control import SECRET_HEADER
from serving.repository import model_names, read_config
from serving.repository_safety import refuse_unsafe
from serving.server_log import open_log
from serving.shared_memory import MAX_BODY
from serving.triton_process import STOP_SECONDS, PortTaken, TritonProcess

HOST = "127.0.0.1"
SERVICES = ("http", "grpc", "metrics")
ATTEMPTS = 5
BACKLOG = 1024
DRAIN_SECONDS = 2
MODELS, BACKENDS = "served-models", "backends"
"""Triton's folders, in the stage that it is started in. It is told these names and not their paths: it writes them unquoted
into a shell command, and the names of the temporary folder and of the repository may hold anything."""

CLOSED = ("model-repository", "shared-memory", "trace", "logging")
"""Triton's names of the protocols that are closed: load, unload or list models, attach memory, change traces and log."""
CLOSED_HEADER = "Closed: no request can"
"""Header that a request to CLOSED would need. Neither protocol allows such a header: a colon ends a header name in HTTP, and
gRPC refuses names with colons, spaces and capitals. (A secret would not suffice: every user can read a command line.)"""


class EmbeddedServer:
    """Serve the model repository `repository` with the Triton of the nvidia-pytriton wheel.

        with EmbeddedServer(repository, log_path=log) as server: ...   # server.url is "127.0.0.1:PORT"

    Port 0 takes any free one. `models` are the names to load, None for all of them. `ready_timeout` is in seconds, `max_body`
    in bytes, of one HTTP request; requests in flight have `exit_seconds` when it is stopped. The output of all processes goes
    to `log_path`. They end with the thread that starts them, at the latest.

    It listens on 127.0.0.1 alone. HTTP and metrics are answered by a guard, which checks requests (`serving.guard.proxy`);
    Triton itself listens on Unix sockets in a folder of this user's own, and on the port for gRPC. Without `token` it serves
    the models that it started with: no request can load, unload or upload one, attach memory, or change traces and log. With
    `token`, HTTP requests with `Authorization: Bearer TOKEN` can load, unload and list the models of the repository's folder.
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
        max_body: int = MAX_BODY,
        token: str | None = None,
        exit_seconds: float = STOP_SECONDS / 2,
    ):
        self.repository, self.log_path = Path(repository), Path(log_path)
        self.models, self.ready_timeout, self.max_body = models, ready_timeout, max_body
        self.token, self.exit_seconds = token, exit_seconds
        self._requested_ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        for name, port in self._requested_ports.items():
            if port not in range(65536):
                raise ValueError(f"{name}_port is {port!r}: 0 to 65535, and 0 is any free one")
        self.ports: dict[str, int] = {}
        self.triton: TritonProcess | None = None
        self.guard: GuardProcess | None = None
        self.stage: Path | None = None
        self._claim: IO[str] | None = None
        self._stage_lock: int | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._announced: set[int] = set()
        self._loaded: Sequence[str] = ()
        self._secret = secrets.token_hex()

    @property
    def url(self) -> str:
        """host:port of the HTTP endpoint; `ports` has those of all SERVICES."""
        return f"{HOST}:{self.ports['http']}"

    def start(self) -> EmbeddedServer:
        """Start and wait until every model is ready; on failure nothing is left behind.

        Raises UserError E701 to E704 (environment), E705 (port), E706 (repository), E724 (a model brings code, or names files
        outside), E727 (its versions), E739 (too little shared memory), E707 (a model does not load), E708 (not ready in time),
        E709 (the server died), E742 (the guard did not start), E710 (its log, or its record for clients, cannot be written).
        """
        bundle, models = find_bundle(), models_to_load(self.repository, self.models, required=self.token is None)
        shared_memory.remove_left_overs()
        shared_memory.check_space(sum(instances(self.repository / name) for name in models), self.max_body)
        try:
            self._listen()
            self.stage = Path(tempfile.mkdtemp(prefix=shared_memory.PREFIX))
            self._stage_lock = lock_folder(self.stage)
            self._claim = shared_memory.claim(self.stage)
            stage_backends(bundle, self.stage / BACKENDS)
            self._link(models)
            with open_log(self.log_path) as log:
                log.truncate(0)
            self._start_guard()
            self._find_port_and_start(bundle)
            self._announce()
        except BaseException:
            self.stop(0)
            raise
        return self

    def _announce(self) -> None:
        """Record this server under the ports that a client may know it by; that of gRPC may change with a restart."""
        ports = {self.ports["http"], self.ports["grpc"]}
        self._withdraw(self._announced - ports)
        for port in ports - self._announced:
            server_registry.announce(port, self.repository, os.getpid())
            self._announced.add(port)

    def _withdraw(self, ports: set[int]) -> None:
        for port in ports:
            server_registry.withdraw(port)
        self._announced = self._announced - ports

    def _listen(self) -> None:
        """Listen on the ports of HTTP and metrics, which stay open through restarts, and choose that of gRPC."""
        for service in ("http", "metrics"):
            listener = socket.socket()
            self._sockets[service] = listener
            bind(listener, self._requested_ports[service])
            listener.listen(BACKLOG)
            self.ports[service] = listener.getsockname()[1]
        self.ports["grpc"] = free_port(self._requested_ports["grpc"])

    def _link(self, models: Sequence[str]) -> None:
        """Link the repository, or without model control, where Triton loads a whole one, the models to load and no others."""
        linked, self._loaded = self.stage / MODELS, sorted(models)
        if self.token:
            linked.symlink_to(self.repository.resolve(), target_is_directory=True)
            return
        linked.mkdir()
        for name in models:
            (linked / name).symlink_to((self.repository / name).resolve(), target_is_directory=True)

    def _start_guard(self) -> None:
        control = self.token and {"token": self.token, "secret": self._secret, "repository": str(self.repository.resolve())}
        self.guard = GuardProcess(self.stage, self._sockets["http"], self._sockets["metrics"], self.max_body, control)
        self.guard.start(self.log_path)

    def _find_port_and_start(self, bundle: Bundle) -> None:
        for attempt in itertools.count(1):
            try:
                return self._start_triton(bundle)
            except PortTaken:
                # a free port can be taken before Triton binds it
                if self._requested_ports["grpc"] or attempt == ATTEMPTS:
                    raise
                self._end_triton()
                self.ports["grpc"] = free_port(0)
            except UserError:
                # Triton 2.51 sometimes aborts while its models start on busy cores (its issue 8882); its log says so
                if self.triton.process.poll() != -signal.SIGABRT or attempt == ATTEMPTS:
                    raise
                self._end_triton()

    def _start_triton(self, bundle: Bundle) -> None:
        shown = {f"{MODELS}/": f"{self.repository}/"}
        self.triton = TritonProcess(bundle, self.stage, self._options(), self.log_path, shown)
        self.triton.wait_until_ready(self.ready_timeout)
        self.guard.tell("up")

    def _options(self) -> list[str]:
        closed = f"{','.join(CLOSED[1:] if self.token else CLOSED)}:{CLOSED_HEADER}={secrets.token_hex()}"
        control, models = ["--model-control-mode=none"], self._models_now()
        if self.token:
            control = ["--model-control-mode=explicit"]
            control += [f"--load-model={name}" for name in models]
            control += [f"--http-restricted-api=model-repository:{SECRET_HEADER}={self._secret}"]
        return [
            *control,
            f"--model-repository={MODELS}",
            # else a version that loads, or did not load, makes the server not ready, although it serves the others; at the
            # start it answers nothing before its models are loaded
            "--strict-readiness=false",
            f"--backend-directory={BACKENDS}",
            f"--backend-config=python,shm-region-prefix-name={self.stage.name}-",
            f"--http-restricted-api={closed}",
            f"--grpc-restricted-protocol={','.join(CLOSED)}:{CLOSED_HEADER}={secrets.token_hex()}",
            # environment variables of cloud platforms enable these endpoints on all addresses and disable the others
            "--allow-sagemaker=false",
            "--allow-vertex-ai=false",
            *(f"--allow-{service}=true" for service in SERVICES),
            # Unix sockets, relative to the folder that Triton is started in; it wants a port all the same
            "--http-address=unix:http.sock",
            "--http-port=1",
            "--metrics-address=unix:metrics.sock",
            "--metrics-port=2",
            f"--grpc-address={HOST}",
            f"--grpc-port={self.ports['grpc']}",
            f"--exit-timeout-secs={max(1, round(self.exit_seconds))}",
        ]

    def _models_now(self) -> Sequence[str]:
        """The models to start with, checked again where Triton is started again: with model control those of the last one that
        was ready and that are still there. Raises UserError E724, E727."""
        if self.triton is not None:
            if self.token:
                started = set(self.triton.stubs.values()) if self.triton.ready else set(self._loaded)
                self._loaded = sorted(started.intersection(model_names(self.repository)))
            refuse_unsafe(self.repository, self._loaded)
        return self._loaded

    def follow_loads(self) -> None:
        """Record the processes of models that were loaded or unloaded, and close their shared memory to other users."""
        if self.token:
            self.triton.find_stubs()
        shared_memory.close_to_others(self.stage.name)

    def fault(self) -> UserError | None:
        """Why a process of the server does not work any more: E709 (Triton), E743 (a model's), E742 (the guard). Else None."""
        if status_of(self.guard.process) is not None:
            return self.guard.fault()
        return self.triton.fault()

    def restart(self) -> None:
        """Start what has ended again; requests are answered with 503 meanwhile. The ports stay, but for one of gRPC that was
        chosen here and is taken by now: then it is another. Raises as `start`."""
        if status_of(self.guard.process) is not None:
            self.guard.stop()
            self._start_guard()
        if self.triton.fault():
            self.guard.tell("starting")
            self._end_triton()
            try:
                self._find_port_and_start(find_bundle())
                self._announce()
            except BaseException:
                self.triton.stop(0)  # one that runs without being ready would pass for a server
                raise
        else:
            self.guard.tell("up")

    def _end_triton(self) -> None:
        """End what is left of a Triton that is to be started again."""
        self.triton.stop(0)
        shared_memory.remove_regions(self.stage.name)
        for name in ("http.sock", "metrics.sock"):
            (self.stage / name).unlink(missing_ok=True)

    def refuse(self) -> None:
        """Refuse new HTTP requests from now on; those in flight are still answered."""
        self.guard.tell("drain")
        self.guard.heard("draining", DRAIN_SECONDS)

    def drained(self, seconds: float) -> bool:
        """After `refuse`: whether all HTTP requests were answered, at the latest after `seconds`."""
        return self.guard.heard("drained", seconds)

    def stop(self, seconds: float | None = None) -> None:
        """Stop all processes and remove their files. gRPC requests in flight are answered.

        What still runs after `seconds` is killed. Has no effect when nothing is running.
        """
        self._withdraw(self._announced)  # afterwards a port, and its record, may be another server's
        try:
            if self.guard is not None and self.guard.process is not None:
                self.guard.tell("drain")  # what comes now is refused, rather than lost with its connection
            if self.triton is not None:
                self.triton.stop(self.exit_seconds + STOP_SECONDS / 2 if seconds is None else seconds)
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        if self.guard is not None:
            self.guard.stop()
        self.guard = self.triton = None
        for listener in self._sockets.values():
            listener.close()
        self._sockets.clear()
        if self._claim is not None:
            shared_memory.remove(self.stage.name)
            self._claim.close()
            self._claim = None
        if self.stage is not None:
            shutil.rmtree(self.stage)
            self.stage = None
        if self._stage_lock is not None:
            os.close(self._stage_lock)
            self._stage_lock = None

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()


def models_to_load(repository: Path, names: Sequence[str] | None, *, required: bool = True) -> Sequence[str]:
    """The models to load: `names`, or all. Raises UserError E706 when the repository lacks them, or holds none where one is
    `required`, E724 when a model brings code or names files outside."""
    available = model_names(repository)
    if not available and (required or names or not repository.is_dir()):
        fault = "holds no model" if repository.is_dir() else "does not exist"
        raise UserError("E706", f"the model repository {fault}", "Give the folder that a deploy stage wrote", str(repository))
    if missing := [name for name in names or () if name not in available]:
        raise UserError("E706", f"no model '{missing[0]}'", f"Models: {', '.join(available)}", str(repository))
    chosen = available if names is None else names
    refuse_unsafe(repository, chosen)
    return chosen


def instances(model_folder: Path) -> int:
    """How many processes a model has."""
    return sum(group.count or 1 for group in read_config(model_folder).instance_group) or 1


def lock_folder(folder: Path) -> int:
    """A descriptor that holds a shared lock of a folder: systemd-tmpfiles, which deletes what is days old from a temporary
    folder, leaves out a locked folder and all in it. The lock ends with this process, whose children do not inherit it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    lock_where_possible(descriptor, fcntl.LOCK_SH)
    return descriptor


def bind(listener: socket.socket, port: int) -> None:
    """Bind `listener` to the port, 0 for a free one. Raises PortTaken."""
    # as Triton does: a port with lingering connections only is free
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        raise PortTaken(port, error.strerror) from error


def free_port(port: int) -> int:
    """The port, or a free one for 0. Raises PortTaken."""
    with contextlib.closing(socket.socket()) as listener:
        bind(listener, port)
        return listener.getsockname()[1]
