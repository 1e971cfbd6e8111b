"""E2E NLG by decoding: LoRA and DSEE on a decoder, scored over the 630 test inputs with all their references, as tables 2 and 4
of the DSEE paper (arXiv 2111.00160) on GPT-2-medium.

    python benchmarks/e2e.py --model DIR --data DIR --work runs/e2e --out docs/results/e2e.md
    python benchmarks/e2e.py ... --only "lora r4,dsee r4"                    part of the table
    python benchmarks/e2e.py ... --steps 8 --score 16 --beams 2              a trial in minutes
    python benchmarks/e2e.py ... --summary                                   the table of what is there, nothing trained

DIR of --data holds train.txt (or train.txt.gz) and test.txt, one line `input||reference`. Every run is an ordinary pipeline on
one store below --work, so the command can be stopped and started again. Nothing is chosen on the test file: the last step is
kept. Of LoRA's released code, which the paper follows: 5 epochs of 8 rows, rate 2e-4, alpha 32, texts of at most 64 tokens by
beam 10 with length penalty 0.8 and no 4-gram twice. Not of it: dropout and label smoothing of 0.1, 500 warm-up steps and
weight decay 0.01; here is no smoothing or decay, and the warm-up is the pipeline's default.

Estimated from single steps: SmolLM2-135M takes 2.4 s of a core a step, so a training of 26,286 steps 9 to 18 hours on two
cores, and decoding the 630 inputs 20 to 40 minutes; an arm that is pruned trains twice. With --epochs 1 it is a fifth of that.

Scores are those of sacrebleu, nltk and rouge-score, of lower-cased texts, not of the E2E challenge's own script: METEOR has no
synonyms here, and BLEU and NIST cut punctuation off words. Rows compare with each other, not with the paper's to the digit.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.grid import run_file, write_rows
from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.decoding.text_quality import change, read_statistics
from pipelines.engine.stage import Artifact
from pipelines.stages.generated_texts import TEXTS, value_in_words

METRICS = ["bleu", "nist", "meteor", "ter", "rouge_l"]
SELECT = {"score": "rpca", "scope": "matrix", "count": 16, "modules": ["query", "value"]}


@dataclass(frozen=True)
class Arm:
    """A row of the table: the method's stages before and after pruning, and what the paper has for GPT-2-medium (BLEU)."""

    name: str
    tune: dict
    table: str
    printed: str
    pruned: float = 0.0

    def stages(self, training: dict) -> list[dict]:
        """Its pipeline; `training` are the keys of every training."""
        select = [{"select": SELECT}] if self.tune["method"] == "dsee" else []
        stages = [*select, {"tune": {**self.tune, **training}}]
        if not self.pruned:
            return stages
        prune = {"structure": "weights", "criterion": "delta_or_weight", "scope": "global", "remove": self.pruned}
        return [*stages, {"prune": prune}, {"recover": {"method": "same", "distill": False, "control": False, **training}}]


def _tuned(method: str, rank: int) -> dict:
    return {"method": method, "rank": rank, "alpha": 32, **({"modules": ["query", "value"]} if method == "lora" else {})}


ARMS = (
    Arm("lora r4", _tuned("lora", 4), "2: low-rank", "70.38"),
    Arm("dsee r4", _tuned("dsee", 4), "2: low-rank + sparse", "70.29"),
    Arm("lora r2", _tuned("lora", 2), "2: low-rank", "69.17"),
    Arm("dsee r2", _tuned("dsee", 2), "2: low-rank + sparse", "69.70"),
    Arm("dsee r4, 80 % kept", _tuned("dsee", 4), "4: DSEE 80 %", "69.4", pruned=0.2),
    Arm("dsee r4, 50 % kept", _tuned("dsee", 4), "4: DSEE 50 %", "69.5", pruned=0.5),
)


