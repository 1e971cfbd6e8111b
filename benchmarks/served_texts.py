"""Texts served to many clients against bare sessions of the same file and texts, on the same cores, tokenizing included.

    python benchmarks/served_texts.py runs/quickstart reviews --server-cores 0,1 --out docs/results

The server, and the bare sessions in turn, use the cores that are named; the clients use the others, or the same where there are
no others. Every round measures everything once; figures are medians of the rounds. A bare session computes the texts that the
clients send, N at a time (as many as there are clients), sorted by length, in batches of a token budget: all threads on each
batch ("one session"), or one thread on each of several batches ("in parallel"). "all": all texts at a time, as no server can.
Beside the deployed setting every instances x threads is measured, or, with --delays, every queue delay (queue_delay.md).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tritonclient.grpc.model_config_pb2 import ModelConfig

from benchmarks.load import Bench, cores_of, grid_lines, median, on_cores, shared_out, shown, told
from benchmarks.record import write_record
from benchmarks.sub_batches import Opened
from compressor.processor import processor
from export.runtimes.runtime import Runtime
from serving.layout.version_file import read_version
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import first_pass, measure
from serving.loadtest.tune.setting_grid import BUDGET, Setting, configured, layouts, runtime_of_model
from serving.repository import read_config

CLIENTS = (1, 16, 32)
SECONDS = 2.0


class Bare:
    """A version's file in a local session, with its tokenizer. Made in a process of its own, on the server's cores."""

    def __init__(self, version: Path, threads: int, streams: int):
        opened = Opened.at(version)
        self.side, self.tokenizer = opened.side(threads, streams), opened.tokenizer

    def rate(self, texts: list[str], together: int, most_tokens: int) -> float:
        """Texts a second."""
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            for first in range(0, len(texts), together):
                self.side.compute(self.tokenizer.encode_batch_fast(texts[first : first + together]), most_tokens)
            done += len(texts)
        return done / (time.perf_counter() - start)


def bare_rate(version: Path, texts: list[str], threads: int, streams: int, together: int, most_tokens: int) -> float:
    """A `Bare` session's rate, in a process that computes no other."""
    bare = opened(version, threads, streams)
    return bare.rate(texts, together, most_tokens)


opened = cache(Bare)


def settings_of(config: ModelConfig, cores: int, runtime: Runtime, delays: Sequence[int]) -> dict[str, ModelConfig]:
    """The deployed config, and the same with each of the `delays` (µs), or without them with every instances x threads."""
    if delays:
        return {"as deployed": config, **{f"delay {delay} µs": with_delay(config, delay) for delay in delays}}
    delay, budget = config.dynamic_batching.max_queue_delay_microseconds, int(config.parameters[BUDGET].string_value)
    grid = {f"{i} x {t}": configured(config, Setting(i, t, delay, budget), runtime) for i, t in layouts(cores)}
    return {"as deployed": config, **grid}


