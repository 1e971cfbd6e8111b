"""Tasks by GLUE's names, and data sets of the hub by theirs: replaced in a pipeline's data by keys and files before it is
validated, so that nothing behind this door has to tell them from a user's files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.sources.glue import PREFIX, glue_keys
from compressor.tasks.sources.hub_set import HubSplit, fetch, is_hub, parse
from pipelines.file.yaml_source import KeyPath, YamlSource
from pipelines.terminal.plain_console import PlainConsole

QUIET_SECONDS = 10
"""Off a terminal, lines about rows that were read are at least this far apart."""


def expand_glue(source: YamlSource, folder: Path, download: str | None = None) -> None:
    """Replace `task: glue/NAME` and `task: {glue: NAME, folder: DIR}` by the task's keys; keys beside them take precedence.

    `download` is the default of DIR; without it the data are looked for in `folder`, then on the hub.

    Raises UserError E233.
    """
    for path in _task_paths(source):
        value = source.get(path)
        short = value.removeprefix(PREFIX) if isinstance(value, str) and value.startswith(PREFIX) else None
        given = {"glue": short} if short is not None else value
        if not isinstance(given, dict) or "glue" not in given:
            continue
        more = {key: inner for key, inner in given.items() if key not in ("glue", "folder")}
        try:
            place = given.get("folder", download)
            keys = glue_keys(given["glue"], place, folder, TaskConfig.model_fields, more.get("kind"))
        except UserError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            raise UserError(error.code, what, error.fix, source.where(path)) from None
        source.get(path[:-1])[path[-1]] = keys | more


def use_hub_files(source: YamlSource, folder: Path) -> dict[KeyPath, HubSplit]:
    """Replace each reference to a data set of the hub by its file in the cache, which may not exist yet; gives what to fetch.

    Raises UserError E230.
    """
    wanted = {}
    for path in _task_paths(source):
        for key, value in list(_texts_in(source.get(path), path)):
            if is_hub(value):
                try:
                    wanted[key] = parse(value, folder)
                except UserError as error:
                    raise UserError(error.code, error.what, error.fix, source.where(key)) from None
                source.get(key[:-1])[key[-1]] = str(wanted[key].path)
    return wanted


def fetch_all(wanted: dict[KeyPath, HubSplit], source: YamlSource) -> None:
    """Read the data sets that the cache lacks, with a progress bar. Raises UserError E907, E231, E232, E215, E804, E801."""
    for key, split in wanted.items():
        try:
            with _progress(split) as say:
                fetch(split, say)
        except UserError as error:
            what = f"{split.reference}: {error.what}"
            raise UserError(error.code, what, error.fix, source.where(key)) from None


def _task_paths(source: YamlSource) -> Iterator[KeyPath]:
    """The key path of every task's block."""
    if "task" in source.data:
        yield ("task",)
    tasks = source.data.get("tasks")
    yield from (("tasks", name) for name in (tasks if isinstance(tasks, dict) else ()))


def _texts_in(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """The texts that are values of a mapping or of mappings in it, by key path."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, str):
            yield (*path, key), inner
        yield from _texts_in(inner, (*path, key))


@contextmanager
def _progress(split: HubSplit) -> Iterator[Callable[[int], None]]:
    """Context with a function to be told the number of rows so far: a bar on a terminal, else a line now and then."""
    console = PlainConsole(stderr=True)
    last = time.monotonic()

    def print_sometimes(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_SECONDS:
            last = time.monotonic()
            console.print(f"{split.reference}: {rows:,} rows", markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield print_sometimes
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(split.reference, total=split.rows)
        yield lambda rows: bar.update(task, completed=rows)
