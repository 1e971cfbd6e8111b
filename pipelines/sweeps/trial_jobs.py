"""Jobs: the trials of a plan as checked pipelines, and the stages whose quality is summarized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compressor.errors import UserError
from compressor.text_files import read_text
from pipelines.engine.preflight import check_inputs
from pipelines.file.config import Pipeline, load_pipeline
from pipelines.file.yaml_source import PIPELINE
from pipelines.sweeps.compared_keys import require_effects, require_rows_run, require_rows_used, require_used
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
    stage: str | None = None
    """The only stage that is summarized, if there is one."""
    text: str = field(init=False)
    _digests: dict[str, str] = field(init=False, default_factory=dict)
    """sha256 of every data file and model, as it was when the first trial that reads it was made."""
    _sound: dict[str, dict[str, str]] = field(init=False, default_factory=dict)
    """What was checked -> the digests of its files and models."""

    def __post_init__(self) -> None:
        self.text = read_text(self.path, PIPELINE)
        require_rows_used(self.plan.grid)

    def jobs(self, trials: Sequence[SweepTrial]) -> list[TrialJob]:
        """The jobs of all trials of a sweep. Raises UserError E115 for a key without effect, and what each job does."""
        jobs = [self(trial) for trial in trials]
        require_effects(self.plan.axes, trials, jobs)
        self._require_rows_run(trials, jobs)
        return jobs

    def probe(self, trials: Sequence[SweepTrial]) -> None:
        """Check runs with which a search begins. Raises UserError E115 for a key of named rows that is not read, and what each
        job does."""
        self._require_rows_run(trials, [self(trial) for trial in trials])

    def _require_rows_run(self, trials: Sequence[SweepTrial], jobs: Sequence[TrialJob]) -> None:
        for trial, job in zip(trials, jobs, strict=True):
            require_rows_run(trial, self.plan.grid, job)

    def __call__(self, trial: SweepTrial) -> TrialJob:
        """The job, its pipeline, models and data checked. Raises UserError E1xx, E2xx, E3xx."""
        own = self._pipeline(trial)
        with naming(trial.name):
            if self.plan.subsets is not None:  # columns of a table have tasks of their own
                require_all_rows(self._pipeline(replace(trial, repeat={})))
            # rows of a table may have other stages than the first
            until = self.common.until or last_model(own)
            self._require_stages(measured(own, until, self.stage))
        require_used(trial, self.plan.grid, self.overrides, own, until)
        with naming(trial.name):
            digests = self._check(own)
        run = replace(own, name=f"{self.folder}/{trial.name}")
        return replace(self.common, name=trial.name, pipeline=run, until=until, digests=digests)

    def _check(self, pipeline: Pipeline) -> dict[str, str]:
        """Check the models and data of a pipeline, once for all trials that read them alike, and give the sha256 that each file
        and model had when the sweep first read it. Raises UserErrors E113, E2xx, E3xx."""
        inputs = _inputs_of(pipeline)
        if inputs not in self._sound:
            ready = check_inputs(pipeline)
            models = {model.reference: model.sha256 for model in (ready.base, *ready.models.values())}
            self._sound[inputs] = {str(path): sha256 for path, sha256 in ready.data.items()} | models
        for name, sha256 in self._sound[inputs].items():
            self._digests.setdefault(name, sha256)
        return {name: self._digests[name] for name in self._sound[inputs]}

    def _require_stages(self, stages: tuple[str, ...]) -> None:
        """Raises UserError E115 for a trial whose stages are not those of the table's columns."""
        if self.common.stages not in ((END,), stages):
            what = f"the stages that measure its quality are {', '.join(stages)}, and not {', '.join(self.common.stages)}"
            raise UserError("E115", what, "Compare other stages as named rows of a grid file")

    def _pipeline(self, trial: SweepTrial) -> Pipeline:
        return load_pipeline(self.path, self.overrides, trial.presets, self.plan.data, self.text, trial.settings)


def _inputs_of(pipeline: Pipeline) -> str:
    """What decides whether the models and data of a pipeline fit it: of its stages the lengths and what is generated behind
    them, and the configs of those that name files or models of their own."""
    kinds = [task.kind for task in pipeline.all_tasks.values()]
    lengths = [(list(entry.row.lengths(entry.config)), entry.row.behind(entry.config, kinds)) for entry in pipeline.stages]
    named = [
        entry.config
        for entry in pipeline.stages
        if entry.row.beside.files_of(entry.config) or entry.row.beside.models_of(entry.config)
    ]
    return repr((pipeline.model, pipeline.architecture, pipeline.all_tasks, lengths, named))


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
