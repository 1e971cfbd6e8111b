"""How often the gate of int8 refuses: sound files by chance, losses of a known size, and faults of a known kind.

    python benchmarks/gate.py --simulate
    python benchmarks/gate.py --runs runs/quickstart runs/rte --out docs/results

--simulate draws labels that turn right and wrong at given rates and counts the refusals of the product's own rules (the paired
bootstrap of the metric, the agreement with its standard errors), beside those of a plain limit: one point, 97 %.

--runs takes finished runs of the same machine. From the dense and the merged model of each it makes int8 files, sound ones and
ones with a fault put into the graph before quantizing, and writes what each check of the gate finds. --out writes gate.md, of
what was asked for. Exit code 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnx
from onnx import numpy_helper

from compressor.deltas.links import merge_all
from compressor.processor import default_threads, weight_bits
from compressor.tasks.kinds.classification import KIND
from compressor.tasks.metrics import paired_changes, two_errors
from export.graph.rewrite import can_fuse
from export.graph.trace import matrices
from export.parity.bounds import BOUNDS
from export.parity.compare import RESAMPLES, loss_of
from export.runtimes.onnxruntime import write_onnx
from export.runtimes.openvino import export_openvino
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.environment import machine
from pipelines.engine.store import write_atomic
from pipelines.runs.finished import open_run
from pipelines.stages.export.config import STAGE, ExportConfig
from pipelines.stages.export.exported import calibration, traced
from pipelines.stages.export.proving import COMPRESSED, Prover
from pipelines.stages.loading import load_data, load_model

RATES = ((0.0, 0.02), (0.0025, 0.022), (0.005, 0.025), (0.01, 0.03), (0.02, 0.036), (0.03, 0.045), (0.05, 0.07))
"""(true loss of accuracy, share of labels that turn). The first two are what int8 of sound files does on thousands of rows."""
COLUMNS = (
    "true loss, points",
    "labels that turn",
    "rows",
    "metric refuses",
    "agreement refuses",
    "either",
    "a plain limit refuses",
)


def simulated(rows: int, loss: float, flips: float, times: int, seed: int = 0) -> tuple[str, ...]:
    """A row of the table: how often each rule refuses `times` draws."""
    draw, least = np.random.default_rng(seed), BOUNDS["int8"].agreement[KIND.name]
    down, up = (flips + loss) / 2, (flips - loss) / 2
    counts = draw.multinomial(rows, [down, up, 1 - down - up], size=times)
    shares = 1 - (counts[:, 0] + counts[:, 1]) / rows
    each, inverse = np.unique(counts[:, :2], axis=0, return_inverse=True)
    metric = np.array([shown(int(wrong), int(right), rows, draw) for wrong, right in each])[inverse.ravel()]
    agreement = shares < least - two_errors(least, rows)
    plain = ((counts[:, 0] - counts[:, 1]) / rows > 0.01 + 1e-9) | (shares < least)
    rates = (metric, agreement, metric | agreement, plain)
    return (f"{100 * loss:g}", f"{100 * flips:g} %", f"{rows:,}", *(f"{100 * refused.mean():.2f} %" for refused in rates))


def shown(wrong: int, right: int, rows: int, draw: np.random.Generator) -> bool:
    """Whether so many labels that turn wrong and right show a loss beyond the bound.

    Drawing rows with replacement draws their three counts: the same bootstrap as `loss_of`, which `check` compares it with.
    """
    counts = draw.multinomial(rows, [wrong / rows, right / rows, 1 - (wrong + right) / rows], size=RESAMPLES)
    return float(np.percentile((counts[:, 0] - counts[:, 1]) / rows, 5)) > BOUNDS["int8"].metric_loss + 1e-9


def check() -> float:
    """Largest difference, in points, between the lower bound of `loss_of` and that of the counts, over some counts."""
    draw, worst = np.random.default_rng(1), 0.0
    for wrong, right in ((0, 0), (16, 0), (20, 8), (40, 10)):
        outputs = np.tile([1.0, 0.0], (800, 1))
        turned = outputs.copy()
        turned[: wrong + right] = turned[: wrong + right, ::-1]
        labels = np.zeros(800, dtype=int)
        labels[wrong : wrong + right] = 1
        theirs = loss_of(BOUNDS["int8"], KIND, outputs, turned, labels).at_least
        counts = draw.multinomial(800, [wrong / 800, right / 800, 1 - (wrong + right) / 800], size=RESAMPLES)
        worst = max(worst, abs(theirs - float(np.percentile((counts[:, 0] - counts[:, 1]) / 800, 5))))
    assert len(paired_changes(KIND.metric.value, turned, outputs, labels, resamples=10)) == 10
    return 100 * worst


Change = Callable[[np.ndarray], np.ndarray]
"""A weight (in, out) as the graph holds it -> what is there instead."""


@dataclass(frozen=True)
class Fault:
    """What is done to the matrices whose names end so; `place` is which of them: first, middle, last, or every one."""

    name: str
    ending: str
    place: str
    change: Change


def to_bits(bits: int) -> Change:
    """Rounded to so many bits, one scale a channel."""

    def change(weight: np.ndarray) -> np.ndarray:
        scale = np.maximum(np.abs(weight).max(axis=0, keepdims=True) / (2 ** (bits - 1) - 1), 1e-12)
        return np.round(weight / scale) * scale

    return change


def loud(weight: np.ndarray) -> np.ndarray:
    """8 channels are 8 times as large."""
    changed = weight.copy()
    changed[:, :8] *= 8
    return changed


FAULTS = (
    *(Fault(f"{bits} bits", "", "every", to_bits(bits)) for bits in (6, 5, 4)),
    Fault("a query matrix is 0", "query", "first", np.zeros_like),
    Fault("a value matrix is 0", "value", "middle", np.zeros_like),
    Fault("a matrix of the FFN is 0", "output.dense", "last", np.zeros_like),
    Fault("a value matrix x 1.25", "value", "middle", lambda weight: 1.25 * weight),
    Fault("a matrix of the FFN x 1.25", "output.dense", "first", lambda weight: 1.25 * weight),
    Fault("8 channels x 8", "output.dense", "middle", loud),
)


def spoiled(graph: onnx.ModelProto, fault: Fault) -> onnx.ModelProto:
    """The graph with a fault in it."""
    names = [
        name
        for name in matrices(graph)
        if name.endswith(fault.ending) and "embed" not in name and "attention.output" not in name
    ]
    places = {"first": names[:1], "middle": names[len(names) // 2 :][:1], "last": names[-1:], "every": names}
    copy = onnx.ModelProto()
    copy.CopyFrom(graph)
    weights = {tensor.name: tensor for tensor in copy.graph.initializer if len(tensor.dims) == 2}
    for node in copy.graph.node:
        for name in set(node.input) & weights.keys() if node.name in places[fault.place] else ():
            value = np.ascontiguousarray(fault.change(numpy_helper.to_array(weights[name])), dtype=np.float32)
            weights[name].CopyFrom(numpy_helper.from_array(value, name))
    return copy


FILE_COLUMNS = (
    "run",
    "model",
    "file",
    "rows",
    "metric",
    "90 % interval",
    "labels agree",
    "beyond rounding",
    "of rounding",
    "refused by",
)


def file_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """A row for every file of the two models of a run."""
    threads = default_threads()
    inputs = open_run(folder).inputs(threads)
    data = load_data(inputs)
    models = {
        "dense": merge_all(load_model(inputs.dense, inputs.base)),
        COMPRESSED: load_model(inputs.nearest("model"), inputs.base),
    }
    for name, model in models.items():
        prover = Prover(name, model, data, Quiet(), threads)
        _ = prover.reference
        graph, rows = traced(model, data), calibration(ExportConfig(runtime=["openvino"]), data, 0)
        with tempfile.TemporaryDirectory() as scratch:
            for number, fault in enumerate((None, *FAULTS)):
                made = graph if fault is None else spoiled(graph, fault)
                place, bits = Path(scratch, str(number)), weight_bits()
                paths = {"onnxruntime": write_onnx(made, place, precisions=["int8"], fuse=can_fuse(model))["int8"]}
                if fault is None:
                    paths["openvino"] = export_openvino(made, place, precisions=["int8"], rows=rows)["int8"]
                for key, path in paths.items():
                    title = f"{RUNTIMES[key].title}, {fault.name if fault else 'sound'}"
                    outputs = prover.outputs(RUNTIMES[key], path, "int8", title)
                    result = prover.compare(title, "int8", outputs, RUNTIMES[key], bits=bits)
                    yield (folder.name, name, title, *cells(result))


def cells(result) -> tuple[str, ...]:
    """Figures of one comparison."""
    loss, moved = result.loss, result.distance / result.rounding
    shares = (f"{100 * agreement:.1f} %" for agreement in (result.agreement, result.agreement_beyond_noise))
    # 0.0 -: nothing lost is no -0.00
    change, low, high = (0.0 - 100 * part for part in (loss.found, loss.at_most, loss.at_least))
    interval = f"{low:+.2f} to {high:+.2f}"
    return (f"{result.rows:,}", f"{change:+.2f}", interval, *shares, f"{moved:.2f} x", ", ".join(result.failed))


class Quiet:
    """A workspace that shows and keeps nothing."""

    def progress(self, _description: str, _total: int):
        from contextlib import nullcontext

        return nullcontext(self)

    def advance(self, _steps: int = 1) -> None: ...

    def proven(self, _record: dict) -> None: ...


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="rates of refusal of drawn labels")
    parser.add_argument("--rows", type=int, nargs="+", default=[277, 400, 800, 1500, 3000])
    parser.add_argument("--times", type=int, default=100_000, help="draws of each row of the table")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="folders of finished runs, up to merge at least")
    parser.add_argument("--out", type=Path, help="folder for gate.md")
    options = parser.parse_args(arguments)
    if not (options.simulate or options.runs):
        parser.error("give --simulate, --runs, or both")
    parts = ["# What the gate of int8 refuses\n\n"]
    if options.simulate:
        made = [simulated(rows, *rates, options.times) for rates in RATES for rows in options.rows]
        note = f"`--simulate --times {options.times}`; the bounds of the two bootstraps differ by {check():.2f} points at most"
        parts += [f"## Labels that turn by chance\n\n{note}.\n\n", table(COLUMNS, made)]
    rows = []
    for folder in options.runs:
        for row in file_rows(folder):
            rows.append(row)
            print(" | ".join(row), flush=True)
    if rows:
        where = machine([STAGE], default_threads())
        note = f"{where['cpu']}, {', '.join(where['instructions'])}, {where['threads']} threads"
        parts += [f"\n## Sound files, and files with a fault\n\n{note}.\n\n", table(FILE_COLUMNS, rows)]
    text = "".join(parts)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / "gate.md", text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
