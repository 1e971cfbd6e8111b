"""The trials of a sweep: the product of the values of several keys, each repeated with several seeds or training subsets."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from pipelines.file.config import Pipeline
from pipelines.file.faults import nearest
from pipelines.file.overrides import Preset, join_key, split_key
from pipelines.file.yaml_source import parse
from pipelines.sweeps.search_ranges import Range, read_range
from pipelines.sweeps.table_file import Axes, Grid, cell_of, read_grid, require_no_null, require_once, shown_value

SHARE = 0.9
"""Share of the training rows in each random subset, as in the SAM paper (Fu et al., 2023, tables 1 and 2)."""
MOST = 10_000
"""Most trials of one sweep: a typing error in a grid must not start a year of work."""
MOST_TRIED = 1_000
"""Most trials of one search: each is chosen by looking at all before it, and a range of fractions has so many values."""
LONGEST = 120
"""Longest name of a trial made from its values; longer ones are replaced by numbers, because a name is a folder."""


MEASURED = {"glue", "folder", "kind", "validation", "test", "label", "metric", "positive", "target_length"}
DECODED = {"rows", "answer", "lowercase"}
"""Keys of a task, and of its `decode`, that decide what its figures measure: those of two tasks that differ in one are not
compared."""


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep: its name, the values of the compared keys, and what repeats it: a seed or a subset ({} if alone)."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    repeat: dict[str, Any] = field(default_factory=dict)
    presets: tuple[Preset, ...] = ()
    """What its named rows set, and all trials of a table."""
    named: tuple[str, ...] = ()
    """The keys of `values` that are no keys of the pipeline, but named rows."""

    @property
    def settings(self) -> list[str]:
        """All keys that it sets by themselves, in the form of `compress run --set`: JSON is valid YAML."""
        keys = {key: value for key, value in {**self.values, **self.repeat}.items() if key not in self.named}
        return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


@dataclass(frozen=True)
class Search:
    """A search of so many `trials` in place of every combination, of which `workers` run at a time."""

    trials: int
    workers: int = 1


@dataclass(frozen=True)
class SweepPlan:
    """What is compared, and how often each combination is run: with `seeds`, or on random `subsets` of the training rows.

    `data` is the folder of a table's data files, by default that of the pipeline file.
    """

    grid: Grid = field(default_factory=Grid)
    seeds: int | None = None
    subsets: int | None = None
    share: float | None = None
    data: Path | None = None
    search: Search | None = None

    @property
    def axes(self) -> Axes:
        """Each compared key, or what named rows are called, with its values."""
        return self.grid.axes

    @property
    def first(self) -> tuple[Preset, ...]:
        """What is set for the first value of every key."""
        return self.grid.presets({key: axis[0] for key, axis in self.axes.items() if not isinstance(axis, Range)})

    @property
    def first_settings(self) -> list[str]:
        """The first value, or the low end, of every key that is no named rows, in the form of `compress run --set`."""
        plain = {key: axis for key, axis in self.axes.items() if key not in self.grid.named}
        values = {key: axis.low if isinstance(axis, Range) else axis[0] for key, axis in plain.items()}
        return SweepTrial("", values).settings

    @property
    def repeats(self) -> int:
        """How often each combination is run."""
        return self.seeds or self.subsets or 1

    @property
    def count(self) -> int:
        """How many runs there are."""
        return (self.search.trials if self.search else combinations(self.axes) or 0) * self.repeats

    @property
    def unit(self) -> str:
        """What one run is called: where a trial of a search has several, 'trial' would mean two things."""
        return "run" if self.search and self.repeats > 1 else "trial"

    def trials(self, pipeline: Pipeline) -> list[SweepTrial]:
        """Every trial but of a search; those of one combination of values are adjacent. Raises UserError E115, E123."""
        self.check()
        repeats = self._repeats(pipeline)
        settings = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        pairs = [(values, label, repeat) for values in settings for label, repeat in repeats]
        names = ["_".join(filter(None, [*self._words(values), label])) for values, label, _ in pairs]
        return [self._trial(name, values, repeat) for name, (values, _, repeat) in zip(_distinct(names), pairs, strict=True)]

    def tried(self, number: int, values: dict[str, Any], pipeline: Pipeline) -> list[SweepTrial]:
        """The runs of one trial of a search, which has these values. Raises UserError E115."""
        # the number is a name by itself: the values may be cut
        name = "_".join([f"{number:03}", *self._words(values)])[:LONGEST].rstrip("._-")
        return [self._trial("_".join(filter(None, [name, label])), values, repeat) for label, repeat in self._repeats(pipeline)]

    def _words(self, values: dict[str, Any]) -> list[str]:
        """The values as parts of a trial's name: rank-4."""
        titles = short_keys(list(self.axes))
        return [f"{_plain(titles[key])}-{_plain(value)}".lstrip("-") for key, value in values.items()]

    def _trial(self, name: str, values: dict[str, Any], repeat: dict[str, Any]) -> SweepTrial:
        return SweepTrial(name, values, repeat, self.grid.presets(values), tuple(self.grid.named))

    def probes(self, pipeline: Pipeline) -> list[list[list[SweepTrial]]]:
        """Runs with which a search is checked before it starts. One entry for each value of a list and each end of a range: the
        runs of it with the first values of the other keys, then with their last ones; it must fit one of the two."""
        ends = {key: [axis.low, axis.high] if isinstance(axis, Range) else axis for key, axis in self.axes.items()}
        others = [{key: values[place] for key, values in ends.items()} for place in (0, -1)]
        settings = [[{**other, key: value} for other in others] for key, values in ends.items() for value in values]
        return [[self.tried(0, values, pipeline) for values in alternatives] for alternatives in settings]

    def check(self) -> None:
        """Raises UserError E115, E123 for options that do not fit together."""
        if not self.axes and self.seeds is None and self.subsets is None and self.search is None:
            raise UserError("E115", "nothing differs between the runs", "Give --over, --grid, --seeds or --subsets")
        if self.seeds is not None and self.subsets is not None:
            raise UserError("E115", "--seeds and --subsets exclude each other", "Give one of the two")
        for option, count in (("--seeds", self.seeds), ("--subsets", self.subsets)):
            if count is not None and count < 2:
                what = f"{option} {count}: a spread needs at least 2 runs"
                raise UserError("E115", what, "Give 2 or more; the SAM paper takes 10")
        if self.share is not None and self.subsets is None:
            raise UserError("E115", "--share is not used without --subsets", "Drop it, or give --subsets")
        if self.share is not None and not 0 < self.share < 1:
            what = f"--share {self.share:g} is no part of the training rows"
            raise UserError("E115", what, "Give a number between 0 and 1, e.g. 0.9")
        if self.search is not None:
            _check_search(self.grid, self.search.trials)
        for key, values in self.axes.items() if self.search is None else ():
            if isinstance(values, Range):
                fix = f"Add --search N for N trials that are chosen in it, or give values: --over {key}=A,B"
                raise UserError("E123", f"{key} has a range, {values}, and no values", fix)
        if self.count > MOST:
            raise UserError("E115", f"{self.count:,} runs are more than {MOST:,}", "Compare fewer values, or in several sweeps")

    def _repeats(self, pipeline: Pipeline) -> list[tuple[str, dict[str, Any]]]:
        """(label, settings) of every repetition; [("", {})] for none."""
        if self.seeds is not None:
            return [(f"seed-{seed}", {"seed": seed}) for seed in range(pipeline.seed, pipeline.seed + self.seeds)]
        if self.subsets is None:
            return [("", {})]
        require_all_rows(pipeline)
        share = self.share or SHARE
        return [(f"subset-{seed}", subset_of(pipeline, {"share": share, "seed": seed})) for seed in range(self.subsets)]


