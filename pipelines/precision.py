"""`precision: auto` of the stage `export`: the files of every runtime, timed and judged; the fastest good one is kept."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.precision import MOST_EXCLUDED, Trial, choose, counts, judged
from pipelines.stages.export import (
    BUDGET,
    CALIBRATION_BATCH,
    WORDS,
    answers_of,
    calibration,
    hop_of,
    kind_of,
    record,
    traced,
    write_runtime,
)

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from export.sensitivity import Sensitivity
    from pipelines.hops import Answers
    from pipelines.loading import Data
    from pipelines.stage import Inputs, Workspace
    from pipelines.stages.export import ExportConfig

NAME = "compressed"
BATCH, LENGTH, ROUNDS = 8, 128, 10
"""The call that is timed, and how often."""
RANKING_ROWS = 32
"""Training rows on which the sensitivity of each matrix is measured."""
SHOWN = 8
"""Most sensitive matrices that the account lists, beside those left in fp32."""


def choose_precision(
    model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Write the compressed file that is kept, and fp32 of its runtime beside it: (parity records, files, account).

    Raises CheckError E610, E611 where a file in fp32 is not the same function.
    """
    with tempfile.TemporaryDirectory() as scratch:
        search = Search(model, config, data, workspace, inputs, Path(scratch))
        plain = [search.in_fp32(runtime) for runtime in config.runtime]
        whole = [search.written(runtime, ()) for runtime in config.runtime]
        kept, tried = choose([*plain, *whole], clock=search.clock, judge=search.judge, spared=search.spared)
        workspace.say(f"kept: {words(kept)}, {kept.speed:.2f} x the speed of fp32")
        beside = next(trial for trial in plain if trial.runtime == kept.runtime)
        chosen, files = list(dict.fromkeys([beside.path, kept.path])), {}
        for path in chosen:
            trial = kept if path == kept.path else beside
            shutil.copytree(path.parent, workspace.folder / NAME, dirs_exist_ok=True)
            at_home = workspace.folder / NAME / path.name
            files[trial.precision] = record(NAME, at_home, search.answers[path], data)
    records = [search.results[path].to_json() for path in chosen]
    return records, {kept.runtime: files}, search.account(kept, tried)


def words(trial: Trial) -> str:
    """'OpenVINO int8, 4 matrices in fp32'."""
    count = len(trial.excluded)
    spared = f", {count} {'matrix' if count == 1 else 'matrices'} in fp32" if count else ""
    return f"{WORDS[trial.runtime]} {trial.precision}{spared}"


