"""`compress loadtest` against perf_analyzer, a server under twice its capacity, and tuning against the whole grid.

    python benchmarks/load.py runs/quickstart reviews --overload --tune --perf-analyzer PROGRAM --out docs/results

PROGRAM is VENV/bin/perf_analyzer of `pip install tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.9.79` in an environment
of its own (Debian also needs libb64-0d). Parts that are not asked for stay in the record as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from benchmarks.record import write_record
from compressor.processor import processor
from pipelines.loadtest.request_rows import traffic_of
from pipelines.loadtest.tune_report import COLUMNS, setting_rows
from pipelines.reporting.format import significant
from pipelines.runs.served import find_repository
from serving.client import Client
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import Target, first_pass, measure
from serving.loadtest.request_pools import Endpoint
from serving.loadtest.traffic import Row, Traffic
from serving.loadtest.tune.tuned import tune
from serving.repository import read_config
from serving.server import EmbeddedServer

CLIENTS = (1, 4, 16)
FIGURES = ("rate", "p50", "p99")
ROUNDS, TURN_SECONDS = 9, 2.0
WINDOW_MS = 700
"""perf_analyzer measures three windows of this length."""
SECONDS = 6.0


class Bench:
    """A run's model on a server of its own, and the clients with the run's rows."""

    def __init__(self, run: Path, model: str, scratch: Path):
        self.model, self.scratch = model, scratch
        self.folder = find_repository(run).repository / model
        with self.serve() as server, Client(server.url) as client:
            self.traffic: Traffic = traffic_of(client, model, run=run)

    @contextlib.contextmanager
    def serve(self, config: ModelConfig | None = None) -> Iterator[EmbeddedServer]:
        """A server of the model, with another config if one is given."""
        repository = Path(tempfile.mkdtemp(dir=self.scratch))
        copy = repository / self.model
        copy.mkdir()
        for path in self.folder.iterdir():
            (copy / path.name).symlink_to(path.resolve())
        if config is not None:
            (copy / "config.pbtxt").unlink()
            (copy / "config.pbtxt").write_text(text_format.MessageToString(config))
        with EmbeddedServer(repository, log_path=repository / "triton.log") as server:
            yield server

    def target(self, server: EmbeddedServer, protocol: str = "http") -> Target:
        client = Client(server.url)
        address = replace(client.address, protocol=protocol, port=server.ports[protocol])
        return Target(Endpoint(address, self.model), client)


def second_opinion(bench: Bench, program: Path) -> list[dict[str, Any]]:
    """Both programs in turn, ROUNDS times for each protocol and number of clients: medians, and those of a turn's ratios."""
    data, rows = bench.scratch / "rows.json", []
    data.write_text(json.dumps({"data": [perf_analyzer_row(row) for row in bench.traffic.rows]}))
    with bench.serve() as server, Fleet(bench.traffic) as fleet:
        expected = first_pass(fleet, bench.target(server))
        for protocol in ("http", "grpc"):
            for clients in CLIENTS:
                both: dict[str, list[dict[str, float]]] = {"loadtest": [], "perf_analyzer": []}
                for _ in range(ROUNDS):
                    load = Load(concurrency=clients, warmup=0.5, seconds=TURN_SECONDS)
                    level = measure(fleet, bench.target(server, protocol), load, None, expected)
                    both["loadtest"].append({"rate": level["throughput"], **level["latency_ms"]})
                    url = f"127.0.0.1:{server.ports[protocol]}"
                    both["perf_analyzer"].append(analyzed(program, bench.model, url, protocol, clients, data, bench.scratch))
                rows.append({"protocol": protocol, "clients": clients, **medians(both)})
                print(opinion_cells(rows[-1]), flush=True)
    return rows