def subset_of(pipeline: Pipeline, subset: dict[str, Any]) -> dict[str, Any]:
    """The settings that draw a subset of the training rows of every task of a pipeline."""
    return {join_key((*path, "subset")): subset for path in pipeline.all_tasks}


def require_all_rows(pipeline: Pipeline) -> None:
    """Raises UserError E115 for a task with a subset of its own, which that of a sweep would replace."""
    for path, task in pipeline.all_tasks.items():
        if task.subset is not None:
            where = pipeline.source.where((*path, "subset"))
            raise UserError("E115", "the pipeline trains on a subset already", "Remove the key: the sweep draws its own", where)


def axes_of(overs: Sequence[str], grid: Path | None, table: Grid | None = None) -> Grid:
    """The compared keys: of a table file, of a grid file, and from texts 'KEY=VALUE,VALUE' or 'KEY=LOW..HIGH'.

    Raises UserError E115, E120, E123, E101.
    """
    found = table or Grid()
    if grid:
        found = read_grid(grid, found)
    for over in overs:
        key, equals, text = over.partition("=")
        mark = f"--over {over}"
        if key in found.axes:
            raise UserError("E115", f"{mark}: the key is given twice", "Write all its values in one place")
        if equals and key and (numbers := read_range(key, text, mark)):
            found = found.with_axes({key: numbers}, {})
            continue
        # the list of a YAML file: values may themselves be lists or mappings
        values = parse(f"[{text}]", mark).data if equals and key else []
        require_no_null(values, mark, "E115")
        if len(values) < 2:
            fix = "Write KEY=VALUE,VALUE with two values or more, each once, e.g. prune.target.speedup=1.5,2"
            raise UserError("E115", f"{mark}: no key with several values", fix)
        require_once(values, mark)
        found = found.with_axes({key: values}, {})
    return found


