"""Jobs: the trials of a plan as checked pipelines, and the stages whose quality is summarized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.reading import check_data
from compressor.text_files import read_text
from pipelines.file.config import Pipeline, load_pipeline
from pipelines.file.yaml_source import PIPELINE
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial, require_all_rows
from pipelines.sweeps.trial_run import END, TrialJob, naming


@dataclass
class JobMaker:
    """Makes the job of a trial. The file is read once: editing it during a long sweep must not affect later trials."""

    path: Path
    plan: SweepPlan
    overrides: Sequence[str]
    folder: str
    """Name of the sweep's folder."""
    common: TrialJob
    """What all jobs share; its `until` is '' where each pipeline runs to its own last model."""
    checked: list[dict[tuple, TaskConfig]]
    """Tasks whose data is known to be valid."""
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = read_text(self.path, PIPELINE)

    def __call__(self, trial: SweepTrial) -> TrialJob:
        """The job, its pipeline and data checked. Raises UserError E1xx, E2xx."""
        own = self._pipeline(trial)
        with naming(trial.name):
            if self.plan.subsets is not None:  # columns of a table have tasks of their own
                require_all_rows(self._pipeline(replace(trial, repeat={})))
            if own.all_tasks not in self.checked:
                for task in own.all_tasks.values():
                    check_data(task)
                self.checked.append(own.all_tasks)
            # rows of a table may have other stages than the first
            until = self.common.until or last_model(own)
            for entry in () if self.common.stages == (END,) else self.common.stages:
                own.number(entry, "--stage")
            own.number(until, "--until")
        run = replace(own, name=f"{self.folder}/{trial.name}")
        return replace(self.common, name=trial.name, pipeline=run, until=until)

    def _pipeline(self, trial: SweepTrial) -> Pipeline:
        return load_pipeline(self.path, [*self.overrides, *trial.settings], trial.presets, self.plan.data, self.text)


def last_model(pipeline: Pipeline) -> str:
    """The last stage that changes the model. Raises UserError E115 when there is none."""
    # a merged model is bit-equal to the model before it, so its quality is not measured again
    ids = [entry.id for entry in pipeline.stages if entry.row.publishes_model and not entry.row.merges]
    if not ids:
        raise UserError("E115", "no stage of this pipeline measures quality", "Add a tune", pipeline.source.where(("stages",)))
    return ids[-1]


def measured(pipeline: Pipeline, until: str, stage: str | None) -> tuple[str, ...]:
    """The stages whose quality is summarized: every one up to `until` that produces a model, or `stage` alone.

    Raises UserError E111 (unknown, or after `until`), E115 (yields no model).
    """
    last = pipeline.number(until, "--until")
    ids = tuple(entry.id for entry in pipeline.stages[: last + 1] if entry.row.publishes_model)
    if stage is None:
        if not ids:
            raise UserError("E115", f"--until {until}: nothing measures quality up to there", "Name a later stage, or drop it")
        return ids
    if pipeline.number(stage, "--stage") > last:
        raise UserError("E111", f"--stage {stage} comes after --until {until}", "Name a later --until")
    if stage not in ids:
        raise UserError("E115", f"--stage {stage}: it measures no quality", f"Stages that do: {', '.join(ids) or 'none'}")
    return (stage,)
