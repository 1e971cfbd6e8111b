"""The work of `compress loadtest`: send a run's rows to a served model, and show what clients and server measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError
from pipelines.cli.shown import near, note, say
from pipelines.cli.unused_options import require_unused
from pipelines.cli.work.tune_work import tune_model
from pipelines.engine.disk import require_writable
from pipelines.engine.store import write_atomic
from pipelines.loadtest.load_page import to_page
from pipelines.loadtest.load_table import COLUMNS, level_rows, notes
from pipelines.loadtest.request_rows import traffic_of
from pipelines.reporting.format import human_seconds
from pipelines.runs.served import repository_in_use
from pipelines.terminal.console_table import table
from serving.client import Client
from serving.clients.address import Address, parse_url
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import PASS_SECONDS, Target, first_pass
from serving.loadtest.plan import require_answers, run_levels, wishes
from serving.loadtest.request_pools import Endpoint
from serving.server import EmbeddedServer

LEAST_SECONDS = 5.0
"""What a server has at least for its config and statistics: a limit for answers may be as short as people need them."""
OF_LEVELS = ("concurrency", "rate", "deadline", "seconds", "warmup", "requests", "timeout", "ca", "token")
"""Options of a test's levels and of the server that is asked."""


@dataclass(frozen=True)
class Served:
    """A server under test: the client that asks it, the address that requests go to, and the run whose rows are sent."""

    client: Client
    address: Address
    run: Path | None


def loadtest(target: str, model: str, **options: Any) -> None:
    """Test a served model at every level, or tune it; a run's folder as target is served for the time of the test."""
    if options["tune"]:
        require_unused(OF_LEVELS, "with --tune")
        tune_model(target, model, **options)
        return
    require_unused(["p99_ms"], "without --tune")
    if options["texts"] is None:
        require_unused(["tokenizer"], "without --texts")
    if Path(target).is_dir():
        require_unused(["ca", "token"], "for a server that is started here")
    elif not parse_url(url_of(target, options["protocol"])).tls:
        require_unused(["ca"], "without https:// or grpcs://")
    if out := options["out"]:
        require_writable(out, "Give another --out")
    levels = wishes(options["concurrency"], options["rate"], options["clients"])
    with server_of(target, options) as served:
        test = carried_out(served, model, levels, options)
    if options["as_json"]:
        click.echo(json.dumps(test, indent=1, ensure_ascii=False))
    else:
        table(COLUMNS, level_rows(test["levels"]))
        for line in notes(test):
            say(line)
    if out:
        write_test(test, out)
        note(f"load test: {near((out / 'loadtest.html').absolute())}")
    require_answers(test["levels"])


def url_of(target: str, protocol: str | None) -> str:
    """The URL of a server, whose protocol --protocol may name."""
    return f"{protocol}://{target}" if protocol and "//" not in target else target


@contextlib.contextmanager
def server_of(target: str, options: dict[str, Any]) -> Iterator[Served]:
    """The server at a URL, or one that is started on the models of a run, where `target` is a run's folder. For what it is
    asked itself it has `timeout` seconds, as for an answer, or LEAST_SECONDS: one that hangs would hold up every level."""
    run, protocol, seconds = options["run"], options["protocol"], max(options["timeout"], LEAST_SECONDS)
    if not Path(target).is_dir():
        with Client(url_of(target, protocol), ca=options["ca"], token=options["token"], seconds=seconds) as client:
            yield Served(client, client.address, run)
        return
    with contextlib.ExitStack() as opened:
        found = opened.enter_context(repository_in_use(Path(target)))
        note(found.outdated)
        server = opened.enter_context(EmbeddedServer(found.repository, log_path=found.logs / "loadtest.log"))
        client = opened.enter_context(Client(server.url, seconds=seconds))
        protocol = protocol or client.address.protocol
        yield Served(client, replace(client.address, protocol=protocol, port=server.ports[protocol]), run or found.run)


def carried_out(served: Served, model: str, levels: list, options: dict[str, Any]) -> dict[str, Any]:
    """The result of all levels, as written to loadtest.json."""
    rows = {key: options[key] for key in ("texts", "tokenizer")}
    traffic = traffic_of(served.client, model, run=served.run, **rows)
    endpoint = Endpoint(served.address, model, options["ca"], options["token"])
    limits = Load(**{key: options[key] for key in ("warmup", "seconds", "requests", "timeout")})
    deadline = options["deadline"] and options["deadline"] / 1000
    most = len(levels) * (limits.warmup + limits.seconds) + PASS_SECONDS
    note(f"{len(traffic.rows)} rows, {len(levels)} levels: at most {human_seconds(most)}")
    with Fleet(traffic, options["clients"]) as fleet:
        expected = first_pass(fleet, under_test := Target(endpoint, served.client), limits.timeout)
        measured = run_levels(fleet, under_test, levels, limits, deadline, expected, lambda level: note(progress(level)))
    return {
        "model": model,
        "url": str(served.address),
        "protocol": served.address.protocol,
        "rows": traffic.source,
        "mean_tokens": traffic.mean_tokens,
        "warmup_seconds": limits.warmup,
        "levels": measured,
    }


def progress(level: dict[str, Any]) -> str:
    return f"{level['load']}: {level['throughput']:.4g} answers a second"


def write_test(test: dict[str, Any], out: Path) -> None:
    """Write loadtest.json and loadtest.html to a folder. Raises UserError E801 if that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "loadtest.json", (json.dumps(test, indent=1, ensure_ascii=False) + "\n").encode())
        write_atomic(out / "loadtest.html", to_page(test).encode())
    except OSError as error:
        raise UserError("E801", f"cannot write there ({error.strerror})", "Give another --out", str(out)) from error
