"""`compress loadtest` against perf_analyzer, a server under twice its capacity, and tuning against the whole grid.

    python benchmarks/load.py runs/quickstart reviews-text --overload --tune --perf-analyzer PROGRAM --out DIR

PROGRAM is VENV/bin/perf_analyzer of `pip install tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.9.79` in an environment
of its own (Debian also needs libb64-0d). Parts that are not asked for stay in the record as they are; a record of another
machine, model or texts is refused.
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelQueuePolicy

from benchmarks.record import read_record, write_record
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
from serving.loadtest.traffic import Outputs, Row, Traffic
from serving.loadtest.tune.bench import Bench as SettingBench
from serving.loadtest.tune.bench import link_model
from serving.loadtest.tune.coarse_to_fine import FINAL_ROUNDS
from serving.loadtest.tune.setting_grid import Setting
from serving.loadtest.tune.trials import Trial
from serving.loadtest.tune.tuned import tune
from serving.repository import read_config
from serving.server import EmbeddedServer

CLIENTS = (1, 4, 16)
FIGURES = ("rate", "p50", "p99")
ROUNDS, TURN_SECONDS = 9, 2.0
WINDOW_MS = 700
"""perf_analyzer measures three windows of this length."""
SECONDS, OVERLOAD_ROUNDS, TRIES, STEADY = 4.0, 3, 3, 0.2
FINALISTS = 5


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This process, and what it starts meanwhile, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_of(text: str) -> set[int]:
    """'0,1' -> {0, 1}."""
    return {int(core) for core in text.split(",")}


class Bench:
    """A run's model on a server of its own, on the `cores`, and the clients with the run's rows."""

    def __init__(self, run: Path, model: str, scratch: Path, cores: set[int]):
        self.model, self.scratch, self.cores = model, scratch, cores
        self.folder = find_repository(run).repository / model
        with self.serve() as server, Client(server.url) as client:
            self.traffic: Traffic = traffic_of(client, model, run=run)

    @contextlib.contextmanager
    def serve(self, config: ModelConfig | None = None) -> Iterator[EmbeddedServer]:
        """A server of the model, with another config if one is given."""
        repository = Path(tempfile.mkdtemp(dir=self.scratch))
        copy = repository / self.model
        link_model(self.folder, copy)
        if config is not None:
            (copy / "config.pbtxt").write_text(text_format.MessageToString(config))
        with contextlib.ExitStack() as stack:
            with on_cores(self.cores):
                server = stack.enter_context(EmbeddedServer(repository, log_path=repository / "triton.log"))
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


def medians(both: dict[str, list[dict[str, float | None]]]) -> dict[str, dict[str, float | None]]:
    """Of each figure of both programs, and of loadtest's over perf_analyzer's in the same turn; None where a turn has none."""
    turns = zip(*both.values(), strict=True)
    ratios = [{key: ours[key] and ours[key] / theirs[key] for key in FIGURES} for ours, theirs in turns]
    return {
        name: {key: median(turn[key] for turn in found) for key in FIGURES} for name, found in {**both, "ratio": ratios}.items()
    }


def median(figures: Iterable[float | None]) -> float | None:
    """None where one is: fewer than 100 requests show no p99."""
    values = list(figures)
    return None if None in values else statistics.median(values)


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
    # the program does not look for CUDA's runtime, which is installed beside it
    libraries = next(program.parent.parent.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib"), "")
    given = os.environ.get("LD_LIBRARY_PATH")
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, filter(None, (given, libraries))))}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)
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
        change = "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
        cells.append(f"{shown(ours)} / {shown(theirs)} ({change})")
    return cells


def overload(bench: Bench, deadline_ms: float, protocol: str) -> dict[str, Any]:
    """Random arrivals at 0.8 and 2 times the capacity, without and with a queue limit: medians of OVERLOAD_ROUNDS turns, each
    between two measurements of the capacity in a closed loop."""
    plain, turns = read_config(bench.folder), []
    with Fleet(bench.traffic) as fleet, contextlib.ExitStack() as servers:
        targets = {"no limit": bench.target(servers.enter_context(bench.serve(plain)), protocol)}
        expected = first_pass(fleet, targets["no limit"])
        capacity = capacity_of(fleet, targets["no limit"], expected)
        other = servers.enter_context(bench.serve(limited(plain, capacity, deadline_ms)))
        targets["queue limit"] = bench.target(other, protocol)
        for _ in range(OVERLOAD_ROUNDS):
            for queue, target in reversed(targets.items()):
                for factor in (0.8, 2.0):
                    tries = (overload_turn(fleet, targets, target, factor, deadline_ms, expected) for _ in range(TRIES))
                    # the machine's other work changes the capacity: a turn is tried again where it moved meanwhile
                    tried = list(until(lambda turn: turn["moved"] < STEADY, tries))
                    turns.append({"queue": queue, **min(tried, key=lambda turn: turn["moved"])})
                    print(overload_cells(turns[-1]), f"{turns[-1]['moved']:.0%}", len(tried), flush=True)
    kinds = dict.fromkeys((turn["queue"], turn["factor"]) for turn in turns)
    return {"deadline_ms": deadline_ms, "protocol": protocol, "levels": [typical(turns, *kind) for kind in kinds]}


def overload_turn(
    fleet: Fleet, targets: dict[str, Target], target: Target, factor: float, deadline_ms: float, expected: Sequence[Outputs]
) -> dict[str, Any]:
    """One level between two measurements of the capacity, whose mean counts; `moved` is their relative difference."""
    before = capacity_of(fleet, targets["queue limit"], expected)
    load = Load(rate=factor * before, warmup=1, seconds=SECONDS, timeout=2)
    level = measure(fleet, target, load, deadline_ms / 1000, expected)
    wait_until_idle(target)
    after = capacity_of(fleet, targets["queue limit"], expected)
    capacity, refused = (before + after) / 2, sum(level["errors"].values()) / max(level["requests"], 1)
    figures = {"capacity": capacity, "moved": abs(after - before) / capacity, "share": level["goodput"] / capacity}
    return {"factor": factor, **figures, "refused": refused, **level}


def wait_until_idle(target: Target) -> None:
    """Until the server has computed what waits in its queue, whose clients have given up."""
    before, now = None, target.statistics()
    while now != before:
        time.sleep(0.5)
        before, now = now, target.statistics()


def until(enough: Callable[[Any], bool], values: Iterable[Any]) -> Iterator[Any]:
    """Values up to the first that is enough."""
    for value in values:
        yield value
        if enough(value):
            return


def capacity_of(fleet: Fleet, target: Target, expected: Sequence[Outputs]) -> float:
    load = Load(concurrency=16, warmup=1, seconds=SECONDS / 2)
    return measure(fleet, target, load, None, expected)["throughput"]


def typical(turns: list[dict[str, Any]], queue: str, factor: float) -> dict[str, Any]:
    """The turn with the median share of the capacity."""
    chosen = sorted((turn for turn in turns if (turn["queue"], turn["factor"]) == (queue, factor)), key=lambda t: t["share"])
    return chosen[len(chosen) // 2]


def overload_cells(level: dict[str, Any]) -> list[str]:
    rates = [significant(level[key]) for key in ("capacity", "throughput", "goodput")]
    shares = [f"{level[key]:.0%}" for key in ("share", "refused")]
    return [level["queue"], f"{level['factor']} x", *rates, *shares, shown(level["latency_ms"]["p99"])]


def shown(figure: float | None) -> str:
    """As a cell of a table; '-' for a quantile that too few requests show."""
    return "-" if figure is None else significant(figure)


def limited(config: ModelConfig, capacity: float, deadline_ms: float) -> ModelConfig:
    """The config with a queue that a request leaves within a quarter of the deadline, or is refused: the batch before it and
    its own batch, each as large as the queue, are computed within the rest."""
    changed = ModelConfig()
    changed.CopyFrom(config)
    policy = changed.dynamic_batching.default_queue_policy
    policy.max_queue_size = max(1, round(capacity * deadline_ms / 1000 / 4))
    policy.timeout_action = ModelQueuePolicy.REJECT
    policy.default_timeout_microseconds = round(deadline_ms * 1000 / 4)
    return changed


def tuning(bench: Bench, p99_ms: float, rounds: int) -> dict[str, Any]:
    """The search's choice beside the best of the whole grid, both measured again: the best of many settings that are nearly
    alike was also the luckiest."""
    options = {"say": lambda line: print(line, file=sys.stderr, flush=True)}
    with Fleet(bench.traffic) as fleet, on_cores(bench.cores):
        _, search = tune(bench.folder, fleet, bench.scratch / "search", p99_ms, **options)
        _, grid = tune(bench.folder, fleet, bench.scratch / "grid", p99_ms, exhaustive_rounds=rounds, **options)
        chosen, *others = map(setting_in, (search["chosen"], *grid["settings"][:FINALISTS]))
        again = SettingBench(bench.folder, fleet, bench.scratch / "again", protocol="http", seconds=SECONDS / 2, **options)
        trials = {setting: Trial(setting, p99_ms / 1000, 2 * len(bench.cores)) for setting in (chosen, *others)}
        again.evaluate(list(trials.values()), FINAL_ROUNDS)
    share = trials[chosen].score / max(trial.score for trial in trials.values())
    print(f"chosen: {chosen.title}, {share:.1%} of the best")
    ranked = sorted((trial.figures() for trial in trials.values()), key=lambda row: -row["answers_a_second"])
    finals = {"settings": ranked, "chosen": trials[chosen].figures()}
    return {"p99_ms": p99_ms, "share": share, "again": finals, "search": search, "grid": grid}


def setting_in(row: dict[str, Any]) -> Setting:
    """The setting of a row of a tuning's evidence."""
    return Setting(*(row[key] for key in ("instances", "threads", "max_queue_delay_us", "max_batch_tokens")))


