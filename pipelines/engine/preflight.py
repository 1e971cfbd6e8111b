"""All checks that are possible before a run writes its first byte: mistakes of the user are found here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from compressor.account import Plan
from compressor.digests import sha256_kept, sha256_of
from compressor.errors import UserError, UserErrors
from compressor.models.architectures import row_of
from compressor.models.build import config_of, end_id
from compressor.models.files.model_folder import COPIED
from compressor.models.reference import Reference, resolve
from compressor.models.special_tokens import tokenizer_of
from compressor.models.tasks_table import require_head
from compressor.run_store import STORE
from compressor.tasks import data_files, named_files
from compressor.tasks.data import read_data, read_test_rows
from compressor.tasks.listing import listed
from compressor.tasks.reading import check_data, skipped_lines
from compressor.tasks.task_kind import kind_of
from compressor.text_files import is_unicode
from export.runtimes.runtime_registry import ALTERNATIVES, DEFAULT, EXTRAS
from pipelines.engine.disk import require_writable
from pipelines.engine.environment import accelerator, package_versions
from pipelines.engine.stage import CUDA, Entry, Models, Stage
from pipelines.file.config import Pipeline, with_place
from pipelines.file.yaml_source import KeyPath, dotted
from pipelines.terminal.progress import waiting
from serving.bundle import find_bundle, install
from serving.layout.knobs import INTERFACES
from serving.server_registry import CACHE_FIX, registry_folder
from serving.shared_memory import MAX_BODY, MOUNT_MORE, check_space, remove_left_overs


@dataclass(frozen=True)
class Ready:
    """A pipeline whose models and data exist: the resolved base, the data files' sha256 by path, the other models that stages
    name, by their references, a line for each file of which rows are left out, and the base's `copied_digests`."""

    pipeline: Pipeline
    base: Reference
    data: dict[Path, str]
    models: dict[str, Reference] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    copied: Mapping[str, str] = field(default_factory=dict)

    def models_of(self, entry: Entry) -> Models:
        """The other models that a stage names, by the key that names them."""
        return {key: self.models[reference] for key, reference in entry.row.beside.models_of(entry.config).items()}


def check_inputs(pipeline: Pipeline) -> Ready:
    """Resolve the models and read the data. Raises UserErrors with all E113, E2xx and E3xx faults, and those of files that
    stages name; E309 for the first kind of task that does not fit the model, where all else does."""
    faults: list[UserError] = []
    heads: list[UserError] = []
    base = None
    try:
        base = resolve(pipeline.model, relative_to=pipeline.source_folder)
        if pipeline.architecture is not None:
            faults += _unproven(pipeline, base.folder)
        heads = head_faults(pipeline, base.folder)
        # a kind that does not fit the model may ask for other lengths, too
        faults += [] if heads else length_faults(pipeline, base.folder)
    except UserError as error:
        faults += with_place(error, pipeline.source.where(("model",))).errors
    for path, task in pipeline.all_tasks.items():
        try:
            check_data(task)
        except UserError as error:
            faults += with_keys(error, pipeline, path)
    models, more = _other_models(pipeline)
    faults += more
    if base is None or faults or heads:
        raise UserErrors(faults or heads)
    files = {file: sha256_kept(file) for task in pipeline.all_tasks.values() for file in data_files(task)}
    ready = Ready(pipeline, base, files, models, tuple(_skipped(pipeline)), copied_digests(base.folder))
    if faults := list(_stage_faults(ready)):
        raise UserErrors(faults)
    files |= {file: sha256_kept(file) for entry in pipeline.stages for file in entry.row.beside.files_of(entry.config).values()}
    if odd := [file for file in files if not is_unicode(file)]:
        what, fix = "its path is not UTF-8: no lock file can name it", "Rename the file or its folder, or copy it elsewhere"
        raise UserErrors([UserError("E201", what, fix, str(file)) for file in odd])
    return ready


