"""The `task` and `tasks` blocks of a pipeline file: their paths, and the faults that pydantic does not find."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from compressor.arguments import NAME_FIX, NAME_PATTERN
from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.task_kind import kind_for, kind_of
from compressor.text_files import from_home
from pipelines.file import limits
from pipelines.file.yaml_source import KeyPath, YamlSource

PATH_KEYS = ("train", "validation", "test")
"""Keys of a task that name data files; `test` may name several."""


def names_path(path: KeyPath) -> bool:
    """Whether the key at a path of a pipeline file is one of a task that names a data file, or several, or GLUE's folder."""
    return path[{"task": 1, "tasks": 2}.get(path[0], len(path)) :][:1] in {(key,) for key in (*PATH_KEYS, "folder")}


def with_paths(task: TaskConfig, folder: Path) -> TaskConfig:
    """The task with absolute paths."""

    def absolute(value: Path | dict[str, Path] | None) -> Path | dict[str, Path] | None:
        if isinstance(value, dict):
            return {name: absolute(path) for name, path in value.items()}
        return value if value is None else folder / from_home(value)

    return task.model_copy(update={key: absolute(getattr(task, key)) for key in PATH_KEYS})


def task_faults(source: YamlSource, task: TaskConfig | None, tasks: Mapping[str, TaskConfig] | None) -> Iterator[UserError]:
    """Faults of the tasks: none, both forms, names that no file can have or that are too long, metrics that their kind lacks,
    or kinds that cannot be combined with others."""
    if task is None and tasks is None:
        yield UserError("E105", "key 'task' is missing", "Add it, or tasks with several of them", source.where(()))
    if task is not None and tasks is not None:
        fix = "Keep task for one task, or tasks to train several together"
        yield UserError("E116", "task and tasks exclude each other", fix, source.where(("tasks",)))
    for name in tasks or ():
        if not re.fullmatch(NAME_PATTERN, name):
            yield UserError("E104", f"a task cannot be called {name!r}", NAME_FIX, source.where(("tasks", name)))
        elif len(name) > limits.NAME:
            what = f"has {len(name)} characters, where at most {limits.NAME} are allowed"
            yield UserError("E104", what, "Shorten it: files are named after the task", source.where(("tasks", name)))
    every = {("tasks", name): one for name, one in (tasks or {}).items()} | ({("task",): task} if task else {})
    for path, one in every.items():
        try:
            kind_for(one)
        except UserError as error:
            yield UserError(error.code, error.what, error.fix, source.where((*path, error.key)))
    yield from _faults_together(source, tasks or {})


def _faults_together(source: YamlSource, tasks: Mapping[str, TaskConfig]) -> Iterator[UserError]:
    """Faults of tasks beside one another: kinds that share no base, or not with the first task's, and a main metric that
    cannot be averaged with others."""
    first = next(iter(tasks.values()), None)
    mains = {one.metric or kind_of(one.kind).metric.key for one in tasks.values()}
    fix = "Use a separate pipeline with `task` for it"
    for name, one in tasks.items():
        kind, place = kind_of(one.kind), source.where(("tasks", name, "kind"))
        if not kind.shares_base:
            yield UserError("E118", f"a task of kind {one.kind} cannot share a base with others yet", fix, place)
        elif kind.auto_class != kind_of(first.kind).auto_class:
            what = f"a task of kind {one.kind} needs another model than one of kind {first.kind}: they cannot share a base"
            yield UserError("E118", what, fix, place)
        chosen = next((metric for metric in kind.choices if metric.key == one.metric), None)
        what = ""
        if chosen is not None and chosen.falls:
            what = f"{one.metric} falls when a model improves, and the mean of several tasks' metrics is to rise"
        elif chosen is not None and chosen.scale == 1 and (others := sorted(mains - {chosen.key})):
            what = f"{one.metric} is no share, and its mean with {' and '.join(others)} would be {one.metric}'s alone"
        if what:
            fix_metric = "Choose another metric: it is measured all the same"
            yield UserError("E119", what, fix_metric, source.where(("tasks", name, "metric")))