def page(record: dict[str, Any]) -> str:
    """load.md: the parts of the record as tables."""
    where = {part: f"The server on {on['cores']} cores, clients on {on['clients_on']}." for part, on in record["where"].items()}
    lines = ["# Load tests", ""]
    lines += [f"`python benchmarks/load.py RUN {record['model']} ...`. {record['machine']}; {record['rows']}.", ""]
    if rows := record.get("perf_analyzer"):
        lines += [
            "## `compress loadtest` / perf_analyzer",
            "",
            f"{where['perf_analyzer']} Medians of {ROUNDS} turns; in brackets that of the turns' ratios.",
            "",
        ]
        lines += grid_lines(("protocol", "clients", "requests/s", "p50 ms", "p99 ms"), map(opinion_cells, rows))
    if part := record.get("overload"):
        deadline = f"{part['deadline_ms']:g} ms, over {part['protocol']}"
        what = f"{where['overload']} Medians of {OVERLOAD_ROUNDS} turns; capacity: 16 clients just before and after;"
        what += f" deadline: {deadline}."
        lines += ["", "## Random arrivals beyond the capacity", "", what, ""]
        titles = ("queue", "rate / capacity", "capacity/s", "answers/s", "in time/s", "of capacity", "refused", "p99 ms")
        lines += grid_lines(titles, map(overload_cells, part["levels"]))
    if part := record.get("tune"):
        what = f"{where['tune']} The search measured {len(part['search']['settings'])} of {part['grid']['grid']} settings. What"
        what += f" it chose has {part['share']:.1%} of the answers a second of the best, where it and the {FINALISTS} best of"
        what += f" the whole grid are measured again, {FINAL_ROUNDS} times in turns:"
        lines += ["", f"## Tuning for a p99 latency of {part['p99_ms']:g} ms", "", what, ""]
        lines += grid_lines(COLUMNS, setting_rows(part["again"]))
        lines += ["", "The whole grid:", ""]
        lines += grid_lines(COLUMNS, setting_rows(part["grid"] | {"chosen": None}))
    return "\n".join(lines) + "\n"


