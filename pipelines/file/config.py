"""A pipeline file -> a checked `Pipeline`, or every fault in it, each in one line with its file, line and key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from compressor.errors import UserError, UserErrors
from compressor.models.architectures import Architecture, add_row
from compressor.models.row_file import read_row
from compressor.tasks import TaskConfig
from compressor.tasks.task_kind import kind_of
from pipelines.engine import stage as stage_table
from pipelines.engine.stage import NAME_PATTERN, Entry, Problem, Stage, StageConfig, load_stage
from pipelines.file import limits
from pipelines.file.faults import nearest, validated
from pipelines.file.yaml_source import KeyPath, YamlSource, dotted, first_of, parse, read_yaml

RECIPES = Path(__file__).parent.parent / "recipes"
PATH_KEYS = ("train", "validation")
"""Keys of a task that name data files."""


class PipelineFile(BaseModel):
    """The top level of a pipeline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME_PATTERN, max_length=limits.NAME, description="name of the run's folder")
    model: str = Field(
        min_length=1, max_length=limits.REFERENCE, description="pretrained: a hub id, a folder, or package:NAME/PATH"
    )
    architecture: Path | None = Field(
        default=None,
        description="a file with the row of the model's architecture, where none is built in: "
        "compress list architectures --discover MODEL --json",
    )
    task: TaskConfig | None = Field(default=None, description="the task: kind, files and columns")
    tasks: dict[str, TaskConfig] | None = Field(
        default=None, min_length=1, max_length=limits.TASKS, description="many tasks by name, instead of task"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of every random number")
    threads: int | None = Field(default=None, ge=1, le=1024, description="default: OMP_NUM_THREADS, or the physical cores")
    stages: list[Any] = Field(min_length=1, max_length=limits.STAGES, description="the stages, run from top to bottom")


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline. Paths in its tasks are absolute; a folder in `model` is relative to `source_folder`.

    `task` is the single task, or None if there are many: `tasks`, by name, in alphabetical order.
    """

    name: str
    model: str
    task: TaskConfig | None
    seed: int
    threads: int | None
    stages: tuple[Entry, ...]
    source_folder: Path
    source: YamlSource
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    command: str = ""
    """The command that runs it, for reports."""
    architecture: Architecture | None = None
    """The row of the model's architecture where the file brings one: it is in use from here on, and proven before a run."""

    @property
    def all_tasks(self) -> dict[KeyPath, TaskConfig]:
        """The one task or the many, by their key paths in the file."""
        return {("task",): self.task} if self.task else {("tasks", name): task for name, task in self.tasks.items()}

    def where(self, number: int) -> str:
        """Location of the stage `number` (from 0) in its file, for errors."""
        return self.source.where(self.source.locate(("stages", number, self.stages[number].name)))

    def number(self, entry_id: str, option: str) -> int:
        """Index of an entry in `stages`. Raises UserError E111, naming the option that refers to it."""
        ids = [entry.id for entry in self.stages]
        if entry_id not in ids:
            raise UserError("E111", f"{option}: no stage '{entry_id}' in this pipeline", nearest(entry_id, ids, "Stages"))
        return ids.index(entry_id)


def find_pipeline(name: str) -> Path:
    """Path of the pipeline file `name`, or of the bundled recipe of that name. Raises UserError E110."""
    recipes = {recipe.stem: recipe for recipe in sorted(RECIPES.glob("*.yaml"))}
    try:
        if Path(name).exists():
            return Path(name)
    except OSError:  # a name that is too long
        pass
    if name not in recipes:
        raise UserError(
            "E110", f"no pipeline file '{name:.200}'", nearest(name, list(recipes), "Give a file, or a bundled recipe")
        )
    return recipes[name]


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read, override (`tune.rank=8`) and check a pipeline file.

    Raises UserErrors with every fault found: E101 to E109, and those of the stages' own checks.
    """
    source = read_yaml(path)
    if not isinstance(source.data, dict):
        raise UserError("E101", "not a mapping of keys to values", "Start with name, model, task and stages", source.where(()))
    faults: list[UserError] = []
    _normalize(source)
    for text in overrides:
        faults += _collect(_override, source, text)
    top, top_faults = validated(PipelineFile, source, ())
    entries, stage_faults = _entries(source)
    faults += top_faults + stage_faults + (list(_task_faults(source, top)) if top else [])
    if not faults:
        faults = list(_unfit_faults(source, entries, top)) or list(_order_faults(source, entries))
    if faults or top is None:
        raise UserErrors(first_of(faults))
    folder = path.resolve().parent
    row = _architecture(top, folder, source)
    task = _with_paths(top.task, folder) if top.task else None
    # sorted: the order affects random numbers, and must not depend on the order in the file
    tasks = {name: _with_paths(config, folder) for name, config in sorted((top.tasks or {}).items())}
    command = command_of(path, overrides)
    stages = tuple(_with_files(entry, folder) for entry in entries)
    return Pipeline(top.name, top.model, task, top.seed, top.threads, stages, folder, source, tasks, command, row)


def _architecture(top: PipelineFile, folder: Path, source: YamlSource) -> Architecture | None:
    """Read the row that the file brings and let this process use it. Raises UserErrors E320."""
    if top.architecture is None:
        return None
    try:
        row = read_row(folder / top.architecture.expanduser())
        add_row(row)
    except UserError as error:
        raise with_place(error, source.where(("architecture",))) from None
    return row


def command_of(path: Path, overrides: Sequence[str]) -> str:
    """The command that runs a pipeline file as it is overridden, without the folders of one person's disk."""
    file = path.stem if path.parent == RECIPES else path.name
    pairs = (text.partition("=") for text in overrides)
    settings = [f"{key}{sign}{Path(value).name if Path(value).is_absolute() else value}" for key, sign, value in pairs]
    return shlex.join(["compress", "run", file, *(word for text in settings for word in ("--set", text))])


def _with_paths(task: TaskConfig, folder: Path) -> TaskConfig:
    """The task with absolute paths."""
    return task.model_copy(update={key: folder / Path(getattr(task, key)).expanduser() for key in PATH_KEYS})


def _with_files(entry: Entry, folder: Path) -> Entry:
    """The stage with absolute paths of its data files."""
    paths = {key: folder / path.expanduser() for key, path in entry.row.beside.files_of(entry.config).items()}
    return replace(entry, config=entry.config.model_copy(update=paths)) if paths else entry


def _task_faults(source: YamlSource, top: PipelineFile) -> Iterator[UserError]:
    """Faults of the tasks: none, both forms, names that no file can have, or kinds that cannot be combined with others."""
    if top.task is None and top.tasks is None:
        yield UserError("E105", "key 'task' is missing", "Add it, or tasks with several of them", source.where(()))
    if top.task is not None and top.tasks is not None:
        fix = "Keep task for one task, or tasks to train several together"
        yield UserError("E116", "task and tasks exclude each other", fix, source.where(("tasks",)))
    for name in top.tasks or ():
        if not re.fullmatch(NAME_PATTERN, name):
            fix = "Use letters, digits, '_', '-' and '.', a letter or digit first"
            yield UserError("E104", f"a task cannot be called {name!r}", fix, source.where(("tasks", name)))
    for name, task in (top.tasks or {}).items():
        if not kind_of(task.kind).shares_base:
            what = f"a task of kind {task.kind} cannot share a base with others yet"
            yield UserError("E118", what, "Use a separate pipeline with `task` for it", source.where(("tasks", name, "kind")))


def _unfit_faults(source: YamlSource, entries: Sequence[Entry], top: PipelineFile) -> Iterator[UserError]:
    """Fault of the first stage that does not support one task, or many, or its kind: the others would repeat it."""
    kinds = [task.kind for task in (top.tasks or {"task": top.task}).values()]
    for place, entry in enumerate(entries):
        for problem in entry.row.with_tasks(entry.config, top.tasks is not None, kinds):
            where = source.where(source.locate(("stages", place, entry.name, *problem.key)))
            yield UserError(problem.code, problem.what, problem.fix, where)
            return


def _collect(action: Callable[..., object], *arguments: object) -> list[UserError]:
    """Call a function and return the faults that it raises."""
    try:
        action(*arguments)
    except UserErrors as error:
        return error.errors
    except UserError as error:
        return [error]
    return []


def _normalize(source: YamlSource) -> None:
    """Rewrite stages given as a bare word, `- merge`, as the mapping `merge:` without values."""
    stages = source.data.get("stages")
    for number, item in enumerate(stages if isinstance(stages, list) else ()):
        if isinstance(item, str):
            stages[number] = {item: None}


def _raw_stages(source: YamlSource) -> list[tuple[int, str, Any]]:
    """(index, stage name, raw config) of every item that has the form of a stage."""
    stages = source.data.get("stages")
    items = enumerate(stages) if isinstance(stages, list) else ()
    return [(place, *next(iter(item.items()))) for place, item in items if isinstance(item, dict) and len(item) == 1]


def _ids(source: YamlSource) -> dict[int, str]:
    """Index -> id of every stage: the one given, or its name, or name-2, name-3, ... when those are taken."""
    raw = _raw_stages(source)
    explicit = {
        place: config["id"] for place, _, config in raw if isinstance(config, dict) and isinstance(config.get("id"), str)
    }
    taken, ids, last = set(explicit.values()), dict(explicit), {}
    for place, name, _ in raw:
        if place in explicit:
            continue
        number = last.get(name, 0) + 1
        while (candidate := name if number == 1 else f"{name}-{number}") in taken:
            number += 1
        ids[place], last[name] = candidate, number
        taken.add(candidate)
    return dict(sorted(ids.items()))


def _override(source: YamlSource, text: str) -> None:
    """Apply one `--set KEY=VALUE`. Unknown keys inside a config are left to validation. Raises UserError E109."""
    mark = f"--set {text}"
    key, equals, value_text = text.partition("=")
    parts: list[str | int] = [int(part) if part.isdecimal() and len(part) < 10 else part for part in key.split(".")]
    if not equals or "" in parts:
        raise UserError("E109", "not KEY=VALUE", "Write it as tune.rank=8 or seed=1", mark)
    value = parse(value_text, mark).data
    path, remaining = _start_of(source, parts, mark)
    for part in remaining[:-1]:
        path = _step(source, path, part, mark)
    if remaining:
        current = source.get(path)
        if current is None:
            source.put(path, {}, mark)
        elif not isinstance(current, dict | list):
            raise UserError("E109", f"'{dotted(path)}' holds a value, not keys", "Set it as a whole", mark)
        path = _step(source, path, remaining[-1], mark) if isinstance(current, list) else (*path, remaining[-1])
    source.put(path, _from_here(path, value), mark)


def _start_of(source: YamlSource, parts: list[str | int], mark: str) -> tuple[KeyPath, list[str | int]]:
    """Where an override begins (a top-level key, or a stage by its id), and the remaining parts of its key."""
    ids = {entry_id: place for place, entry_id in _ids(source).items()}
    first = str(parts[0])
    if first in PipelineFile.model_fields and parts != ["stages"]:
        return (first,), parts[1:]
    if first not in ids:
        keys = [*ids, *(key for key in PipelineFile.model_fields if key != "stages")]
        raise UserError("E109", f"neither a stage nor a key is called '{first}'", nearest(first, keys, "There are"), mark)
    place = ids[first]
    if len(parts) == 1:
        raise UserError("E109", f"'{first}' is a whole stage", f"Set one of its keys: {first}.KEY=VALUE", mark)
    return ("stages", place, next(iter(source.data["stages"][place]))), parts[1:]


def _step(source: YamlSource, path: KeyPath, part: str | int, mark: str) -> KeyPath:
    """Follow one part of an override's key. A list stands for its `items`, and a mapping without `items` for a list of one."""
    value = source.get(path)
    if (isinstance(value, list) and part == "items") or (
        isinstance(value, dict) and part in ("items", 0) and part not in value
    ):
        return path
    if isinstance(value, dict) and part in value:
        return (*path, part)
    if isinstance(value, list) and part in range(len(value)):
        return (*path, part)
    keys = list(value) if isinstance(value, dict) else [str(place) for place in range(len(value or ()))]
    raise UserError("E109", f"no '{part}' in '{dotted(path)}'", nearest(str(part), keys, "There are"), mark)


def _from_here(path: KeyPath, value: Any) -> Any:
    """Resolve a path from the command line relative to the current folder, not to the pipeline file."""
    if not isinstance(value, str):
        return value
    of_stage = load_stage(path[2]) if path[0] == "stages" and path[2] in stage_table.STAGE_NAMES else None
    data_file = path[-1] in (of_stage.beside.files if of_stage else PATH_KEYS if path[0] in ("task", "tasks") else ())
    model = path == ("model",) or (of_stage is not None and path[-1] in of_stage.beside.models)
    if data_file or (model and (value.startswith((".", "~")) or Path(value).is_dir())):
        return str(Path.cwd() / Path(value).expanduser())
    return value


def _entries(source: YamlSource) -> tuple[list[Entry], list[UserError]]:
    """Every stage with its validated config. A stage with a fault is left out."""
    entries: list[Entry] = []
    faults = list(_shape_faults(source))
    ids, seen = _ids(source), {}
    for place, name, _ in _raw_stages(source):
        path = ("stages", place, name)
        if name not in stage_table.STAGE_NAMES:
            fix = nearest(name, list(stage_table.STAGE_NAMES), "Stages")
            faults.append(UserError("E103", f"unknown stage '{name:.60}'", fix, source.where(path)))
            continue
        config, config_faults = validated(load_stage(name).config, source, path)
        faults += config_faults
        if config is None or config_faults:
            continue
        if ids[place] in seen:
            fix = "Give each stage its own id, or none"
            what = f"id '{ids[place]}' is taken by {seen[ids[place]]}"
            faults.append(UserError("E108", what, fix, source.where((*path, "id"))))
        seen.setdefault(ids[place], f"stages[{place}].{name}")
        entries.append(Entry(ids[place], name, config))
    return entries, faults


def _shape_faults(source: YamlSource) -> Iterator[UserError]:
    stages = source.data.get("stages")
    for place, item in enumerate(stages if isinstance(stages, list) else ()):
        if not isinstance(item, dict) or len(item) != 1:
            what = f"{len(item)} keys in one stage" if isinstance(item, dict) else "not a stage"
            yield UserError("E104", what, "Write each stage as '- NAME: {KEY: VALUE}'", source.where(("stages", place)))


def _order_faults(source: YamlSource, entries: Sequence[Entry]) -> Iterator[UserError]:
    """Faults in the order of stages that are valid by themselves."""
    reported: set[tuple[str, str]] = set()
    for place, entry in enumerate(entries):
        earlier, stage = tuple(entries[:place]), entry.row
        problems = list(stage.check(entry.config, earlier))
        # one missing stage must not cause a fault for every later stage
        if not problems and not reported:
            problems = list(_needs(stage, earlier))
        for problem in problems:
            if problem.key or (problem.code, problem.what) not in reported:
                reported.add((problem.code, problem.what))
                where = source.where(source.locate(("stages", place, entry.name, *problem.key)))
                yield UserError(problem.code, problem.what, problem.fix, where)
    if not reported:
        yield from _unused(source, entries)


def _unused(source: YamlSource, entries: Sequence[Entry]) -> Iterator[UserError]:
    """Fault of a select whose Ω is never used: the next select replaces it, or a prune cuts the matrices that it indexes."""
    for place, entry in enumerate(entries):
        if not entry.row.chooses_places:
            continue
        after = [later.row for later in entries[place + 1 :]]
        end = next((stage for stage in after if stage.removes or "omega" in (stage.produces, *stage.accepts)), None)
        if end is None or "omega" not in end.accepts:
            what = f"no stage uses the positions that '{entry.id}' chooses" + (
                f" before the {end.name} after it" if end else ""
            )
            where = source.where(source.locate(("stages", place, entry.name)))
            yield UserError("E114", what, "Put a tune or a recover right after it, or remove it", where)


def _needs(stage: Stage, earlier: tuple[Entry, ...]) -> Iterator[Problem]:
    stages = [entry.row for entry in earlier]
    for kind in stage.needs:
        if kind not in [previous.produces for previous in stages]:
            makers = [name for name in stage_table.STAGE_NAMES if name != stage.name and load_stage(name).produces == kind]
            what = f"no stage before it makes the '{kind}' that {stage.name} needs"
            yield Problem("E107", what, f"Put {' or '.join(makers)} before it")
            return
    if stage.uses_dense and not any(previous.trains for previous in stages):
        yield Problem("E107", f"no tune before it makes the dense model that {stage.name} needs", "Put a tune before it")


def without_id(config: StageConfig) -> dict[str, Any]:
    """The part of a stage's config that affects the result, as plain data: without its id and keys without a value.

    So a key added by a later version and not given does not change the fingerprints of old artifacts.
    """
    return config.model_dump(mode="json", exclude={"id"}, exclude_none=True)


def with_place(error: UserError, where: str) -> UserErrors:
    """The error (or each of several) with a location added where it has none."""
    several = error.errors if isinstance(error, UserErrors) else [error]
    return UserErrors([fault if fault.where else UserError(fault.code, fault.what, fault.fix, where) for fault in several])