def copied_digests(base: Path) -> dict[str, str]:
    """sha256 of each of the base's COPIED files, by name: a merge copies them. Raises OSError."""
    return {name: sha256_of(base / name) for name in COPIED if (base / name).is_file()}


def _skipped(pipeline: Pipeline) -> Iterator[str]:
    """A line for each file of which `broken_rows: skip` leaves out rows."""
    found = [((*at, *key), file, task) for at, task in pipeline.all_tasks.items() for key, file in named_files(task).items()]
    for number, entry in enumerate(pipeline.stages if pipeline.task else ()):
        for key, file in entry.row.beside.files_of(entry.config).items():
            found.append((("stages", number, entry.name, key), file, pipeline.task))
    for place, file, task in found:
        if lines := skipped_lines(file, task):
            what = f"rows of {file.name} with another number of fields than its first line are left out: {len(lines):,}"
            yield f"{dotted(place)}: {what} (lines {listed([str(line) for line in lines])})"


def _other_models(pipeline: Pipeline) -> tuple[dict[str, Reference], list[UserError]]:
    """The models that stages name, by reference, and the faults of those that cannot be used."""
    models, faults = {}, []
    for number, entry in enumerate(pipeline.stages):
        for key, reference in entry.row.beside.models_of(entry.config).items():
            try:
                models[reference] = resolve(reference, relative_to=pipeline.source_folder)
            except UserError as error:
                faults += with_place(error, _where(pipeline, number, key)).errors
    return models, faults


def _where(pipeline: Pipeline, number: int, *key: str | int) -> str:
    """Location of a key of the stage `number` in the pipeline file."""
    return pipeline.source.where(pipeline.source.locate(("stages", number, pipeline.stages[number].name, *key)))


def _stage_faults(ready: Ready) -> Iterator[UserError]:
    """Faults in the files and models that stages name."""
    pipeline = ready.pipeline
    for number, entry in enumerate(pipeline.stages):
        if not (files := entry.row.beside.files_of(entry.config)) and not entry.row.beside.models_of(entry.config):
            continue
        try:
            for problem in entry.row.beside.problems(entry.config, pipeline.task, ready.models_of(entry)):
                yield UserError(problem.code, problem.what, problem.fix, _where(pipeline, number, *problem.key))
        except UserError as error:
            yield from _with_file_keys(error, pipeline, number, files)


def _with_file_keys(error: UserError, pipeline: Pipeline, number: int, files: dict[str, Path]) -> Iterator[UserError]:
    """Faults in files of a stage, each with the line and the key of the pipeline that names the file."""
    for fault in with_place(error, pipeline.where(number)).errors:
        key = next((key for key, path in files.items() if f"{fault.where}:".startswith(f"{path}:")), None)
        what = f"{fault.what} ({_where(pipeline, number, key)})" if key else fault.what
        yield UserError(fault.code, what, fault.fix, fault.where)


def _unproven(pipeline: Pipeline, model: Path) -> list[UserError]:
    """E320 for an architecture's row, from a user's file, by which removed units would not equal masked ones."""
    from compressor.models.discovery.discover import prove

    try:
        prove(pipeline.architecture, config_of(model))
    except UserError as error:
        return with_place(error, pipeline.source.where(("architecture",))).errors
    return []


def with_keys(error: UserError, pipeline: Pipeline, path: KeyPath) -> list[UserError]:
    """Faults in the files of the task at `path`, each with the line and the key of the pipeline that names the file."""
    task, faults = pipeline.all_tasks[path], []
    for fault in with_place(error, pipeline.source.where(path)).errors:
        key = next((key for key, file in named_files(task).items() if f"{fault.where}:".startswith(f"{file}:")), None)
        what = f"{fault.what} ({pipeline.source.where((*path, *key))})" if key else fault.what
        faults.append(UserError(fault.code, what, fault.fix, fault.where))
    return faults


