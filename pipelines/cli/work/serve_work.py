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
from pipelines.runs.served import find_repository
from serving.client import predict as ask
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
    """Context in which SIGTERM ends the block as Ctrl-C does."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
