"""`compress init`: from a user's data to a pipeline file that runs without changes."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from compressor.account import Plan
from compressor.errors import UserError, UserErrors
from compressor.models.architectures import row_of
from compressor.models.build import config_of
from compressor.models.reference import find_folder, resolve
from compressor.printable import printable
from compressor.tasks import GENERATED, PACKED, TaskConfig, ending
from compressor.tasks.reading import TaskData, read_task, read_tests
from compressor.tasks.sources.hub_set import is_hub
from compressor.text_files import from_home
from pipelines.engine.preflight import check_environment, check_inputs, make_plan, server_fault
from pipelines.file.config import load_pipeline
from pipelines.file.schema import schema_text
from pipelines.init import defaults
from pipelines.init.data_files import DataTable, Files, find_files, read_table, require_name, role_of
from pipelines.init.first_numbers import STEPS_FOR, first_subset, has_places, max_length, time_of, timed_length, used_rows
from pipelines.init.first_pipeline import Facts, pipeline_text
from pipelines.init.guesses import Guess, guess, named_columns, notes_on, unlabelled
from pipelines.init.row_split import split_rows


def init(data: Path, out: Path, text: str | None, **values: Any) -> None:
    """Write the pipeline file, and print what was guessed and what to do next."""
    options = InitOptions(
        data, out, model=values["model"] or None, text=_columns(text), **{key: values[key] for key in OPTION_NAMES}
    )
    made = make(options, say=_say)
    _say("wrote", ", ".join(map(str, made.files)))
    _say("time", made.time)
    for title, command in (("next", "check"), ("", "run")):
        _say(title, f"compress {command} {_shell(out)}")


OPTION_NAMES = ("validation", "split", "label", "kind", "rows", "schema", "force")


@dataclass(frozen=True)
class InitOptions:
    """Options of the command line; None for those that were not given."""

    data: Path
    out: Path
    model: str | None = None
    validation: Path | None = None
    split: float | None = None
    text: tuple[str, ...] = ()
    label: str | None = None
    kind: str | None = None
    rows: int | None = None
    schema: bool = False
    force: bool = False


@dataclass(frozen=True)
class Made:
    """The files that were written, and the estimated time of a run, in words."""

    files: list[Path]
    time: str


Say = Callable[[str, str], None]


def _say(title: str, text: str) -> None:
    click.echo(printable(f"{title:<12}{text}"))


def _columns(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _shell(path: Path) -> str:
    return shlex.quote(str(path))


def make(options: InitOptions, say: Say = lambda title, text: None) -> Made:
    """Read the data, guess the task, and write the pipeline file and the files beside it: all of them, or none.

    Raises UserError E130 (which file?), E131 (which column?), E132 (which model?), E133 (a file exists), E2xx and E3xx for
    faults of data and model, E801 and E804 if nothing can be written.
    """
    files, name = _chosen(options), _name(options.data)
    # one folder may hold several pipelines of the same data, each with rows of its own
    prefix = name if options.out.stem == defaults.USUAL_NAME else options.out.stem
    _check_free(options, files, [options.out])
    train, validation, guessed = _read(options, files)
    test = _test(options, files, guessed, train, say)
    model = _model(options.model, guessed.kind)
    guessed = _of_model(guessed, options, model)
    for title in ("kind", "text", "label"):
        value = {"kind": guessed.kind, "text": ", ".join(guessed.text), "label": guessed.label}[title]
        say(title, f"{value}: {guessed.why[title]}")
    for note in notes_on(train, guessed, options.text):
        say("note", note)
    if options.split and files.unused:
        names = ", ".join(path.name for path in files.unused)
        say("note", f"{names} is not used: --split sets rows of {train.path.name} apart")
    say("model", options.model or f"{defaults.DEFAULT_MODEL}: the default")
    given: dict[str, DataTable] = {}
    with _beside(options.out) as scratch, _as_given(options.out, scratch, given):
        tables = {"train": train, "validation": validation, **({"test": test} if test else {})}
        paths = {role: _placed(table, f"{prefix}-{role}", scratch) for role, table in tables.items()}
        given |= {str(paths[role]): table for role, table in tables.items() if table.copy}
        copies = [path.name for path in paths.values() if path.parent == scratch]
        task, read = _task(guessed, paths)
        splits = {"train": read.train, "validation": read.validation, **read_tests(task, read.label_names)}
        rows = {role: len(split.labels) for role, split in splits.items()}
        for role, table in tables.items():
            say(role, f"{rows[role]:,} rows of {table.path}" + (f" ({table.copy})" if table.copy else ""))
        length, mean, why_length = max_length(splits, task, model)
        say("max_length", f"{length}: {why_length}")
        kept, why_kept = first_subset(options.rows, read.train, read.label_names, task)
        if why_kept:
            say("subset", why_kept)
        timed = timed_length(length, guessed.kind, model)
        numbers = {
            "max_length": length,
            "timed_length": timed,
            "sparse": has_places(model, guessed.kind),
            "rows": rows["train"],
            "kept": kept,
            "copies": copies,
        }
        facts = _facts(options, guessed, name, paths, scratch, numbers, why_length)
        _check_free(options, files, [options.out.parent / copy for copy in copies])
        plan = _write_and_check(facts, options, paths, scratch, model)
        written = _move(scratch, options.out)
    return Made(written, time_of(plan, facts, mean, splits))


def _chosen(options: InitOptions) -> Files:
    """The data files, those of the user's options among them."""
    if options.split and options.validation:
        raise UserError("E130", "--split and --validation exclude each other", "Leave one of them out")
    files = find_files(options.data, validates=not (options.split or options.validation))
    if options.validation:
        require_name(options.validation.absolute())
        tests = tuple(path for path in files.tests if not _same(path, options.validation))
        return replace(files, validation=options.validation, tests=tests)
    if not options.split and files.validation is None and files.test is None:
        read_table(files.train)  # one that cannot be read is the first thing to fix
        fix = "Name a second file: --validation FILE, or set rows apart: --split 0.1"
        raise UserError("E130", "no rows to measure quality on", fix, str(files.train))
    return files