def part_of(grid: Grid, onlys: Sequence[str]) -> Grid:
    """The grid with some of its rows or columns alone, by texts 'KEY=VALUE,VALUE'. Raises UserError E115."""
    axes = dict(grid.axes)
    for only in onlys:
        key, equals, text = only.partition("=")
        mark = f"--only {only}"
        if key not in axes or isinstance(axes[key], Range):
            listed = [axis for axis, values in axes.items() if not isinstance(values, Range)]
            what = f"{mark}: '{key}' has no list of values here"
            raise UserError("E115", what, nearest(key, listed, "There are") if listed else "It is for tables and --over")
        cells = {shown_value(value): value for value in axes[key]}
        given = parse(f"[{text if equals else ''}]", mark)
        wanted = [cell_of(value, given.written.get((place,)), cells) for place, value in enumerate(given.data)]
        require_once(wanted, mark)
        if not wanted or (odd := next((cell for cell in wanted if cell not in cells), None)) is not None:
            what = f"{mark}: no value is given" if not wanted else f"{mark}: {key} has no {odd!r:.60}"
            raise UserError("E115", what, f"Name some of {', '.join(cells)}")
        axes[key] = [value for cell, value in cells.items() if cell in wanted]
    return replace(grid, axes=axes)


def combinations(axes: Axes) -> int | None:
    """How many different settings there are; None where a range has fractions."""
    counts = [values.count if isinstance(values, Range) else len(values) for values in axes.values()]
    return None if None in counts else math.prod(counts)


def _check_search(grid: Grid, trials: int) -> None:
    """Raises UserError E115."""
    if grid.common:
        what = "--search: a table is run in full, as its columns are different tasks"
        raise UserError("E115", what, "Leave --search out, or search over the keys of an ordinary pipeline file")
    if not grid.axes:
        what = "--search: no key to choose values for"
        raise UserError("E115", what, "Add --over KEY=LOW..HIGH, or --over KEY=VALUE,VALUE, or --grid FILE")
    if odd := next(filter(None, (deciding_key(grid, axis) for axis in grid.axes)), None):
        what = f"--search: '{odd}' decides what is measured, so that its values have no best one"
        raise UserError("E115", what, "Leave it out of the search, or leave --search out: every value is then run")
    if not 2 <= trials <= MOST_TRIED:
        what = f"--search {trials}: a search has from 2 to {MOST_TRIED:,} trials"
        raise UserError("E115", what, "Give e.g. --search 30: the first 10 are random, the others are chosen by their results")
    count = combinations(grid.axes)
    if count is not None and count < trials:
        what = f"--search {trials}: the keys have only {count} different settings"
        raise UserError("E115", what, f"Give --search {count} or less; without --search every setting of lists is run")


def deciding_key(grid: Grid, axis: str) -> str | None:
    """The first key that the values of an axis (or its named rows) set and that decides what is measured, if there is one."""
    rows = grid.rows(axis)
    return next((key for key in dict.fromkeys(itertools.chain(*rows)) if _names_task(key, rows)), None)


def _names_task(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a key is a whole task, all tasks, or what one of them measures; a whole `decode`, if rows differ in such a part
    of it, or one leaves it to the file."""
    first, *names = split_key(key) or [key]
    of_task = names[1:] if first == "tasks" else names
    if first not in ("task", "tasks"):
        return False
    if of_task == ["decode"]:
        measured = [_decoded(row[key]) if key in row else None for row in rows]
        return any(other != measured[0] for other in measured)
    return not of_task or of_task[0] in MEASURED or (of_task[0] == "decode" and bool(DECODED.intersection(of_task[1:])))


def _decoded(decode: Any) -> dict[str, Any]:
    """The keys of a whole `decode` that decide what is measured."""
    return {key: decode[key] for key in DECODED & decode.keys()} if isinstance(decode, dict) else {}


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key -> its last part, or the whole key where two of them end alike."""
    last = [(split_key(key) or [key])[-1] for key in keys]
    return {key: part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)}


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", shown_value(value)).strip("_.")


def _distinct(names: list[str]) -> list[str]:
    """Names that no two trials share and every file system takes: a/b and a b give the same, as abc and ABC do on some, and a
    long list too long a one."""
    if len({name.lower() for name in names}) == len(names) and all(0 < len(name) <= LONGEST for name in names):
        return names
    width = len(str(len(names)))
    return [f"{name[:LONGEST].rstrip('._-')}-{number:0{width}}".lstrip("-") for number, name in enumerate(names, start=1)]
