"""A pipeline file -> a checked `Pipeline`, or every fault in it, each in one line with its file, line and key."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compressor.errors import UserError, UserErrors
from compressor.models.architectures import Architecture, add_row
from compressor.models.row_file import read_row
from compressor.tasks import TaskConfig
from compressor.tasks.task_kind import kind_for
from compressor.text_files import from_home
from pipelines.engine import stage as stage_table
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig, entries_after, load_stage
from pipelines.file.data_sources import GlueTasks, fetch_all, use_hub_files
from pipelines.file.faults import nearest, validated
from pipelines.file.overrides import Preset, normalize, override, preset_keys, preset_wholes, raw_stages, stage_ids
from pipelines.file.pipeline_file import PipelineFile
from pipelines.file.task_keys import task_faults, with_paths
from pipelines.file.yaml_source import SET, SWEEP, KeyPath, YamlSource, first_of, parse, read_yaml

RECIPES = Path(__file__).parent.parent / "recipes"
TABLE_KEYS = ("grid", "scales", "seeds", "subsets")
"""Keys of a table file, a pipeline of which several runs are compared: pipelines/sweeps/table_file.py reads them."""


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


def recipe_files() -> list[Path]:
    """The bundled recipes: those at the top, then the tables of papers."""
    return [*sorted(RECIPES.glob("*.yaml")), *sorted(RECIPES.glob("papers/*/*.yaml"))]


def find_pipeline(name: str) -> Path:
    """Path of the pipeline file `name`, or of the bundled recipe of that name, which a folder called so does not hide.

    Raises UserError E110.
    """
    recipes = {recipe.stem: recipe for recipe in recipe_files()}
    try:
        if Path(name).exists() and not (name in recipes and Path(name).is_dir()):
            return Path(name)
    except OSError:  # a name that is too long
        pass
    if name not in recipes:
        fix = nearest(name, list(recipes), "Give a file, or a bundled recipe", also=_files_beside(name))
        raise UserError("E110", f"no pipeline file '{name:.200}'", fix)
    return recipes[name]


def _files_beside(name: str) -> list[str]:
    """The YAML files in the folder of a file that is not there, each as the name would say it."""
    folder, _ = os.path.split(name)
    try:
        files = sorted(os.listdir(folder or "."))
    except (OSError, ValueError):
        return []
    return [os.path.join(folder, file) for file in files if file.endswith((".yaml", ".yml"))]


def load_pipeline(
    path: Path,
    overrides: Sequence[str] = (),
    presets: Sequence[Preset] = (),
    data: Path | None = None,
    text: str | None = None,
    swept: Sequence[str] = (),
) -> Pipeline:
    """Read, override (`tune.rank=8`) and check a pipeline file; `text` is what it held, if it was read before.

    `presets` are what a sweep sets for one row of a table, before the overrides, `swept` the other keys that it sets, in their
    form and after them. Data files are relative to `data`, by default
    the file's folder; tasks of GLUE are then in that folder, and nowhere else.

    Raises UserErrors with every fault found: E101 to E109, and those of the stages' own checks; UserError E230 to E233 for a
    data set of the hub or of GLUE.
    """
    source = read_yaml(path) if text is None else parse(text, str(path))
    if not isinstance(source.data, dict):
        raise UserError("E101", "not a mapping of keys to values", "Start with name, model, task and stages", source.where(()))
    table = bool(source.data.keys() & {"grid", "scales"})
    if table and not presets:
        raise UserError("E122", "a table of many runs", f"Run it as one: compress sweep {path.stem}", source.where(()))
    folder = path.resolve().parent
    data, download = (data.absolute(), str(data.absolute())) if data else (folder, None)
    faults: list[UserError] = []
    for key in TABLE_KEYS if table else ():
        source.data.pop(key, None)
    faults += _collect(preset_wholes, source, presets)
    normalize(source)
    glue = GlueTasks(source, data, download)
    _collect(glue.expand)  # its faults count when all is set
    faults += _collect(preset_keys, source, presets)
    for giver, setting in (*((SET, text) for text in overrides), *((SWEEP, text) for text in swept)):
        _collect(glue.expand)  # a row or an override may name another task of GLUE, and the next one a key of it
        faults += _collect(override, source, setting, giver)
    glue.expand()
    wanted = use_hub_files(source, data)
    top, top_faults = validated(PipelineFile, source, ())
    entries, stage_faults = _entries(source)
    faults += top_faults + stage_faults + (list(task_faults(source, top.task, top.tasks)) if top else [])
    if not faults:
        faults = list(_unfit_faults(source, entries, top)) or list(_order_faults(source, entries))
    if faults or top is None:
        raise UserErrors(first_of(faults))
    fetch_all(wanted, source)
    row = _architecture(top, folder, source)
    task = with_paths(top.task, data) if top.task else None
    # sorted: the order affects random numbers, and must not depend on the order in the file
    tasks = {name: with_paths(config, data) for name, config in sorted((top.tasks or {}).items())}
    command = command_of(path, [*overrides, *swept], presets)
    stages = tuple(_with_files(_completed(entry, entries, top), folder) for entry in entries)
    return Pipeline(top.name, top.model, task, top.seed, top.threads, stages, folder, source, tasks, command, row)


def _architecture(top: PipelineFile, folder: Path, source: YamlSource) -> Architecture | None:
    """Read the row that the file brings and let this process use it. Raises UserErrors E320."""
    if top.architecture is None:
        return None
    try:
        row = read_row(folder / from_home(top.architecture))
        add_row(row)
    except UserError as error:
        raise with_place(error, source.where(("architecture",))) from None
    return row


def command_of(path: Path, overrides: Sequence[str], presets: Sequence[Preset] = ()) -> str:
    """The command that runs a pipeline file as it is overridden, without the folders of one person's disk; the sweep's where
    presets make it one of several runs."""
    file = path.stem if RECIPES in path.parents else path.name
    if presets:
        scale = [f"--{word}" if word == "scale" else word for word in presets[0][0].split()]
        return shlex.join(["compress", "sweep", file, *(scale if scale[0] == "--scale" else [])])
    pairs = (text.partition("=") for text in overrides)
    settings = [f"{key}{sign}{Path(value).name if Path(value).is_absolute() else value}" for key, sign, value in pairs]
    return run_command(file, settings)


def run_command(file: str, settings: Sequence[str], *options: str) -> str:
    """The command that runs a pipeline file, or a recipe, with KEY=VALUE settings and other options."""
    return shlex.join(["compress", "run", file, *(word for text in settings for word in ("--set", text)), *options])


def _completed(entry: Entry, entries: Sequence[Entry], top: PipelineFile) -> Entry:
    """The stage with the defaults that depend on the stages behind it."""
    config = entry.row.completed(entry.config, entries_after(entry, entries), _kinds(top))
    return replace(entry, config=config)


def _kinds(top: PipelineFile) -> list[str]:
    return [task.kind for task in (top.tasks or {"task": top.task}).values()]


def _with_files(entry: Entry, folder: Path) -> Entry:
    """The stage with absolute paths of its data files."""
    paths = {key: folder / from_home(path) for key, path in entry.row.beside.files_of(entry.config).items()}
    return replace(entry, config=entry.config.model_copy(update=paths)) if paths else entry


def _unfit_faults(source: YamlSource, entries: Sequence[Entry], top: PipelineFile) -> Iterator[UserError]:
    """Fault of the first stage that does not support one task, or many, its kind or its main metric: the others would repeat
    it."""
    kinds = _kinds(top)
    for place, entry in enumerate(entries):
        for problem in entry.row.with_tasks(entry.config, top.tasks is not None, kinds):
            where = source.where(source.locate(("stages", place, entry.name, *problem.key)))
            yield UserError(problem.code, problem.what, problem.fix, where)
            return
        if entry.row.measures and top.task and kind_for(top.task).metric.of_texts:
            what = f"a benchmark measures files by their outputs, and the main metric {top.task.metric} is of generated texts"
            fix = "Remove metric from the task, whose texts are scored all the same, or remove the benchmark"
            yield UserError("E243", what, fix, source.where(("stages", place)))
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


def _entries(source: YamlSource) -> tuple[list[Entry], list[UserError]]:
    """Every stage with its validated config. A stage with a fault is left out."""
    entries: list[Entry] = []
    faults = list(_shape_faults(source))
    ids, seen = stage_ids(source), {}
    for place, name, _ in raw_stages(source):
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
