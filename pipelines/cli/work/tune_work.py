"""The work of `compress loadtest --tune`: search serving settings on copies of a repository, and write what was chosen."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError
from pipelines.cli.shown import near, note, say
from pipelines.engine.disk import require_writable
from pipelines.engine.store import write_atomic
from pipelines.loadtest.request_rows import traffic_of
from pipelines.loadtest.tune_report import COLUMNS, MOST_ROWS, conclusions, setting_rows, to_markdown
from pipelines.runs.served import repository_in_use
from pipelines.terminal.console_table import table
from serving.client import Client
from serving.loadtest.fleet import Fleet
from serving.loadtest.tune.tuned import tune
from serving.server import EmbeddedServer, models_to_load

OUT = Path("tuned")


def tune_model(target: str, model: str, **options: Any) -> None:
    """Tune a model of a run's repository and write config.pbtxt, tune.json and tune.md."""
    run = Path(target)
    if not run.is_dir():
        fix = "Give the run's folder as TARGET: its models are served on this machine with one setting after the other"
        raise UserError("E752", "a server is not tuned from outside", fix, target)
    out = options["out"] or OUT
    require_writable(out, "Give another --out")
    with repository_in_use(run) as found, tempfile.TemporaryDirectory(prefix="compress-tune-") as scratch:
        note(found.outdated)
        models_to_load(found.repository, [model])
        folder = Path(scratch)
        with (
            EmbeddedServer(found.repository, log_path=folder / "rows.log", models=[model]) as server,
            Client(server.url) as client,
        ):
            rows = {key: options[key] for key in ("texts", "tokenizer")}
            traffic = traffic_of(client, model, run=options["run"] or found.run, **rows)
        with Fleet(traffic, options["clients"]) as fleet:
            config, evidence = tune(
                found.repository / model, fleet, folder, options["p99_ms"], protocol=options["protocol"] or "http", say=note
            )
    if options["as_json"]:
        click.echo(json.dumps(evidence, indent=1, ensure_ascii=False))
    else:
        table(COLUMNS, setting_rows(evidence, MOST_ROWS))
        for line in conclusions(evidence):
            say(line)
    write(out, config, evidence)


def write(out: Path, config: str, evidence: dict[str, Any]) -> None:
    """Write the three files. Raises UserError E801 if that is not possible."""
    evidence_json = json.dumps(evidence, indent=1, ensure_ascii=False) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in {"config.pbtxt": config, "tune.json": evidence_json, "tune.md": to_markdown(evidence)}.items():
            write_atomic(out / name, text.encode())
    except OSError as error:
        raise UserError("E801", f"cannot write there ({error.strerror})", "Give another --out", str(out)) from error
    note(f"chosen: {near((out / 'config.pbtxt').absolute())}")