def pairs_of(path: Path) -> Iterator[dict[str, str]]:
    """`prompt` and `target` of every line of one of the files."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        for line in filter(str.strip, stream):
            prompt, _, target = line.strip().partition("||")
            yield {"prompt": prompt.strip(), "target": target.strip()}


def write_task(data: Path, folder: Path, decode: dict, inputs: int | None) -> dict:
    """train.jsonl, and test.jsonl with all references of every input, or of `inputs` evenly spread ones; returns `task:`."""
    folder.mkdir(parents=True, exist_ok=True)
    train = next(path for path in (data / "train.txt", data / "train.txt.gz") if path.is_file())
    write_rows(folder / "train.jsonl", pairs_of(train))
    test = list(pairs_of(data / "test.txt"))
    prompts = list(dict.fromkeys(row["prompt"] for row in test))
    chosen = set(prompts if inputs is None else prompts[:: max(1, len(prompts) // inputs)][:inputs])
    write_rows(folder / "test.jsonl", (row for row in test if row["prompt"] in chosen))
    files = {"train": "train.jsonl", "validation": "test.jsonl"}
    return {"kind": "generation", **files, "max_length": 256, "decode": decode}


@dataclass(frozen=True)
class Table:
    """The runs on one store, and their settings."""

    options: argparse.Namespace
    task: dict

    @property
    def training(self) -> dict:
        """The keys of every training."""
        of = self.options
        length = {"epochs": of.epochs} if of.steps is None else {"steps": of.steps}
        return {**length, "learning_rate": of.rate, "batch_size": of.batch, "accumulate": of.accumulate}

    def artifact(self, arm: Arm, seed: int) -> Artifact | None:
        """The last trained model of a run: made, or found; None where it is not there and nothing is to be trained."""
        name = f"{arm.name.replace(' %', '').replace(',', '').replace(' ', '-')}-{seed}"
        file = {"name": name, "model": self.options.model, "task": self.task, "seed": seed, "stages": arm.stages(self.training)}
        artifacts = run_file(file, self.options.work / f"{name}.yaml", self.options.work, train=not self.options.summary)
        return artifacts.get("recover" if arm.pruned else "tune")


def row_of(arm: Arm, made: list[Artifact], base: Artifact | None) -> str:
    """A line of the table: medians over seeds, and the paired change of BLEU and NIST from the first arm (seed by seed, the
    first seed's interval)."""
    values = [artifact.metadata["generated"]["values"] for artifact in made]
    cells = [spread([TEXT_METRICS[key].scale * of[key] for of in values], key) for key in METRICS]
    trainable = f"{made[0].metadata['trainable']['body']:,}"
    against = "" if base is None or base.id == made[0].id else in_words(made[0], base)
    shown = (arm.name, trainable, *cells, against, f"{arm.table}: {arm.printed}", str(len(made)))
    return f"| {' | '.join(shown)} |"


def spread(values: list[float], key: str) -> str:
    """'68.4 ± 0.4': median and standard deviation over seeds, as the paper has them."""
    scale = TEXT_METRICS[key].scale
    median, deviation = statistics.median(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return value_in_words(key, median / scale) + (f" ± {value_in_words(key, deviation / scale)}" if deviation else "")


def in_words(ours: Artifact, base: Artifact) -> str:
    """The change of BLEU on the same inputs, with its 95 % interval."""
    figures = [read_statistics(artifact.folder / TEXTS)["bleu"] for artifact in (ours, base)]
    value, (low, high) = change("bleu", *figures)
    return f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def page(table: Table, made: dict[str, list[Artifact]], arms: list[Arm]) -> str:
    """The table of what is there, with its settings and a few texts."""
    options, first = table.options, next(iter(made.values()))[0]
    facts, names = first.metadata["generated"], [TEXT_METRICS[key].name for key in METRICS]
    length = f"{options.epochs:g} epochs" if options.steps is None else f"{options.steps} steps"
    header = ("", "trainable", *names, f"BLEU against {arms[0].name}", "paper, table: BLEU", "seeds")
    base = made[arms[0].name][0] if arms[0].name in made else None
    examples = [(row["prompt"], row["text"], row["references"][0]) for row in facts["examples"]]
    return "\n".join(
        [
            "# E2E NLG by decoding",
            "",
            f"{Path(options.model).name}, {length} of {options.batch * options.accumulate} rows at {options.rate:g} in each "
            f"training, on {facts['prompts']:,} test inputs with {facts['references']:,} references; beam "
            f"{options.beams}, length penalty {options.length_penalty:g}, no 4-gram twice, lower case. Medians over seeds ± "
            "standard deviation; the interval is a paired bootstrap over inputs, seed 0. The paper's column is GPT-2-medium by "
            "the challenge's script. Nothing was chosen on the test file.",
            "",
            f"| {' | '.join(header)} |",
            "|" + " --- |" * len(header),
            *(row_of(arm, made[arm.name], base) for arm in arms if arm.name in made),
            "",
            f"Texts of {next(iter(made))}, evenly spread over the inputs:",
            "",
            "| input | text | a reference |",
            "| --- | --- | --- |",
            *("| " + " | ".join(" ".join(cell.replace("|", ",").split()) for cell in row) + " |" for row in examples),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH of a decoder")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with train.txt(.gz) and test.txt")
    parser.add_argument("--work", type=Path, default=Path("runs/e2e"), help="store and pipeline files")
    parser.add_argument("--out", type=Path, help="the page to write, default e2e.md below --work")
    parser.add_argument("--only", help="names of arms, with commas between: " + "; ".join(arm.name for arm in ARMS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each arm, with the seeds 0, 1, ...")
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--steps", type=int, help="steps of each training, instead of --epochs")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--beams", type=int, default=10)
    parser.add_argument("--length-penalty", type=float, default=0.8)
    parser.add_argument("--score", type=int, help="test inputs that are used, evenly spread; default all")
    parser.add_argument("--summary", action="store_true", help="only the table of what is there")
    options = parser.parse_args()
    out = options.out or options.work / "e2e.md"
    out.parent.mkdir(parents=True, exist_ok=True)  # before hours of training, not after them
    chosen = ARMS if options.only is None else [arm for arm in ARMS if arm.name in named(options.only, parser)]
    decode = {"beams": options.beams, "max_new_tokens": 64, "no_repeat_ngram": 4, "lowercase": True, "metrics": METRICS}
    decode |= {"length_penalty": options.length_penalty} if options.beams > 1 else {}
    table, made = Table(options, write_task(options.data, options.work, decode, options.score)), {}
    for arm in chosen:
        started = time.monotonic()
        found = [artifact for seed in range(options.seeds) if (artifact := table.artifact(arm, seed))]
        if found:
            made[arm.name] = found
        print(f"{arm.name}: {len(found)} runs ({time.monotonic() - started:.0f} s)", flush=True)
    if not made:
        sys.exit("nothing is there: run it without --summary")
    text = page(table, made, list(chosen))
    out.write_text(text, encoding="utf-8")
    print(text)


def named(only: str, parser: argparse.ArgumentParser) -> set[str]:
    """The arms that --only names, at commas without a space behind (names may have others)."""
    names = {name.strip() for name in only.replace(", ", "\0").split(",")}
    names = {name.replace("\0", ", ") for name in names}
    if unknown := names - {arm.name for arm in ARMS}:
        parser.error(f"no arm is called {' or '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
