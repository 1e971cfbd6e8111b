"""What a stage is given, and the fingerprint of everything that decides its result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from compressor.models.build import further_ends
from compressor.tasks import ending, named_files
from compressor.tasks.task_kind import kind_of
from compressor.training.processes import launched
from export.runtimes.runtime_registry import packages_of
from pipelines.engine.environment import accelerator, package_versions, product
from pipelines.engine.invocation import Run
from pipelines.engine.scorers import scored_by
from pipelines.engine.stage import Artifact, Entry, Inputs, dense_of
from pipelines.engine.store import digest, fingerprint
from pipelines.file.config import without_id
from pipelines.file.yaml_source import KeyPath


def inputs_of(run: Run, number: int, earlier: Sequence[Artifact]) -> Inputs:
    """The inputs that the stage declares, and nothing else."""
    pipeline, entry = run.pipeline, run.entries[number]
    stage = entry.row
    everything = "*" in stage.accepts
    kinds = {*stage.needs, *stage.accepts}
    before = [previous.id for previous in pipeline.stages[:number]]
    failed = [failure for failure in run.failures if failure["stage"] in before]
    # the fingerprint has the content of the data files, of the models and of the artifacts; a report also names them
    names = [file.name for task in pipeline.all_tasks.values() for file in named_files(task).values()]
    named = {"files": names, "model": run.ready.base.reference, "artifacts": [artifact.id for artifact in earlier]}
    facts = {"name": pipeline.name, "stages": before, "command": pipeline.command, "product": product(), **named}
    if beside := {entry.id: found for entry in run.entries[:number] if (found := _names_beside(run, entry))}:
        facts["beside"] = beside
    if failed:
        facts["failures"] = failed
    return Inputs(
        base=run.ready.base,
        task=pipeline.task,
        seed=pipeline.seed,
        artifacts=tuple(artifact for artifact in earlier if everything or artifact.kind in kinds),
        dense=dense_of(earlier) if stage.uses_dense else None,
        run=facts if everything else {},
        threads=run.threads,
        tasks=pipeline.tasks,
        models={reference: run.ready.models[reference] for reference in stage.beside.models_of(entry.config).values()},
        require_unchanged=run.originals.require,
    )


def _names_beside(run: Run, entry: Entry) -> dict[str, str]:
    """The names of the files and the references of the models that a stage's config names beside the task's, by key."""
    beside = entry.row.beside
    files = {key: path.name for key, path in beside.files_of(entry.config).items()}
    return files | {key: run.ready.models[reference].reference for key, reference in beside.models_of(entry.config).items()}


def fingerprint_of(run: Run, number: int, earlier: Sequence[Artifact]) -> str:
    """sha256 over everything that affects the stage's result."""
    entry, inputs = run.entries[number], inputs_of(run, number, earlier)
    stage = entry.row
    return fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": _config_by_content(run, entry),
            "artifacts": [digest(artifact) for artifact in inputs.artifacts],
            "dense": digest(inputs.dense) if inputs.dense else None,
            "run": inputs.run,
            "base": inputs.base.sha256,
            **by_key(_tasks_by_content(run, entry)),
            "seed": inputs.seed,
            "packages": package_versions(stage, (*stage.extras(entry.config), *_timed_packages(run, number))),
            "python": list(sys.version_info[:2]),
            "threads": run.threads,
            **_affecting_some(run, entry),
        }
    )


def _content_of(run: Run) -> dict[str, dict[str, str]]:
    """What stands for every data file of the run: its path -> its sha256, and how it is read."""
    return {str(path): {"sha256": sha256, "ending": ending(path)} for path, sha256 in run.ready.data.items()}


def _config_by_content(run: Run, entry: Entry) -> dict[str, Any]:
    """A stage's config, the files and models in it by their content."""
    content = _content_of(run)
    files = {key: content[str(path)] for key, path in entry.row.beside.files_of(entry.config).items()}
    models = {key: model.sha256 for key, model in run.ready.models_of(entry).items()}
    return {**without_id(entry.config), **files, **models}


def _tasks_by_content(run: Run, entry: Entry) -> dict[KeyPath, Any]:
    """The run's tasks, by key path, without what the stage does not read; their files by content, or None if it reads none."""
    stage, content = entry.row, _content_of(run)
    reads_data = stage.reads_data(entry.config) if callable(stage.reads_data) else stage.reads_data
    left_out = ({"subset"} if not reads_data else set()) | ({"test"} if not stage.scores_tests else set())

    def by_content(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: by_content(inner) for key, inner in value.items()}
        return content.get(str(value), value) if reads_data or str(value) not in content else None

    return {
        path: by_content(task.model_dump(mode="json", exclude_none=True, exclude=left_out))
        for path, task in run.pipeline.all_tasks.items()
    }


def _affecting_some(run: Run, entry: Entry) -> dict[str, Any]:
    """Facts that affect the results of some stages only."""
    stage, tasks = entry.row, list(run.pipeline.all_tasks.values())
    facts = dict(stage.surroundings(entry.config))
    if (stage.scores_tests or stage.scores_texts) and (scores := scored_by(tasks)):
        facts["scores"] = scores
    # torch gives different bits on a GPU
    if "torch" in stage.packages and (card := accelerator()):
        facts["accelerator"] = card
    # sums over processes round differently, and each draws its own masks of dropout
    if stage.trains and launched() > 1:
        facts["processes"] = launched()
    if any(kind_of(task.kind).generates for task in tasks) and (ends := further_ends(run.ready.base.folder)):
        facts["ends"] = ends
    if stage.merges and run.ready.copied:
        facts["copied"] = dict(run.ready.copied)
    return facts


def _timed_packages(run: Run, number: int) -> tuple[str, ...]:
    """Packages of the runtimes whose files a benchmark times: a new version may compute equal files in another time."""
    exports = [entry for entry in run.entries[:number] if entry.row.exports]
    return packages_of(exports[-1].config.runtime) if exports and run.entries[number].row.measures else ()


def by_key(tasks: dict[KeyPath, Any]) -> dict[str, Any]:
    """Nest values by key path: {("task",): x} -> {"task": x}; {("tasks", "a"): x} -> {"tasks": {"a": x}}."""
    many = {path[1]: facts for path, facts in tasks.items() if len(path) > 1}
    return {"tasks": many} if many else {"task": tasks[("task",)]}
