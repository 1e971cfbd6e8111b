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
    content = {str(path): {"sha256": sha256, "ending": ending(path)} for path, sha256 in run.ready.data.items()}
    reads_data = stage.reads_data(entry.config) if callable(stage.reads_data) else stage.reads_data
    left_out = ({"subset"} if not reads_data else set()) | ({"test"} if not stage.scores_tests else set())

    def by_content(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: by_content(inner) for key, inner in value.items()}
        return content.get(str(value), value) if reads_data or str(value) not in content else None

    tasks = {
        path: by_content(task.model_dump(mode="json", exclude_none=True, exclude=left_out))
        for path, task in run.pipeline.all_tasks.items()
    }
    named = {key: content[str(path)] for key, path in stage.beside.files_of(entry.config).items()}
    others = run.ready.models_of(entry)
    named |= {key: model.sha256 for key, model in others.items()}
    kinds = [task.kind for task in run.pipeline.all_tasks.values()]
    ends = further_ends(inputs.base.folder) if any(kind_of(kind).generates for kind in kinds) else []
    texts = stage.scores_tests or stage.scores_texts
    loads = "transformers" in stage.packages
    decodes = texts and any(task.decode is not None for task in run.pipeline.all_tasks.values())
    before = base_corrections(inputs.base.folder, inputs.base.sha256, decodes=decodes) if loads else {}
    read = {key: base_corrections(model.folder, model.sha256, decodes=False) for key, model in others.items() if loads}
    before_of_others = {key: found for key, found in read.items() if found}
    judges = stage.publishes_model or stage.exports or stage.measures
    # an earlier version drew the rows of such metrics with a bias
    biased = judges and any(kind_for(task).output_metric.resampled for task in run.pipeline.all_tasks.values())
    # torch gives different bits on a GPU
    card = accelerator() if "torch" in stage.packages else None
    return fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": {**without_id(entry.config), **named},
            "artifacts": [digest(artifact) for artifact in inputs.artifacts],
            "dense": digest(inputs.dense) if inputs.dense else None,
            "run": inputs.run,
            "base": inputs.base.sha256,
            **by_key(tasks),
            "seed": inputs.seed,
            "packages": package_versions(stage, (*stage.extras(entry.config), *_timed_packages(run, number))),
            "python": list(sys.version_info[:2]),
            "threads": run.threads,
            **({"scores": scores} if texts and (scores := scored_by(run.pipeline.all_tasks.values())) else {}),
            **({"accelerator": card} if card else {}),
            # sums over processes round differently, and each draws its own masks of dropout
            **({"processes": launched()} if stage.trains and launched() > 1 else {}),
            **stage.surroundings(entry.config),
            **stage.corrected(entry.config, kinds),
            **stage.corrected_after(run.entries[:number]),
            **({"intervals": 2} if biased else {}),
            **({"base_corrections": before} if before else {}),
            **({"model_corrections": before_of_others} if before_of_others else {}),
            **({"ends": ends} if ends else {}),
            **({"copied": dict(run.ready.copied)} if stage.merges and run.ready.copied else {}),
        }
    )


def _timed_packages(run: Run, number: int) -> tuple[str, ...]:
    """Packages of the runtimes whose files a benchmark times: a new version may compute equal files in another time."""
    exports = [entry for entry in run.entries[:number] if entry.row.exports]
    return packages_of(exports[-1].config.runtime) if exports and run.entries[number].row.measures else ()


def by_key(tasks: dict[KeyPath, Any]) -> dict[str, Any]:
    """Nest values by key path: {("task",): x} -> {"task": x}; {("tasks", "a"): x} -> {"tasks": {"a": x}}."""
    many = {path[1]: facts for path, facts in tasks.items() if len(path) > 1}
    return {"tasks": many} if many else {"task": tasks[("task",)]}
