"""The work of `compress serve`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import click

from pipelines.cli.shown import note
from pipelines.runs.served import find_repository
from serving.repository import model_names
from serving.server import EmbeddedServer


def serve(run: Path, **ports: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    served = find_repository(run)
    note(served.outdated)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _terminable(),
        EmbeddedServer(served.repository, log_path=run / "logs" / "serve.log", **ports) as server,
    ):
        for service, port in server.ports.items():
            click.echo(f"{service:<8} {server.url.partition(':')[0]}:{port}")
        for name in model_names(served.repository):
            pair = ' --pair "a second text"' if served.pairs else ""
            click.echo(f'try      compress predict {server.url} {name} "a text"{pair}')
        click.echo("Ctrl-C stops the server")
        server.wait()
    click.echo("stopped")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Context in which SIGTERM ends the block as Ctrl-C does."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