def _read(options: InitOptions, files: Files) -> tuple[DataTable, DataTable, Guess]:
    """Both tables, and the guessed task."""
    train = read_table(files.train)
    guessed = guess(train, named_columns(options.text, train.columns), options.label, options.kind)
    if options.split:
        return *split_rows(train, options.split, guessed), guessed
    validation = read_table(files.validation or files.test)
    if files.validation is None and (why := unlabelled(validation, guessed, train)):
        fix = "Name another file: --validation FILE, or set rows apart: --split 0.1"
        what = f"no labels here ({why}), and so no rows to measure quality on"
        raise UserError("E130", what, fix, str(files.test))
    return train, validation, guessed


def _test(options: InitOptions, files: Files, guessed: Guess, train: DataTable, say: Say) -> DataTable | None:
    """The file called test, which is only scored; None where there is none or, with a note, where it is not used so."""
    if not files.tests:
        return None
    names = ", ".join(path.name for path in files.tests)
    if files.test is None:
        fix = "add those with labels to the pipeline, test: {NAME: FILE}"
        say("note", f"{names} are not used: only one file is taken as the test; {fix}")
        return None
    if files.validation is None and not options.split:
        say("note", f"{names} is used for validation, as there is no dev file: it no longer serves as a test")
        return None
    try:
        test = read_table(files.test)
    except UserError as error:
        why = str(error)  # nobody named it, and a pipeline does without
    else:
        why = unlabelled(test, guessed, train)  # as the test files of GLUE are
    if why:
        say("note", f"{names} is not used: {why}")
    return None if why else test


