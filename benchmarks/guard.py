"""What the guard in front of Triton's HTTP costs: requests a second and CPU time, with and without it, in turn on one server.

    taskset -c 0,1 python benchmarks/guard.py --seconds 4 --rounds 5 --out docs/results
    taskset -c 0,1 python benchmarks/guard.py --onnx MODEL.onnx

Without a file the model is nearly empty, so that the rest shows; another one gets rows of 32 tokens. The direct way is Triton's
Unix socket; a second direct series is the control. Client, guard and server share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx
from onnx import TensorProto, helper

from serving.layout.knobs import Knobs
from serving.repository import read_config, write_repository
from serving.server import EmbeddedServer

WAYS = ("direct", "guard", "control")
NAME = "model"
CLIENTS = (1, 4, 16)
TICKS = os.sysconf("SC_CLK_TCK")


def write_empty(path: Path) -> Path:
    """A model that computes next to nothing: the mean of the token ids, three times."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["ids"], ["mean"], keepdims=1, axes=[1]),
        helper.make_node("Concat", ["mean", "mean", "mean"], ["logits"], axis=1),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "empty", [ids], [logits])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def write_request(model_folder: Path) -> bytes:
    """A body with one row of 32 tokens."""
    values = {"attention_mask": 1, "token_type_ids": 0}
    tensors = [
        {"name": tensor.name, "shape": [1, 32], "datatype": "INT64", "data": [values.get(tensor.name, 1000)] * 32}
        for tensor in read_config(model_folder).input
    ]
    return json.dumps({"inputs": tensors}).encode()


async def closed_loop(connect, path: str, body: bytes, clients: int, seconds: float) -> list[float]:
    """Milliseconds of each request of `clients` that each send one when the last is answered."""
    end, milliseconds = time.perf_counter() + seconds, []
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def client() -> None:
        reader, writer = await connect()
        while (start := time.perf_counter()) < end:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            milliseconds.append((time.perf_counter() - start) * 1e3)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return milliseconds


def cpu_seconds(pids: list[int]) -> float:
    """Processor time that processes have used."""
    fields = [Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def measure(server: EmbeddedServer, body: bytes, arguments: argparse.Namespace) -> list[dict]:
    """Rows of the table: every way in turn, round by round, for each number of clients."""
    ways = {
        "direct": lambda: asyncio.open_unix_connection(str(server.stage / "http.sock")),
        "guard": lambda: asyncio.open_connection("127.0.0.1", server.ports["http"]),
    }
    pids = {"triton": [server.triton.process.pid, *server.triton.stubs], "guard": [server.guard.process.pid]}
    rows = []
    for clients in CLIENTS:
        seen = defaultdict(list)
        for turn in range(-1, arguments.rounds):  # the first is a warm-up
            for way in WAYS:
                before = {name: cpu_seconds(each) for name, each in pids.items()}
                connect = ways.get(way, ways["direct"])
                times = asyncio.run(closed_loop(connect, f"/v2/models/{NAME}/infer", body, clients, arguments.seconds))
                used = {name: (cpu_seconds(each) - before[name]) * 1e3 / len(times) for name, each in pids.items()}
                if turn >= 0:
                    figures = {
                        "rate": len(times) / arguments.seconds,
                        "p50": statistics.median(times),
                        "p99": statistics.quantiles(times, n=100)[98],
                    }
                    seen[way].append(figures | used)
        for way in WAYS:
            medians = {key: statistics.median(each[key] for each in seen[way]) for key in seen[way][0]}
            rows.append({"clients": clients, "way": way, **medians})
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| clients | way | requests/s | p50 ms | p99 ms | CPU ms a request: Triton and model | guard |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        guard = f"{row['guard']:.3f}" if row["way"] == "guard" else "-"
        figures = f"{row['rate']:,.0f} | {row['p50']:.2f} | {row['p99']:.2f} | {row['triton']:.3f} | {guard}"
        lines.append(f"| {row['clients']} | {row['way']} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.onnx or write_empty(Path(scratch, "empty.onnx"))
        folder = write_repository(Path(scratch, "repository"), NAME, path, knobs=Knobs(threads=1, instances=2))
        with EmbeddedServer(folder.parent, log_path=Path(scratch, "log")) as server:
            text = table(measure(server, write_request(folder), arguments))
    print(text)
    if arguments.out:
        name = arguments.onnx.stem if arguments.onnx else "nearly empty"
        with (arguments.out / "guard.md").open("a") as file:
            file.write(f"\n## The guard in front of Triton's HTTP, model {name}\n\n{text}")


if __name__ == "__main__":
    main()