def medians(both: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each figure of both programs, and of loadtest's over perf_analyzer's in the same turn."""
    turns = zip(*both.values(), strict=True)
    ratios = [{key: ours[key] / theirs[key] for key in FIGURES} for ours, theirs in turns]
    return {
        name: {key: statistics.median(turn[key] for turn in found) for key in FIGURES}
        for name, found in {**both, "ratio": ratios}.items()
    }


def perf_analyzer_row(row: Row) -> dict[str, Any]:
    """A row as perf_analyzer's input data: without the batch axis."""
    content = lambda array: [value.decode() if isinstance(value, bytes) else value for value in array[0].tolist()]  # noqa: E731
    return {name: {"content": content(array), "shape": list(array.shape[1:])} for name, array in row.items()}


def analyzed(program: Path, model: str, url: str, protocol: str, clients: int, data: Path, scratch: Path) -> dict[str, float]:
    """perf_analyzer's throughput and latencies in milliseconds. `-s 999`: a level that it calls unstable would be left out."""
    table = scratch / "perf_analyzer.csv"
    table.unlink(missing_ok=True)
    command = [program, "-m", model, "-u", url, "-i", protocol, "--concurrency-range", clients, "--input-data", data]
    command += ["--measurement-interval", WINDOW_MS, "-s", 999, "-f", table]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if not table.is_file():
        raise SystemExit(f"perf_analyzer failed:\n{done.stdout}{done.stderr}")
    with table.open(newline="") as stream:
        row = next(csv.DictReader(stream))
    times = {name: float(row[f"{name} latency"]) / 1000 for name in ("p50", "p99")}
    return {"rate": float(row["Inferences/Second"]), **times}


def opinion_cells(row: dict[str, Any]) -> list[str]:
    cells = [row["protocol"], str(row["clients"])]
    for key in FIGURES:
        ours, theirs, ratio = (row[name][key] for name in ("loadtest", "perf_analyzer", "ratio"))
        cells.append(f"{significant(ours)} / {significant(theirs)} ({100 * (ratio - 1):+.1f} %)")
    return cells


def overload(bench: Bench, deadline_ms: float) -> dict[str, Any]:
    """Capacity in a closed loop, then random arrivals at 0.8 and 2 times that: goodput without and with a queue limit."""
    found: dict[str, Any] = {"deadline_ms": deadline_ms, "levels": []}
    plain = read_config(bench.folder)
    with Fleet(bench.traffic) as fleet:
        with bench.serve(plain) as server:
            expected = first_pass(fleet, bench.target(server))
            load = Load(concurrency=16, warmup=2, seconds=SECONDS)
            capacity = measure(fleet, bench.target(server), load, None, expected)["throughput"]
        found["capacity"] = capacity
        for name, config in (("no limit", plain), ("queue limit", limited(plain, capacity, deadline_ms))):
            with bench.serve(config) as server:
                for factor in (0.8, 2.0):
                    load = Load(rate=factor * capacity, warmup=2, seconds=SECONDS)
                    level = measure(fleet, bench.target(server), load, deadline_ms / 1000, expected)
                    share = level["goodput"] / capacity
                    found["levels"].append({"queue": name, "factor": factor, "share": share, **level})
                    print(overload_cells(found["levels"][-1]), flush=True)
    return found


def overload_cells(level: dict[str, Any]) -> list[str]:
    rates = [significant(level[key]) for key in ("throughput", "goodput")]
    refused = sum(level["errors"].values()) / level["requests"]
    p99 = level["latency_ms"]["p99"]
    return [level["queue"], f"{level['factor']} x", *rates, f"{level['share']:.0%}", f"{refused:.0%}", significant(p99)]


def limited(config: ModelConfig, capacity: float, deadline_ms: float) -> ModelConfig:
    """The config with a queue that a request leaves within half of the deadline, or is refused."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    policy = changed.dynamic_batching.default_queue_policy
    policy.max_queue_size = max(1, round(capacity * deadline_ms / 1000 / 2))
    policy.timeout_action = ModelQueuePolicy.REJECT
    policy.default_timeout_microseconds = round(deadline_ms * 1000 / 2)
    return changed


def tuning(bench: Bench, p99_ms: float, rounds: int) -> dict[str, Any]:
    """The search's choice, scored by the measurements of the whole grid, which are independent of the search's."""
    options = {"say": lambda line: print(line, file=sys.stderr, flush=True)}
    with Fleet(bench.traffic) as fleet:
        _, search = tune(bench.folder, fleet, bench.scratch / "search", p99_ms, **options)
        _, grid = tune(bench.folder, fleet, bench.scratch / "grid", p99_ms, exhaustive_rounds=rounds, **options)
    keys = ("instances", "threads", "max_queue_delay_us", "max_batch_tokens")
    chosen = [search["chosen"][key] for key in keys]
    scored = next(row for row in grid["settings"] if [row[key] for key in keys] == chosen)
    best = grid["settings"][0]
    share = scored["answers_a_second"] / best["answers_a_second"]
    print(f"chosen: {dict(zip(keys, chosen, strict=True))}, {share:.1%} of the best")
    return {"p99_ms": p99_ms, "share": share, "search": search, "grid": grid}


def page(record: dict[str, Any]) -> str:
    """load.md: the parts of the record as tables."""
    lines = ["# Load tests", "", f"{record['machine']}, {record['cores']} cores for server and clients; {record['rows']}.", ""]
    if rows := record.get("perf_analyzer"):
        lines += [
            "## `compress loadtest` / perf_analyzer",
            "",
            f"Medians of {ROUNDS} turns; in brackets that of the turns' ratios.",
            "",
        ]
        lines += grid_lines(("protocol", "clients", "requests/s", "p50 ms", "p99 ms"), map(opinion_cells, rows))
    if part := record.get("overload"):
        what = f"Capacity: {significant(part['capacity'])} requests/s with 16 clients. Deadline: {part['deadline_ms']:g} ms."
        lines += ["", "## Random arrivals beyond the capacity", "", what, ""]
        titles = ("queue", "rate / capacity", "answers/s", "in time/s", "of capacity", "refused", "p99 ms")
        lines += grid_lines(titles, map(overload_cells, part["levels"]))
    if part := record.get("tune"):
        what = (
            f"The chosen setting has {part['share']:.1%} of the answers a second of the grid's best, by the grid's measurement;"
        )
        what += f" the search measured {len(part['search']['settings'])} of {part['grid']['grid']} settings."
        lines += ["", f"## Tuning for a p99 latency of {part['p99_ms']:g} ms", "", what, ""]
        lines += grid_lines(COLUMNS, setting_rows(part["grid"] | {"chosen": None}))
    return "\n".join(lines) + "\n"


def grid_lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    head = [titles, ["---"] + ["--:"] * (len(titles) - 1)]
    return [f"| {' | '.join(row)} |" for row in (*head, *rows)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("--perf-analyzer", type=Path, metavar="PROGRAM")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--deadline-ms", type=float, default=200.0)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--p99-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the whole grid")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for load.json and load.md")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.run, options.model, Path(scratch))
        cores = len(os.sched_getaffinity(0))
        facts = {"machine": processor()["cpu"], "cores": cores, "model": options.model, "rows": bench.traffic.source}
        record = options.out / "load.json"
        found = {**(json.loads(record.read_text()) if record.is_file() else {}), **facts}
        if options.perf_analyzer:
            found["perf_analyzer"] = second_opinion(bench, options.perf_analyzer)
        if options.overload:
            found["overload"] = overload(bench, options.deadline_ms)
        if options.tune:
            found["tune"] = tuning(bench, options.p99_ms, options.rounds)
    write_record(record, found)
    (options.out / "load.md").write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