def _name(data: Path) -> str:
    """Name of the pipeline: that of the folder, or of the file unless it is called `train` or the like."""
    place = data.absolute()
    file_name = place.name.removesuffix(PACKED).removesuffix(ending(place))
    word = file_name if place.is_dir() or role_of(place) is None else place.parent.name
    return re.sub(r"[^a-z0-9_.-]+", "-", word.lower()).strip("-._")[:60] or "mine"


def _model(reference: str | None, kind: str) -> Path:
    """The folder of the model. Raises UserError E132 where none is given and the default does not fit, E301 to E304."""
    if reference is None:
        if kind in GENERATED:
            fix = "Name a GPT-2, a Llama or a T5: --model HuggingFaceTB/SmolLM2-135M, --model google-t5/t5-small, or a folder"
            raise UserError("E132", "the default model, MiniLM, does not generate", fix)
        try:
            find_folder(defaults.DEFAULT_MODEL)
        except UserError as error:
            fix = f"Name one: --model REF (a Hugging Face id or a folder). {error.fix} installs the default"
            raise UserError("E132", "no --model is given, and the default is not installed", fix) from None
    return resolve(reference or defaults.DEFAULT_MODEL).folder


def _of_model(guessed: Guess, options: InitOptions, model: Path) -> Guess:
    """The guess, with texts written by an encoder and a decoder where the model has both."""
    if guessed.kind != "generation" or options.kind or not row_of(config_of(model).model_type).has_decoder:
        return guessed
    why = f"{guessed.why['kind']}, and a model with an encoder and a decoder"
    return replace(guessed, kind="text2text", why={**guessed.why, "kind": why})


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """Context with a folder beside the pipeline file, to write in before any file is replaced. Raises UserError E801, E804."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".init-", dir=out.absolute().parent))
    except OSError as error:
        raise UserError("E801", f"cannot be written ({error.strerror})", "Choose another --out", str(out.parent)) from None
    try:
        yield scratch
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code, fix = ("E804", "Make room") if full else ("E801", "Choose another --out")
        raise UserError(code, f"cannot be written ({error.strerror})", fix, str(out)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _as_given(out: Path, scratch: Path, copies: Mapping[str, DataTable]) -> Iterator[None]:
    """Context in which faults in `copies` (tables by the path of the copy) name the user's file and its line, and those in the
    new pipeline file its place: nothing in `scratch` is there any more when they are read."""
    try:
        yield
    except UserError as error:
        faults = error.errors if isinstance(error, UserErrors) else [error]
        raise UserErrors([_named_as_given(fault, out, scratch, copies) for fault in faults]) from None


def _named_as_given(fault: UserError, out: Path, scratch: Path, copies: Mapping[str, DataTable]) -> UserError:
    texts = {name: getattr(fault, name) for name in ("what", "fix", "where")}
    for copy, table in copies.items():
        if fault.where.startswith(f"{copy}:"):  # the lines that it names are those of the copy
            texts["what"] = re.sub(
                r"\bline ([0-9]+)", lambda found, lines=table.lines: f"line {lines[int(found[1]) - 1]}", fault.what
            )
        pattern = re.compile(rf"{re.escape(copy)}(?::([0-9]+))?")
        texts = {name: pattern.sub(partial(_place_in, table), text) for name, text in texts.items()}
    folder = f"{out.parent}/" if out.parent != Path() else ""
    return UserError(fault.code, **{name: text.replace(f"{scratch}/", folder) for name, text in texts.items()})


def _place_in(table: DataTable, found: re.Match[str]) -> str:
    """A place in the copy of a table, as one in the table's own file."""
    return str(table.path) if found[1] is None else f"{table.path}:{table.lines[int(found[1]) - 1]}"


def _placed(table: DataTable, name: str, scratch: Path) -> Path:
    """The data file that the pipeline will read: the user's, or a copy called `name` that is written to `scratch`."""
    if not table.copy:
        return table.path.absolute()
    path = scratch / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in table.rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")  # Parquet may hold bytes
    return path