def head_faults(pipeline: Pipeline, model: Path) -> list[UserError]:
    """E309 for the first kind of task for which the model in this folder has no head."""
    row = row_of(json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"])
    try:
        for task in pipeline.all_tasks.values():
            require_head(row, kind_of(task.kind).auto_class, model)
    except UserError as error:
        return [error]
    return []


def length_faults(pipeline: Pipeline, model: Path) -> Iterator[UserError]:
    """E113 for every length that, with what is generated behind it, exceeds the absolute positions of the model in this
    folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    most = row_of(config["model_type"]).most_tokens(config)
    lengths = [((*path, "max_length"), task.max_length, 0) for path, task in pipeline.all_tasks.items()]
    kinds = [task.kind for task in pipeline.all_tasks.values()]
    for number, entry in enumerate(pipeline.stages):
        behind = entry.row.behind(entry.config, kinds)
        for key, length in entry.row.lengths(entry.config):
            lengths.append((pipeline.source.locate(("stages", number, entry.name, *key)), length, behind))
    for path, length, behind in lengths:
        if most is not None and length + behind > most:
            generated = f" and {behind} generated behind them" if behind else ""
            what = f"{length} tokens{generated}, where the model has positions for {most}"
            yield UserError("E113", what, f"Use at most {most - behind}", pipeline.source.where(path))


def check_tokens(ready: Ready) -> None:
    """Raise UserErrors E212, E213 for rows that cannot be used for training once tokenized, before anything is written.

    Only for kinds of tasks that refuse rows: truncated rows are reported by `compress check`.
    """
    folder, faults = ready.base.folder, []
    for path, task in ready.pipeline.all_tasks.items():
        if not kind_of(task.kind).refuses_tokens and end_id(folder) is None:  # long rows are truncated, and none is refused
            continue
        try:
            data = read_data(folder, task)
            read_test_rows(folder, task, data.label_names)
        except UserError as error:
            faults += with_keys(error, ready.pipeline, path)
    for number, entry in enumerate(ready.pipeline.stages):
        try:
            entry.row.beside.require_tokens(entry.config, ready.pipeline.task, folder, ready.models_of(entry))
        except UserError as error:
            faults += _with_file_keys(error, ready.pipeline, number, entry.row.beside.files_of(entry.config))
    if faults:
        raise UserErrors(faults)


def reading(ready: Ready) -> AbstractContextManager[None]:
    """`waiting` for all rows to be read and tokenized: half a minute for every 100,000 of them."""
    return waiting(f"reading and tokenizing {listed([file.name for file in ready.data])}")


def make_plan(ready: Ready, last: int = -1) -> Plan | None:
    """The closed-form plan after stage number `last`, of `make_plans`, which checks all; None when no stage changes it."""
    plans = make_plans(ready)
    return plans[last] if plans else None


def make_plans(ready: Ready) -> list[Plan]:
    """The closed-form plan after every stage. Raises UserErrors with the place of the stage that is impossible (E5xx), and of
    rows with invalid tokens (`check_tokens`); UserError E304 if transformers cannot build a model or a tokenizer from the
    base. Empty when no stage changes the model: building the plan is the only check that imports torch.
    """
    pipeline = ready.pipeline
    if all(entry.row.plan is Stage.plan for entry in pipeline.stages):
        return []
    from compressor.training.multitask import start_plan

    # here rather than in the first stage that reads rows, because nothing is written yet
    config_of(ready.base.folder)
    tokenizer_of(ready.base.folder)
    plan = start_plan(ready.base.folder, pipeline.tasks) if pipeline.tasks else Plan.start(ready.base.folder, pipeline.task)
    plans = []
    for number, entry in enumerate(pipeline.stages):
        try:
            plan = entry.row.plan(entry.config, plan)
        except UserError as error:
            raise with_place(error, pipeline.where(number)) from None
        plans.append(plan)
    with reading(ready):
        check_tokens(ready)  # last: an architecture that does not fit the task has its own error
    return plans


LONGEST_NAME = 255
"""Longest file name in bytes on the file systems of Linux and macOS; suffixes add up to 24 (`.NAME.new`, a fingerprint)."""
OTHER_OUT = "Choose another folder with --out"


def check_folder(out: Path, name: str, files: Sequence[str] = ()) -> None:
    """Raise UserError E801 unless the run folder `out`/`name`, `files` in it, and the store can be written.

    Writes nothing.
    """
    if not is_unicode(out.absolute()):
        raise UserError("E801", "the path is not UTF-8, and model files cannot be read there", OTHER_OUT, str(out))
    for part in (*Path(name).parts, *files):
        if len(os.fsencode(part)) + 24 > LONGEST_NAME:
            raise UserError("E801", f"'{part[:40]}...' is too long for a file's name", "Choose a shorter name or id", str(out))
    for folder in (out / name, out / name / "logs", out / STORE):
        require_writable(folder, OTHER_OUT)


INSTALLED_BY = {**EXTRAS, "nvidia-pytriton": "triton"}
"""Package that a stage may need -> the extra of this project that installs it; the other packages come with the project."""


def check_environment(entries: Sequence[Entry]) -> None:
    """Raise UserErrors for what the stages need and this environment lacks: E901 for every package, E904 for a GPU, E702 to
    E704 and E739 for what Triton needs, E801 for its cache folder."""
    faults = {}
    on_card = any(entry.row.device(entry.config) == CUDA for entry in entries)
    for entry in entries:
        stage = entry.row
        extras = stage.extras(entry.config)
        missing = [name for name, version in package_versions(stage, extras).items() if not version]
        for name in missing:
            faults.setdefault(name, UserError("E901", f"stage '{entry.id}' needs the package {name}", _install(name, on_card)))
        if stage.serves and not missing and (fault := server_fault(stage.processes(entry.config))):
            what = f"stage '{entry.id}' starts a server: {fault.what}"
            faults["triton"] = UserError(fault.code, what, f"{fault.fix}. Or leave out the stage", fault.where)
        if stage.device(entry.config) == CUDA and accelerator() is None:
            fix = "Use device: cpu, or run it on a machine with a GPU and its driver"
            faults[CUDA] = UserError("E904", f"stage '{entry.id}' computes on CUDA, and no GPU is offered here", fix)
        elif stage.device(entry.config) == CUDA and not faults and not DEFAULT.offers(CUDA):
            what = f"stage '{entry.id}' computes on CUDA, and the {DEFAULT.title} that is installed cannot"
            fix = "Install the extra gpu (and not cpu) with a driver that fits, or use device: cpu"
            faults[CUDA] = UserError("E904", what, fix)
        elif stage.device(entry.config) == CUDA and stage.measures and not faults and not _torch_has_gpu():
            what = f"stage '{entry.id}' times the dense model in PyTorch on CUDA, and the torch that is installed finds no GPU"
            fix = "Install a torch with CUDA that fits the driver, or use device: cpu"
            faults[CUDA] = UserError("E904", what, fix)
    if faults:
        raise UserErrors(list(faults.values()))


def _install(package: str, on_card: bool) -> str:
    """The command that installs a package. Of those that exclude each other it is the one for CUDA where a stage computes
    there."""
    if on_card and package in ALTERNATIVES:
        return install("gpu")
    return install(INSTALLED_BY[package]) if package in INSTALLED_BY else f"Install it: pip install {package}"


def server_fault(processes: int = len(INTERFACES)) -> UserError | None:
    """Why a server with so many processes of models cannot run here, by default one for each interface; None where it can.

    What killed servers left is removed, as before each start: it may fill the shared memory.
    """
    try:
        find_bundle()
        require_writable(registry_folder(), CACHE_FIX)
        remove_left_overs()
        check_space(processes, MAX_BODY, MOUNT_MORE)
    except UserError as error:
        return error
    return None


def _torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
