"""Jobs: the trials of a plan as checked pipelines, and the stages whose quality is summarized."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compressor.errors import UserError, UserErrors
from compressor.text_files import read_text
from pipelines.engine.preflight import check_inputs
from pipelines.file.config import RECIPES, Pipeline, load_pipeline
from pipelines.file.yaml_source import GIVERS, PIPELINE
from pipelines.sweeps.compared_keys import require_effects, require_rows_run, require_rows_used, require_used
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial, require_all_rows, subset_of
from pipelines.sweeps.trial_run import END, TrialJob, faults_of, named, naming


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

    def on_own_tasks(self, trial: SweepTrial) -> SweepTrial:
        """The trial, whose subset is that of its own tasks: named rows may have other ones than the first of them.

        Raises UserError E115 and what `load_pipeline` does.
        """
        if self.plan.subsets is None:
            return trial
        return replace(trial, repeat=subset_of(self._whole(trial), next(iter(trial.repeat.values()))))

    def _whole(self, trial: SweepTrial) -> Pipeline:
        """The pipeline of a trial without its subset. Raises UserError E115 where that sets one itself."""
        pipeline = self._pipeline(replace(trial, repeat={}))
        with naming(trial.name):
            require_all_rows(pipeline)
        return pipeline

    def _require_rows_run(self, trials: Sequence[SweepTrial], jobs: Sequence[TrialJob]) -> None:
        for trial, job in zip(trials, jobs, strict=True):
            require_rows_run(trial, self.plan.grid, job)

    def __call__(self, trial: SweepTrial) -> TrialJob:
        """The job, its pipeline, models and data checked. Raises UserError E1xx, E2xx, E3xx."""
        own = self._pipeline(trial)
        if self.plan.subsets is not None:
            self._whole(trial)
        with naming(trial.name):
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
            with _telling_of_folder(self.plan):
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
        try:
            return load_pipeline(self.path, self.overrides, trial.presets, self.plan.data, self.text, trial.settings)
        except UserErrors as found:
            # a fault at a key that the sweep or --set gives says which it is
            faults = [fault if fault.where.startswith(GIVERS) else named(fault, trial.name) for fault in found.errors]
            raise UserErrors(faults) from None


def load_first(path: Path, plan: SweepPlan, overrides: Sequence[str]) -> Pipeline:
    """The pipeline of a file with the first of its named rows; where it is faulty so, as values that are compared replace the
    fault, also with the first value of every other key. Raises what `load_pipeline` does."""
    try:
        return load_pipeline(path, overrides, plan.first, plan.data)
    except UserErrors:
        return load_pipeline(path, overrides, plan.first, plan.data, swept=plan.first_settings)


@contextlib.contextmanager
def _telling_of_folder(plan: SweepPlan) -> Iterator[None]:
    """Context in which a file that a bundled table does not find beside itself (E201) is asked for by --folder: tables come
    without their data."""
    try:
        yield
    except (UserError, UserErrors) as found:
        faults = faults_of(found)
        if plan.data is not None:
            raise
        raise UserErrors([_asked_for(fault) for fault in faults]) from None


def _asked_for(fault: UserError) -> UserError:
    if fault.code != "E201" or str(RECIPES) not in fault.where:
        return fault
    fix = "Give --folder DATA, the folder that the comment at the top of the recipe describes"
    return UserError("E201", fault.what, fix, fault.where)


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
