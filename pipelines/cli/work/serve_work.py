"""The work of `compress serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compressor.errors import UserError
from pipelines.cli.shown import note, say
from pipelines.engine.disk import FULL
from pipelines.runs.served import Served, kept_while_served, repository_in_use
from serving.clients.by_choice import KIND as CHOICES
from serving.front.__main__ import keys_in
from serving.front.front_process import END_SECONDS, FrontProcess, require_packages
from serving.guard.model_control import read_token
from serving.layout.version_file import read_version
from serving.repository import model_names, read_config, version_folders
from serving.server import HOST, SERVICES, EmbeddedServer
from serving.watch import adopt_orphans, new_log, watch


def serve(
    run: Path,
    drain: float,
    max_body: int,
    model_control: bool,
    token_file: Path | None,
    http_front: int | None = None,
    keys: Path | None = None,
    **ports: int,
) -> None:
    """Serve until Ctrl-C or SIGTERM, then answer what is in flight, for `drain` seconds; a second signal stops at once."""
    if model_control != (token_file is not None):
        raise UserError("E740", "--model-control and --token-file are given together", "Give both, or neither")
    if keys is not None and http_front is None:
        raise UserError("E765", "--keys are those of the HTTP front", "Give --http-front PORT, too")
    if http_front is not None:  # a front without its packages, or that cannot read its keys, would end again and again
        require_packages()
        keys_in(keys)
    token = read_token(token_file) if token_file else None
    options = {"max_body": max_body << 20, "token": token, "exit_seconds": drain, **ports}
    adopt_orphans()
    with _terminable(), contextlib.ExitStack() as starting:
        served = starting.enter_context(repository_in_use(run, empty=model_control))
        note(served.outdated)
        embedded = EmbeddedServer(served.repository, log_path=new_log(served.logs), **options)
        with kept_while_served(served.repository), _stopped(embedded) as server, contextlib.ExitStack() as fronted:
            with contextlib.suppress(KeyboardInterrupt):
                server.start()
                starting.close()  # the models are in memory, and --force elsewhere cannot wait for as long as this serves
                _show(server, served)
                watch(server, _warn, fronted.enter_context(_fronted(server, http_front, keys)))
            if server.guard is not None:
                deadline = time.monotonic() + drain
                server.refuse()
                _tell("answering the requests in flight; Ctrl-C stops at once")
                fronted.close()  # it answers what it has, too; a second signal is not to be lost in its wait
                if not server.drained(_left(deadline)):
                    _warn(f"some requests were not answered within {drain:g} s")
                server.stop(_left(deadline) + END_SECONDS)
    _tell("stopped")


def _tell(line: str, err: bool = False) -> None:
    """Print a line of a server, which serves on where that fails: where its reader has gone, such as `head` in a pipe, or a
    terminal that is closed, nothing more is shown; where a disk is full, later lines are, once there is space."""
    try:
        say(line, err)
    except OSError as error:
        stream = sys.stderr if err else sys.stdout
        place, nowhere = os.dup(stream.fileno()), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        stream.flush()  # a stream keeps what it could not write, and would fail by that at its end
        if error.errno in FULL:
            os.dup2(place, stream.fileno())
        os.close(place)
        os.close(nowhere)


def _warn(line: str) -> None:
    """`_tell` on stderr, of what a server goes through."""
    _tell(line, err=True)


def _left(deadline: float) -> float:
    """Seconds until a moment of the monotonic clock."""
    return max(deadline - time.monotonic(), 0.0)


@contextlib.contextmanager
def _fronted(server: EmbeddedServer, port: int | None, keys: Path | None) -> Iterator[Callable[[Callable[[str], None]], None]]:
    """Context with an HTTP front, if there is a port for one: the function that keeps it."""
    if port is None:
        yield lambda tell: None
        return
    log = server.log_path.with_name(server.log_path.name.replace("serve", "front"))
    with FrontProcess(f"{HOST}:{server.ports['grpc']}", port, keys, log, server.exit_seconds).running() as front:
        _tell(f"front    {HOST}:{port}   (its page: http://{HOST}:{port}/docs)")

        def keep(tell: Callable[[str], None]) -> None:
            front.follow(f"{HOST}:{server.ports['grpc']}")  # after a restart it may be another
            front.keep(tell)

        yield keep


def _show(server: EmbeddedServer, served: Served) -> None:
    for service in SERVICES:
        _tell(f"{service:<8} {HOST}:{server.ports[service]}")
    for name in model_names(served.repository):
        _tell(f"try      {request_of(name, server.url, served)}")
    _tell(f"log      {server.log_path}")
    _tell("Ctrl-C stops the server")


def request_of(name: str, url: str, served: Served) -> str:
    """A command that asks a served model: `compress predict`, or curl for one that generates, for its answers come in parts."""
    home, named = served.repository / name, shlex.quote(name)
    if read_config(home).model_transaction_policy.decoupled:
        body = json.dumps({"TEXT": "a text", "MAX_TOKENS": 40})
        return f"curl -N {shlex.quote(f'{url}/v2/models/{name}/generate_stream')} -d '{body}'"
    try:
        facts = read_version(version_folders(home)[-1])
    except UserError:  # a repository that another program wrote may have no facts
        return f'compress predict {url} {named} "a text"'
    if facts.task == CHOICES:
        row = json.dumps({"text": "a text", "choices": ["a choice", "another"]})
        return f"echo '{row}' | compress predict {url} {named} --format jsonl"
    pair = ' --pair "a second text"' if facts.pair else ""
    task = f" --task {shlex.quote(facts.tasks[0]['name'])}" if facts.tasks else ""
    return f'compress predict {url} {named} "a text"{pair}{task}'


@contextlib.contextmanager
def _stopped(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Context at whose end the server is stopped: at once where an exception ends it, such as a second Ctrl-C."""
    try:
        yield server
    except BaseException:
        server.stop(0)
        raise
    server.stop()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Context in which SIGTERM is as Ctrl-C, but for the exit code where it ends the command: 143."""

    def stop(number: int, _frame: object) -> None:
        interrupt = KeyboardInterrupt()
        interrupt.exit_code = 128 + number
        raise interrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
