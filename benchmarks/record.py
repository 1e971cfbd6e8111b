"""A benchmark's record: a JSON file that a later run goes on from, as long as it is of the same machine and settings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.latency.core_time import disturbance
from pipelines.engine.store import lock, write_atomic

if TYPE_CHECKING:
    from export.latency.measure import Measurement


def plain(reference: str) -> str:
    """A model's reference, or several with commas between, without the folders of one person's disk."""
    return ",".join(part if ":" in part else Path(part).name for part in reference.split(","))


def spread(values: Sequence[float], sign: str = "") -> str:
    """'89.2 ± 0.3', or the one value there is; with the sign '+' as a change."""
    return f"{statistics.fmean(values):{sign}.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def void_where_disturbed(measured: Iterable[Measurement]) -> list[str]:
    """A line for a page where the timed processes waited for a core, so that its times mean little."""
    told = disturbance(max(row.waited for row in measured))
    return [f"Void: {told}."] if told else []


def read_record(path: Path, part: str | None, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record at `path`, whose `part` (None: the whole) holds these facts; None where there is none.

    Raises ValueError for other facts.
    """
    if not path.is_file():
        return None
    stored = json.loads(path.read_text())
    known = stored if part is None else stored[part]
    if odd := [key for key in facts if known.get(key) != facts[key]]:
        raise ValueError(f"{path} is of another '{odd[0]}'; give another --out, or delete it to measure everything again")
    return stored


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the record whole, or leave it as it was."""
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def keep(path: Path, content: dict[str, Any], part: str, name: str, row: Mapping[str, Any]) -> None:
    """Add a row to a part of the record `content`, and write that to `path`; the rows that other commands have written there
    meanwhile are taken over into `content`. Raises ValueError where they are of other facts."""
    with lock(path.with_suffix(".lock"), lambda pid: None):
        if stored := read_record(path, "facts", content["facts"]):
            content[part] |= stored[part]
        content[part][name] = row
        write_record(path, content)


class Record:
    """What the runs so far came to, by name, in a file that outlives the store; `facts` are what they have in common.

    Raises ValueError where the file is of other facts.
    """

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts, self.runs = path, facts, {}
        if stored := read_record(path, "facts", facts):
            self.runs = stored["runs"]

    def figures(self, name: str, made: Callable[[], dict | None]) -> dict | None:
        """A run's figures: as they stand here, or as they are `made` now and kept."""
        if name not in self.runs and (figures := made()):
            keep(self.path, {"facts": self.facts, "runs": self.runs}, "runs", name, figures)
        return self.runs.get(name)
