"""`precision: auto` of the stage `export`: files for every runtime are timed and compared; the fastest good one is kept."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
from torch import nn

from compressor.errors import CheckError, UserError
from compressor.models.build import end_id
from compressor.tasks.data import Data
from export.auto.choose import MOST_EXCLUDED, Candidate, choose_candidate, with_verdict
from export.latency.core_time import disturbance
from export.latency.measure import LatencyVariant, measure
from export.parity.bounds import ACCURACY_BUDGET
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import session
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import (
    Exported,
    OneFile,
    calibration,
    in_fp32,
    left_out,
    record,
    require_memory,
    say_apart,
    say_result,
    traced,
    write_runtime,
)
from pipelines.stages.export.proving import COMPRESSED, RANKING_ROWS, ComparedFile, Prover, repaired

BATCH, LENGTH, ROUNDS = 8, 128, 10
"""Default shape of the timed call, and rounds of timing."""
LISTED = "Write the precisions to export in export.precision, without that one, in place of auto"
"""What to do about a file that cannot be opened."""
SHOWN = 8
"""Number of most sensitive matrices listed, in addition to those left in fp32."""


def choose_precision(
    model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> tuple[Exported, dict[str, Any]]:
    """Write the best compressed file, and fp32 of its runtime beside it: (the written files, the record of all trials).

    Raises CheckError E610, E611 if a file in fp32 fails its check.
    """
    with tempfile.TemporaryDirectory() as scratch:
        search = PrecisionSearch(model, config, data, workspace, inputs, Path(scratch))
        plain = [search.in_fp32(runtime) for runtime in config.runtime]
        narrow, failures = search.narrow()
        kept, tried = choose_candidate([*plain, *narrow], clock=search.clock, judge=search.judge, spared=search.spared)
        workspace.say(f"kept: {words(kept)}, {kept.speed:.2f} x the speed of fp32")
        if told := disturbance(search.waited):
            workspace.say(f"{told} (--force export chooses again)")
        say_result(search.compared[kept.path].result, workspace.say)
        beside = next(trial for trial in plain if trial.runtime == kept.runtime)
        chosen, files = list(dict.fromkeys([beside.path, kept.path])), {}
        for path in chosen:
            trial = kept if path == kept.path else beside
            shutil.copytree(path.parent, workspace.folder / COMPRESSED, dirs_exist_ok=True)
            at_home = replace(search.compared[path], path=workspace.folder / COMPRESSED / path.name)
            files[trial.precision] = record(COMPRESSED, at_home, trial.precision, data)
            say_apart(at_home.result.hop, files[trial.precision], workspace.say)
    records = [search.compared[path].result.to_json() for path in chosen]
    return Exported({kept.runtime: files}, records, failures), search.account(kept, tried)


def words(trial: Candidate) -> str:
    """Name of a trial: 'OpenVINO int8, 4 matrices in fp32'."""
    spared = f", {in_fp32(len(trial.excluded))}" if trial.excluded else ""
    return f"{RUNTIMES[trial.runtime].label} {trial.precision}{spared}"


@dataclass
class PrecisionSearch:
    """What the trials of one model share: its graph, its own predictions, and the results for each file."""

    model: nn.Module
    config: ExportConfig
    data: Data
    workspace: Workspace
    inputs: Inputs
    scratch: Path
    compared: dict[Path, ComparedFile] = field(default_factory=dict)
    written_files: int = 0
    waited: float = 0.0
    """The largest share of time that timed processes waited for a core."""

    @cached_property
    def prover(self) -> Prover:
        return Prover(COMPRESSED, self.model, self.data, self.workspace, self.inputs.threads, self.inputs.seed)

    @cached_property
    def graph(self) -> onnx.ModelProto:
        _ = self.prover.reference
        with self.workspace.progress(f"exporting {COMPRESSED}", 1) as bar:
            graph = traced(self.model, self.data, self.inputs.base)
            bar.advance()
        return graph

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows on which static int8 is calibrated."""
        return calibration(self.config, self.data, self.inputs.seed)

    @property
    def budget(self) -> float:
        """The allowed loss, in points of the metric."""
        return ACCURACY_BUDGET if self.config.accuracy_budget is None else self.config.accuracy_budget

    @property
    def cell(self) -> tuple[int, int]:
        """(batch, length) of the timed call."""
        return self.config.batch or BATCH, self.config.length or min(LENGTH, self.inputs.task.max_length)

    def written(self, runtime: str, excluded: Sequence[str], precision: str = "int8") -> Candidate:
        """Write a file in a separate folder."""
        self.written_files += 1
        folder = self.scratch / str(self.written_files)
        made = write_runtime(runtime, self.graph, self.model, folder, [precision], self.rows, excluded)
        return Candidate(runtime, precision, made[precision], tuple(excluded))

    def narrow(self) -> tuple[list[Candidate], list[dict[str, str]]]:
        """The files of the other precisions that can be opened, and why the others are left out."""
        trials, failures = [], []
        for runtime in self.config.runtime:
            for precision in self.config.precisions_of(runtime):
                if precision == "fp32":
                    continue
                trial = self.written(runtime, (), precision)
                try:
                    session(trial.path, runtime=RUNTIMES[runtime], threads=self.inputs.threads)
                    trials.append(trial)
                except UserError as error:
                    require_memory(error)
                    self.workspace.say(f"{words(trial)}: left out ({error.what})")
                    failures.append(left_out(error, LISTED))
        return trials, failures

    def in_fp32(self, runtime: str) -> Candidate:
        """The fp32 file, the fallback, which must pass its parity check."""
        trial = self.judge(self.written(runtime, (), "fp32"))
        if not trial.result.passed:
            raise self.prover.failure(trial.result, RUNTIMES[trial.runtime], trial.path)
        return replace(trial, within=True, verdict="the same function as PyTorch")

    def judge(self, trial: Candidate) -> Candidate:
        """Compare a file with PyTorch on all validation rows, and add its verdict. Raises CheckError E611, UserError E602 for
        one in fp32, UserError E908 for any."""
        work = OneFile(self.prover, self.graph, trial.path.parent, trial.runtime, trial.precision, self.rows)
        try:
            self.compared[trial.path] = compared = work.compared(trial.path, trial.excluded)
            trial = with_verdict(trial, compared.result, self.budget / 100)
        except (CheckError, UserError) as error:
            if trial.precision == "fp32":
                raise
            require_memory(error)
            trial = replace(trial, verdict=error.what)
        if trial.precision != "fp32":
            self.workspace.say(f"{words(trial)}: {trial.verdict}")
        return trial

    def clock(self, trials: Sequence[Candidate]) -> list[Candidate]:
        """The trials with their median milliseconds, from one interleaved run."""
        end, size = end_id(self.inputs.base.folder), self.model.config.vocab_size
        variants = [LatencyVariant(str(trial.path), trial.runtime, trial.path, vocabulary=size, end=end) for trial in trials]
        with self.workspace.progress("timing what may be kept", ROUNDS) as bar:
            options = {"threads": self.inputs.threads, "seed": self.inputs.seed, "on_round": bar.advance}
            timings = measure(variants, [self.cell], ROUNDS, **options)
        times = {timing.variant: timing.p50 for timing in timings}
        self.waited = max(self.waited, *(timing.waited for timing in timings))
        plain = min(times[str(trial.path)] for trial in trials if trial.precision == "fp32")
        return [replace(trial, ms=(ms := times[str(trial.path)]), speed=plain / ms) for trial in trials]

    def spared(self, trial: Candidate) -> Iterator[Candidate]:
        """Files of an int8 trial in which 1, 2, 4, ... of the most sensitive matrices stay in fp32."""
        static = RUNTIMES[trial.runtime].calibrated
        if trial.precision != "int8":
            return
        for mixed in repaired(
            self.prover,
            self.graph,
            trial.result,
            static=static,
            make=lambda excluded: self.judge(self.written(trial.runtime, excluded)),
        ):
            yield mixed
            shutil.rmtree(mixed.path.parent)  # nobody stopped here: it was not good enough

    def account(self, kept: Candidate, tried: Sequence[Candidate]) -> dict[str, Any]:
        """Metadata record of the trials and the reasons for their verdicts."""
        rankings = self.prover.rankings
        ranked = {name: rankings[static] for name in self.config.runtime if (static := RUNTIMES[name].calibrated) in rankings}
        shown = {name: rows[: max(SHOWN, len(kept.excluded))] for name, rows in ranked.items()}
        batch, length = self.cell
        return {
            "budget": self.budget,
            "rows": len(self.data.validation),
            "ranking_rows": min(RANKING_ROWS, len(self.data.train)),
            "most_excluded": MOST_EXCLUDED,
            "batch": batch,
            "length": length,
            "rounds": ROUNDS,
            "waited": self.waited,
            "tried": [{**trial.to_json(), "kept": trial.path == kept.path} for trial in tried],
            "matrices": {name: len(rows) for name, rows in ranked.items()},
            "sensitivity": {name: [asdict(row) for row in rows] for name, rows in shown.items()},
            "kept": {"runtime": kept.runtime, "precision": kept.precision, "excluded": list(kept.excluded)},
        }