def _check_free(options: InitOptions, files: Files, paths: Sequence[Path]) -> None:
    """Raise UserError E133 for an existing file that would be replaced; for one that is read, whatever the options."""
    more = [options.out.parent / SCHEMA_FILE] if options.schema else []
    data = [file for file in (options.data, files.train, files.validation, *files.tests) if file is not None]
    for path in (*paths, *more):
        if any(_same(path, file) for file in data):
            fix = "Choose an --out in another folder, or another name"
            raise UserError("E133", "the data are read from this file, which would be replaced", fix, str(path))
        if os.path.lexists(path) and not options.force:
            fix = "Choose an --out of another name or in another folder, or replace it with --force"
            raise UserError("E133", "the file exists already", fix, str(path))


def _same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one existing file."""
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is missing
        return False


SCHEMA_FILE = "pipeline.schema.json"


def _task(guessed: Guess, paths: dict[str, Path]) -> tuple[TaskConfig, TaskData]:
    """The task, and the content of its files. Raises UserErrors E2xx."""
    text = guessed.text[0] if len(guessed.text) == 1 else list(guessed.text)
    try:
        task = TaskConfig(kind=guessed.kind, **paths, text=text, label=guessed.label)
    except ValueError as error:
        what = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError("E131", what, "Fix --text, --label or --kind") from None
    return task, read_task(task)


def _facts(
    options: InitOptions,
    guessed: Guess,
    name: str,
    paths: dict[str, Path],
    scratch: Path,
    numbers: dict[str, Any],
    why_length: str,
) -> Facts:
    """All facts for the pipeline file; `numbers` are those in it, and the names of the copies."""
    used = used_rows(numbers["kept"], numbers["rows"])
    return Facts(
        name=name,
        data=str(options.data),
        model=_reference(options.model or defaults.DEFAULT_MODEL, options.out),
        kind=guessed.kind,
        **{role: f"{path.name}" if path.parent == scratch else _seen_from(options.out, path) for role, path in paths.items()},
        text=guessed.text,
        label=guessed.label,
        **numbers,
        epochs=min(max(2, -(-STEPS_FOR // used)), 10),
        no_server=str(server_fault() or ""),
        why={**guessed.why, "max_length": why_length},
        schema=f"./{SCHEMA_FILE}" if options.schema else None,
    )


def _reference(model: str, out: Path) -> str:
    """A folder as a path in the pipeline file; any other reference unchanged."""
    place = from_home(model)
    if model.startswith("package:") or not place.is_dir():
        return model
    inside = _seen_from(out, place.absolute())
    return inside if Path(inside).is_absolute() else f"./{inside}"


def _seen_from(out: Path, path: Path) -> str:
    """A path relative to the pipeline file's folder if it is inside, else absolute, as where the first would be read as a home
    folder or a data set of the hub."""
    folder = out.absolute().parent
    inside = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return str(path) if inside.startswith("~") or is_hub(inside) else inside


def _write_and_check(facts: Facts, options: InitOptions, paths: dict[str, Path], scratch: Path, model: Path) -> Plan | None:
    """Write the pipeline into `scratch` and check it as `compress check` does. Raises the same errors."""
    path = scratch / options.out.name
    path.write_text(pipeline_text(facts), encoding="utf-8")
    if options.schema:
        (scratch / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    # of the paths that the file names only the copies are still elsewhere, and the model is relative to the file itself
    copies = {f"task.{role}": str(place) for role, place in paths.items() if place.parent == scratch}
    overrides = [f"{key}={json.dumps(value)}" for key, value in {"model": str(model), **copies}.items()]
    pipeline = load_pipeline(path, overrides, data=options.out.absolute().parent)
    check_environment(pipeline.stages)
    return make_plan(check_inputs(pipeline))


def _move(scratch: Path, out: Path) -> list[Path]:
    """Move all files to their folders, the pipeline file last: once it exists, everything that it names does."""
    names = sorted((path.name for path in scratch.iterdir()), key=lambda name: name == out.name)
    for name in names:
        os.replace(scratch / name, out.parent / name)
    return [out.parent / name for name in reversed(names)]
