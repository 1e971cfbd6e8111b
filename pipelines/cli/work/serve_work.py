"""The work of `compress serve` and `compress predict`."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from compressor.errors import UserError
from pipelines.cli.shown import note
from pipelines.runs.served import Served, find_repository
from serving.client import predict as ask
from serving.guard.model_control import read_token
from serving.repository import model_names
from serving.server import HOST, EmbeddedServer
from serving.watch import adopt_orphans, new_log, watch


def serve(run: Path, drain: float, max_body: int, model_control: bool, token_file: Path | None, **ports: int) -> None:
    """Serve until Ctrl-C or SIGTERM, then answer what is in flight; a second signal stops at once."""
    if model_control != (token_file is not None):
        raise UserError("E740", "--model-control and --token-file are given together", "Give both, or neither")
    token = read_token(token_file) if token_file else None
    served = find_repository(run)
    note(served.outdated)
    options = {"max_body": max_body << 20, "token": token, "exit_seconds": drain, **ports}
    adopt_orphans()
    with _terminable(), _stopped(EmbeddedServer(served.repository, log_path=new_log(served.logs), **options)) as server:
        with contextlib.suppress(KeyboardInterrupt):
            server.start()
            _show(server, served)
            watch(server, note)
        if server.guard is not None:
            server.refuse()
            click.echo("answering the requests in flight; Ctrl-C stops at once")
            if not server.drained(drain):
                note(f"some requests were not answered within {drain:g} s")
    click.echo("stopped")


def _show(server: EmbeddedServer, served: Served) -> None:
    for service, port in server.ports.items():
        click.echo(f"{service:<8} {HOST}:{port}")
    for name in model_names(served.repository):
        pair = ' --pair "a second text"' if served.pairs else ""
        click.echo(f'try      compress predict {server.url} {name} "a text"{pair}')
    click.echo(f"log      {server.log_path}")
    click.echo("Ctrl-C stops the server")


@contextlib.contextmanager
def _stopped(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Context at whose end the server is stopped: at once where an exception ends it, such as a second Ctrl-C."""
    try:
        yield server
    except BaseException:
        server.stop(0)
        raise
    server.stop()


def predict(
    url: str, model: str, texts: tuple[str, ...], pairs: tuple[str, ...], tokenizer: Path | None, as_json: bool
) -> None:
    """Print a line for each text, or JSON."""
    if pairs and len(pairs) != len(texts):
        raise UserError("E112", f"{len(pairs)} --pair for {len(texts)} texts", "Give --pair once for each text, in order")
    predictions = ask(url, model, list(zip(texts, pairs, strict=True)) if pairs else list(texts), tokenizer_folder=tokenizer)
    if as_json:
        rows = [{"text": text, **asdict(prediction)} for text, prediction in zip(texts, predictions, strict=True)]
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for text, prediction in zip(texts, predictions, strict=True):
        click.echo(f"{prediction}  {text}")


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
