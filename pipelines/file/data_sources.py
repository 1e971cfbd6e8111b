"""Tasks by GLUE's names, and data sets of the hub by theirs: replaced in a pipeline's data by keys and files before it is
validated, so that nothing behind this door has to tell them from a user's files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from compressor.errors import UserError, UserErrors
from compressor.printable import printable
from compressor.tasks import TaskConfig
from compressor.tasks.sources.glue import PREFIX, glue_keys
from compressor.tasks.sources.hub_set import HubSplit, fetch, is_hub, parse
from pipelines.file.yaml_source import KeyPath, YamlSource
from pipelines.terminal.plain_console import PlainConsole, can_move

QUIET_SECONDS = 10
"""Off a terminal, lines about rows that were read are at least this far apart."""


class _Expanded(NamedTuple):
    """A task's block that GLUE's keys were written into: the block, `glue` and `folder` as given, and which keys are GLUE's."""

    block: dict[str, Any]
    named: dict[str, Any]
    keys: set[str]


class GlueTasks:
    """The tasks of GLUE in a pipeline's data. `download` is the default of the folder that a task gives; without it the data
    are looked for in `folder`, then on the hub."""

    def __init__(self, source: YamlSource, folder: Path, download: str | None):
        self._source, self._folder, self._download = source, folder, download
        self._expanded: dict[KeyPath, _Expanded] = {}

    def expand(self) -> None:
        """Replace `task: glue/NAME` and `task: {glue: NAME, folder: DIR}` by the task's keys; keys beside them take precedence.

        Called again after `glue` or `folder` was set in such a block, it replaces the keys that it wrote there, and no others.
        Raises UserErrors E233, after the other tasks.
        """
        faults = []
        for path in _task_paths(self._source):
            value = self._source.get(path)
            if isinstance(value, str) and value.startswith(PREFIX):
                value = self._source.get(path[:-1])[path[-1]] = {"glue": value.removeprefix(PREFIX)}
            if isinstance(value, dict):
                faults += self._expand(path, value)
        if faults:
            raise UserErrors(faults)

    def _expand(self, path: KeyPath, given: dict[str, Any]) -> list[UserError]:
        """Expand the block at a path, if it names a task of GLUE. Gives the faults."""
        before = self._expanded.get(path)
        if before is None or before.block is not given:  # the first time, or the block was set as a whole
            before = _Expanded(given, {}, set())
        new = {key: given[key] for key in ("glue", "folder") if key in given}
        named = before.named | new
        if not new or "glue" not in named:
            return []
        # a key that was set since has a mark
        set_since = {mark[len(path)] for mark in self._source.marks if mark[: len(path)] == path and len(mark) > len(path)}
        more = {key: inner for key, inner in given.items() if key not in {*new, *(before.keys - set_since)}}
        try:
            place = named.get("folder", self._download)
            keys = glue_keys(named["glue"], place, self._folder, TaskConfig.model_fields, more.get("kind"))
        except UserError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            return [UserError(error.code, what, error.fix, self._source.where(path))]
        block = self._source.get(path[:-1])[path[-1]] = keys | more
        self._expanded[path] = _Expanded(block, named, keys.keys() - more.keys())
        return []


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
    shown = printable(split.reference)
    console = PlainConsole(stderr=True, force_terminal=can_move(sys.stderr))
    last = time.monotonic()

    def print_sometimes(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET_SECONDS:
            last = time.monotonic()
            console.print(f"{shown}: {rows:,} rows", markup=False, highlight=False, soft_wrap=True)

    if not console.is_terminal:
        yield print_sometimes
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(shown, total=split.rows)
        yield lambda rows: bar.update(task, completed=rows)