@dataclass
class Search:
    """What the trials of one model share: its graph, its own answers, and each file's."""

    model: nn.Module
    config: ExportConfig
    data: Data
    workspace: Workspace
    inputs: Inputs
    scratch: Path
    answers: dict[Path, Answers] = field(default_factory=dict)
    results: dict[Path, Any] = field(default_factory=dict)
    rankings: dict[str, list[Sensitivity]] = field(default_factory=dict)
    written_files: int = 0

    @cached_property
    def graph(self) -> onnx.ModelProto:
        _ = self.reference  # before the model's deltas are taken apart for the graph: that is to be proven as well
        with self.workspace.progress(f"exporting {NAME}", 1) as bar:
            graph = traced(self.model, self.data, self.inputs.base)
            bar.advance()
        return graph

    @cached_property
    def reference(self) -> Answers:
        from compressor.tasks.features import torch_forward
        from pipelines.hops import ask

        return ask(torch_forward(self.model), self.data.validation, self.data, self.workspace, f"{NAME} in PyTorch")

    @property
    def budget(self) -> float:
        """Points of the metric."""
        return BUDGET if self.config.accuracy_budget is None else self.config.accuracy_budget

    @property
    def cell(self) -> tuple[int, int]:
        """(batch, length) of the call that is timed."""
        return self.config.batch or BATCH, self.config.length or min(LENGTH, self.inputs.task.max_length)

    def written(self, runtime: str, excluded: Sequence[str], precision: str = "int8") -> Trial:
        """A file in a folder of its own."""
        self.written_files += 1
        folder, rows = self.scratch / str(self.written_files), calibration(self.config, self.data, self.inputs.seed)
        made = write_runtime(runtime, self.graph, self.model, folder, [precision], rows, excluded)
        return Trial(runtime, precision, made[precision], tuple(excluded))

    def in_fp32(self, runtime: str) -> Trial:
        """The last resort, which must be the same function."""
        from export.parity import require
        from export.suspects import suspect_in_graph
        from pipelines.hops import telling_rows

        trial, rows = self.judge(self.written(runtime, (), "fp32")), self.data.validation
        require(trial.result, lambda: suspect_in_graph(self.model, trial.path, telling_rows(trial.result, rows, self.data)))
        return replace(trial, within=True, verdict="the last resort: the same function as PyTorch")

    def judge(self, trial: Trial) -> Trial:
        """Compare a file with PyTorch on all validation rows."""
        from pipelines.hops import compare_answers

        hop, rows = hop_of(NAME, trial.runtime, trial.precision), self.data.validation
        asked = (hop, self.data, self.workspace, self.inputs.threads)
        answers = self.answers[trial.path] = answers_of(trial.path, trial.precision, *asked)
        result = compare_answers(hop, kind_of(trial.precision), self.reference, answers, rows)
        self.results[trial.path] = result
        trial = judged(trial, result, self.budget / 100)
        if trial.precision != "fp32":
            self.workspace.say(f"{words(trial)}: {trial.verdict}")
        return trial

    def clock(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials with their median milliseconds, of one interleaved run."""
        from compressor.models import end_id
        from export.latency import Variant, measure

        end, size = end_id(self.inputs.base.folder), self.model.config.vocab_size
        variants = [Variant(str(trial.path), trial.runtime, trial.path, vocabulary=size, end=end) for trial in trials]
        with self.workspace.progress("timing what may be kept", ROUNDS) as bar:
            options = {"threads": self.inputs.threads, "seed": self.inputs.seed, "on_round": bar.advance}
            times = {one.variant: one.p50 for one in measure(variants, [self.cell], ROUNDS, **options)}
        plain = min(times[str(trial.path)] for trial in trials if trial.precision == "fp32")
        return [replace(trial, ms=(ms := times[str(trial.path)]), speed=plain / ms) for trial in trials]

    def spared(self, trial: Trial) -> Iterator[Trial]:
        """Files of an int8 trial in which 1, 2, 4, ... of the most sensitive matrices stay in fp32."""
        ranking = [one.name for one in self.ranking(trial.runtime)]
        for count in counts(len(ranking)):
            mixed = self.written(trial.runtime, ranking[:count])
            yield mixed
            shutil.rmtree(mixed.path.parent)  # nobody stopped here: it was not good enough

    def ranking(self, runtime: str) -> list[Sensitivity]:
        """The matrices, the most sensitive first; measured when int8 was not good enough, on training rows."""
        from compressor.tasks.features import predict
        from export.onnx import matrices
        from export.sensitivity import rank

        if runtime not in self.rankings:
            rows = self.data.train.draw(RANKING_ROWS, self.inputs.seed)
            how = {"rows": rows.tokens, "pad_id": self.data.pad_id, "labels": rows.labels, "batch_size": CALIBRATION_BATCH}
            ask = partial(predict, **how)
            names = matrices(self.graph)
            with self.workspace.progress("sensitivity of each matrix", len(names)) as bar:
                static = runtime == "openvino"
                self.rankings[runtime] = rank(self.model, names, ask, static=static, on_step=bar.advance)
        return self.rankings[runtime]

    def account(self, kept: Trial, tried: Sequence[Trial]) -> dict[str, Any]:
        """What was tried and why, as it stands in the metadata."""
        shown = {name: rows[: max(SHOWN, len(kept.excluded))] for name, rows in self.rankings.items()}
        batch, length = self.cell
        return {
            "budget": self.budget,
            "rows": len(self.data.validation),
            "ranking_rows": min(RANKING_ROWS, len(self.data.train)),
            "most_excluded": MOST_EXCLUDED,
            "batch": batch,
            "length": length,
            "rounds": ROUNDS,
            "tried": [{**trial.to_json(), "kept": trial.path == kept.path} for trial in tried],
            "matrices": {name: len(rows) for name, rows in self.rankings.items()},
            "sensitivity": {name: [asdict(row) for row in rows] for name, rows in shown.items()},
            "kept": {"runtime": kept.runtime, "precision": kept.precision, "excluded": list(kept.excluded)},
        }