def grid_lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    head = [titles, ["---"] + ["--:"] * (len(titles) - 1)]
    return [f"| {' | '.join(row)} |" for row in (*head, *rows)]


def shared_out(given: set[int] | None) -> tuple[set[int], set[int]]:
    """Cores of the server, and the others, for the clients."""
    cores = given or os.sched_getaffinity(0)
    return cores, os.sched_getaffinity(0) - cores


def told(others: set[int]) -> str:
    return f"{len(others)} others" if others else "the same"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("--perf-analyzer", type=Path, metavar="PROGRAM")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--deadline-ms", type=float, default=200.0)
    parser.add_argument("--protocol", choices=["http", "grpc"], default="grpc", help="of --overload")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--p99-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the whole grid")
    parser.add_argument("--server-cores", type=cores_of, metavar="N,N,..", help="the clients use the others [all]")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for load.json and load.md")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    cores, others = shared_out(options.server_cores)
    with tempfile.TemporaryDirectory() as scratch, on_cores(others or cores):
        bench = Bench(options.run, options.model, Path(scratch), cores)
        if options.overload and not read_config(bench.folder).HasField("dynamic_batching"):
            parser.error(f"--overload limits the queue of dynamic batching, and '{options.model}' has none")
        facts = {"machine": processor()["cpu"], "model": options.model, "rows": bench.traffic.source}
        on = {"cores": len(cores), "clients_on": told(others)}
        record = options.out / "load.json"
        try:
            found = read_record(record, None, facts) or {"where": {}, **facts}
        except ValueError as error:
            parser.error(str(error))
        parts = {
            "perf_analyzer": options.perf_analyzer and (lambda: second_opinion(bench, options.perf_analyzer)),
            "overload": options.overload and (lambda: overload(bench, options.deadline_ms, options.protocol)),
            "tune": options.tune and (lambda: tuning(bench, options.p99_ms, options.rounds)),
        }
        for part, measured in parts.items():
            if measured:
                found |= {"where": found["where"] | {part: on}, part: measured()}
                write_record(record, found)
    (options.out / "load.md").write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
