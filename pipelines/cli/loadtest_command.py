"""`compress loadtest`: measure a served model under load, or tune how it is served."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli.folder_type import Folder
from pipelines.cli.work.lazy_work import work

LOADTEST_EXAMPLES = """\b
Example: compress loadtest runs/quickstart reviews
         compress loadtest 127.0.0.1:8000 reviews --run runs/quickstart --rate 50,0.8x,2x --deadline 100 --out load
         compress loadtest grpc://127.0.0.1:8001 reviews-text --texts reviews.txt --concurrency 1,8
         compress loadtest runs/quickstart reviews --tune --p99-ms 50"""


@click.command(epilog=LOADTEST_EXAMPLES)
@click.argument("target")
@click.argument("model")
@click.option("--run", type=click.Path(path_type=Path), metavar="RUN", help="Send the validation rows of this run.")
@click.option("--texts", type=click.Path(path_type=Path), metavar="FILE", help="Send these texts: one a line, pairs by a tab.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="FOLDER", help="For tokens of texts: NAME/1 of the repository."
)
@click.option("--concurrency", metavar="N,N,..", help="Closed loops: so many clients, each waits.  [default: 1,4,16]")
@click.option("--rate", metavar="R,R,..", help="Open loops: requests a second, or 2x: twice what the closed loops reached.")
@click.option("--deadline", type=click.FloatRange(0, min_open=True), metavar="MS", help="Count answers that came in time.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True, help="Measured time of a level.")
@click.option("--warmup", type=click.FloatRange(0, 600), default=2.0, show_default=True, help="Seconds before, not measured.")
@click.option(
    "--requests", type=click.IntRange(1, 10_000_000), default=100_000, show_default=True, help="Most requests of a level."
)
@click.option(
    "--timeout", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="Seconds to wait for an answer."
)
@click.option(
    "--protocol", type=click.Choice(["http", "grpc"]), help="Of a TARGET without http:// or grpc://.  [default: http]"
)
@click.option(
    "--ca", type=click.Path(path_type=Path), metavar="FILE", help="Certificates (PEM) to trust instead of the system's."
)
@click.option("--token", envvar="COMPRESS_TOKEN", help="Sent as `Authorization: Bearer`.  [also: $COMPRESS_TOKEN]")
@click.option("--clients", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes that send.")
@click.option("--tune", is_flag=True, help="Search for the model's best serving settings instead; TARGET is a run's folder.")
@click.option("--p99-ms", type=click.FloatRange(0, 60_000, min_open=True), default=50.0, show_default=True, help="For --tune.")
@click.option(
    "--out", type=Folder(), help="Folder for loadtest.json and .html; or, of --tune, config.pbtxt, tune.json and .md."
)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
@work("pipelines.cli.work.loadtest_work:loadtest")
def loadtest() -> None:
    """Send rows to a served MODEL and measure latency, throughput, errors and memory; every answer is checked.

    TARGET is a server (host:port, or with http://, https://, grpc:// or grpcs:// before it), or the folder of a run, which is
    then served for the time of the test. The exit code is 3 if an answer under load differs from that of the same row alone.

    With --tune, instances, threads, queue delay and tokens
    of a batch are chosen for the most answers a second whose p99 latency keeps a limit, and written to --out (tuned).
    """
