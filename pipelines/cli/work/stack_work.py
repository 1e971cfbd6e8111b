"""The work of `compress delta stack`: many delta files as one model file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from compressor.storage.delta_file import read
from compressor.storage.live import base_of
from export.many.stacked_folder import stack_folder
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.cli.shown import near, say
from pipelines.cli.unused_options import require_unused
from pipelines.engine.disk import require_writable
from pipelines.terminal.capture import captured
from pipelines.terminal.console_table import figure, table
from serving.repository import check_name
from serving.stacked_repository import require_runtime, text_limits, write_many_tasks

PADDED = 1.5
"""Size of the tasks in the file over that of their delta files from which it is explained."""
WHY_LARGER = "tasks are padded to the largest rank and number of positions, and what delta files share is stored for each task"


def stack(
    files: Sequence[Path],
    base: str | None,
    out: Path,
    runtime: str,
    repository: Path | None,
    name: str,
    max_length: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the file, add it to a repository, and show its tasks."""
    if repository is None:
        require_unused(["name", "max_length"], "without --repository")
    else:
        _require_addable(files[0], base, repository, name, max_length)
        require_runtime(repository, name, RUNTIMES[runtime])
    with tempfile.TemporaryDirectory() as scratch, captured(Path(scratch, "stack.log")):
        summary = stack_folder(files, out, base=base, runtime=RUNTIMES[runtime], force=force)
    versions = [] if repository is None else write_many_tasks(repository, name, out, max_length=max_length)
    if as_json:
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    rows = [
        (
            f"{number} {task['name']}",
            task["kind"],
            str(len(task["labels"])),
            f"{task['bytes']:,}",
            figure(task["parity"]["max_difference"], ".1e"),
        )
        for number, task in enumerate(summary["tasks"])
    ]
    table(("task", "kind", "outputs", "delta file, bytes", "max |Δlogit|"), rows)
    files_bytes, changes = sum(task["bytes"] for task in summary["tasks"]), summary["changes_bytes"]
    say(f"base     {summary['base_bytes']:,} bytes, {summary['base']}")
    say(f"tasks    {changes:,} bytes in the file, {files_bytes:,} in the delta files")
    if changes > PADDED * files_bytes:
        say(f"note: {WHY_LARGER}")
    say(f"inputs   {', '.join(summary['inputs'])} (int64)")
    say(f"compared {summary['tasks'][0]['parity']['rows']} predictions of each task with its merged model")
    say(f"stacked: {near((out / summary['path']).absolute())}")
    for folder in versions:
        say(f"version: {near(folder.absolute())}")


def _require_addable(first: Path, base: str | None, repository: Path, name: str, max_length: int | None) -> None:
    """Check what the repository is told before the file is made, which takes long. Raises UserError E113, E720, E801, and those
    of reading the first delta file and its base."""
    check_name(name)
    require_writable(repository, "Give another --repository")
    if max_length is not None:
        text_limits(base_of(read(first), base, first).folder, max_length)