def with_delay(config: ModelConfig, delay: int) -> ModelConfig:
    """The same config with another queue delay (µs)."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    changed.dynamic_batching.max_queue_delay_microseconds = delay
    return changed


def measured(bench: Bench, rounds: int, delays: Sequence[int]) -> list[dict[str, Any]]:
    """One row for each way of computing and number of clients: medians of the rounds, and of each round's share of what the
    bare sessions reached in it."""
    config, version = read_config(bench.folder), bench.folder / "1"
    runtime, budget = runtime_of_model(bench.folder, config), int(config.parameters[BUDGET].string_value)
    texts = [row["TEXT"].item().decode() for row in bench.traffic.rows]
    # all threads on one batch do better with larger ones
    bares = {"one session": (1, max(budget, 1024)), **({"in parallel": (len(bench.cores), budget)} if runtime.streams else {})}
    found: dict[tuple[str, str | int], list[dict[str, float]]] = defaultdict(list)
    with contextlib.ExitStack() as stack, Fleet(bench.traffic) as fleet:
        with on_cores(bench.cores):
            pools = {way: stack.enter_context(multiprocessing.get_context("spawn").Pool(1)) for way in bares}
        settings = settings_of(config, len(bench.cores), runtime, delays).items()
        servers = {title: stack.enter_context(bench.serve(changed)) for title, changed in settings}
        expected = first_pass(fleet, bench.target(servers["as deployed"]))
        for _ in range(rounds):
            for way, (streams, most) in bares.items():
                for together, size in (*zip(CLIENTS, CLIENTS, strict=True), ("all", len(texts))):
                    rate = pools[way].apply(bare_rate, (version, texts, len(bench.cores), streams, size, most))
                    found[f"bare, {way}", together].append({"rate": rate})
            for (title, server), protocol in product(servers.items(), ("http", "grpc")):
                for clients in CLIENTS:
                    load = Load(concurrency=clients, warmup=0.3, seconds=SECONDS)
                    level = measure(fleet, bench.target(server, protocol), load, None, expected)
                    figures = {"rate": level["throughput"], **{key: level["latency_ms"][key] for key in ("p50", "p99")}}
                    found[f"{title}, {protocol}", clients].append({**figures, "batch": level["server"]["mean_batch"]})
    return [{"way": way, "clients": clients, **typical(turns, clients, found)} for (way, clients), turns in found.items()]


def typical(turns: list[dict[str, float | None]], clients: str | int, found: dict) -> dict[str, Any]:
    """Medians of the rounds, None where a round has no such figure; `shares`: of the bare sessions' rates in the same round, by
    their way."""
    medians = {key: median(turn[key] for turn in turns) for key in turns[0]}
    shares = {
        way: statistics.median(ours["rate"] / bare["rate"] for ours, bare in zip(turns, bares, strict=True))
        for (way, number), bares in found.items()
        if way.startswith("bare") and number == clients
    }
    return {**medians, "shares": shares}


def page(record: dict[str, Any]) -> str:
    """served_texts.md or queue_delay.md."""
    bares = list(record["rows"][0]["shares"])
    where = f"{record['machine']}; server or bare session on {record['server_cores']} cores, clients on {record['clients_on']}"
    lines = [
        "# Queue delays of served texts" if record["delays"] else "# Served texts against bare sessions",
        "",
        f"`python benchmarks/served_texts.py RUN {record['name']} {'--delays ' if record['delays'] else ''}...`. {where};",
    ]
    lines += [f"{record['texts']}, {record['model']}. Medians of {record['rounds']} rounds.", ""]
    titles = ("", "clients", "texts/s", "p50 ms", "p99 ms", "mean batch", *(f"of {way}" for way in bares))
    return "\n".join(lines + grid_lines(titles, (cells(row, bares) for row in record["rows"]))) + "\n"


def cells(row: dict[str, Any], bares: list[str]) -> list[str]:
    figures = [shown(row[key]) if key in row else "" for key in ("rate", "p50", "p99", "batch")]
    return [row["way"], str(row["clients"]), *figures, *(f"{row['shares'][way]:.2f}" for way in bares)]


def delays_of(text: str) -> list[int]:
    """'0,500' -> [0, 500]."""
    return [int(delay) for delay in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--server-cores", type=cores_of, metavar="N,N,..")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delays", type=delays_of, default=(), metavar="N,N,..", help="queue delays to measure (µs)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the record and its page")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cores, others = shared_out(options.server_cores)
    with tempfile.TemporaryDirectory() as scratch, on_cores(others or cores):
        bench = Bench(options.run, f"{options.name}-text", Path(scratch), cores)
        rows = measured(bench, options.rounds, options.delays)
        facts = read_version(bench.folder / "1")
    record = {
        "machine": processor()["cpu"],
        "server_cores": len(cores),
        "clients_on": told(others),
        "name": options.name,
        "model": f"{facts.runtime} {facts.precision}",
        "texts": bench.traffic.source,
        "rounds": options.rounds,
        "delays": options.delays,
        "rows": rows,
    }
    name = "queue_delay" if options.delays else "served_texts"
    write_record(options.out / f"{name}.json", record)
    (options.out / f"{name}.md").write_text(page(record))
    print(page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
