"""The trials of a sweep: the product of the values of several keys, each repeated with several seeds or training subsets."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from pipelines.file.config import Pipeline
from pipelines.file.yaml_source import parse, read_yaml

SHARE = 0.9
"""Share of the training rows in each random subset, as in the SAM paper (Fu et al., 2023, tables 1 and 2)."""
MOST = 10_000
"""Most trials of one sweep: a typing error in a grid must not start a year of work."""
LONGEST = 120
"""Longest name of a trial made from its values; longer ones are replaced by numbers, because a name is a folder."""

Axes = dict[str, list[Any]]
"""Key as in `--set` -> its values, each once."""


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep: its name, the values of the compared keys, and what repeats it: a seed or a subset ({} if alone)."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    repeat: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> list[str]:
        """All keys that it sets, in the form of `compress run --set`: JSON is valid YAML."""
        return [f"{key}={json.dumps(value)}" for key, value in {**self.values, **self.repeat}.items()]


@dataclass(frozen=True)
class SweepPlan:
    """What is compared, `axes`, and how often each combination is run: `seeds` or random `subsets` of the training rows."""

    axes: Axes = field(default_factory=dict)
    seeds: int | None = None
    subsets: int | None = None
    share: float | None = None

    def trials(self, pipeline: Pipeline) -> list[SweepTrial]:
        """Every trial; those of one combination of values are adjacent. Raises UserError E115."""
        self._check(pipeline)
        repeats = self._repeats(pipeline)
        titles = short_keys(list(self.axes))
        combinations = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        pairs = [(values, label, repeat) for values in combinations for label, repeat in repeats]
        names = [
            "_".join([*(f"{titles[key]}-{_plain(value)}" for key, value in values.items()), *([label] if label else [])])
            for values, label, _ in pairs
        ]
        return [SweepTrial(name, values, repeat) for name, (values, _, repeat) in zip(_distinct(names), pairs, strict=True)]

    def _check(self, pipeline: Pipeline) -> None:
        if not self.axes and self.seeds is None and self.subsets is None:
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
        if "seed" in self.axes and self.seeds is not None:
            raise UserError("E115", "the seed is set by --seeds and compared as a key, too", "Drop one of the two")
        count = math.prod(len(values) for values in self.axes.values()) * (self.seeds or self.subsets or 1)
        if count > MOST:
            raise UserError("E115", f"{count:,} runs are more than {MOST:,}", "Compare fewer values, or in several sweeps")

    def _repeats(self, pipeline: Pipeline) -> list[tuple[str, dict[str, Any]]]:
        """(label, settings) of every repetition; [("", {})] for none."""
        if self.seeds is not None:
            return [(f"seed-{seed}", {"seed": seed}) for seed in range(pipeline.seed, pipeline.seed + self.seeds)]
        if self.subsets is None:
            return [("", {})]
        for path, task in pipeline.all_tasks.items():
            if task.subset is not None:
                where = pipeline.source.where((*path, "subset"))
                raise UserError(
                    "E115", "the pipeline trains on a subset already", "Remove the key: the sweep draws its own", where
                )
        share = self.share or SHARE
        keys = [".".join(map(str, (*path, "subset"))) for path in pipeline.all_tasks]
        return [(f"subset-{seed}", {key: {"share": share, "seed": seed} for key in keys}) for seed in range(self.subsets)]


def axes_of(overs: Sequence[str], grid: Path | None) -> Axes:
    """The compared keys, from a grid file and from texts 'KEY=VALUE,VALUE'. Raises UserError E115, E120, E101."""
    axes = read_grid(grid) if grid else {}
    for over in overs:
        key, equals, text = over.partition("=")
        mark = f"--over {over}"
        # the list of a YAML file: values may themselves be lists or mappings
        values = parse(f"[{text}]", mark).data if equals and key else []
        if len(values) < 2 or None in values:
            fix = "Write KEY=VALUE,VALUE with two values or more, each once, e.g. prune.target.speedup=1.5,2"
            raise UserError("E115", f"{mark}: no key with several values", fix)
        _require_once(values, mark)
        if key in axes:
            raise UserError("E115", f"{mark}: the key is given twice", "Write all its values in one place")
        axes[key] = values
    return axes


def read_grid(path: Path) -> Axes:
    """The file of `--grid`: a mapping of keys to lists of values. Raises UserError E120, and E101 or E106 of its YAML."""
    source = read_yaml(path)
    fix = "Write one key a line with a list of two values or more: tune.rank: [4, 8]"
    if not isinstance(source.data, dict) or not source.data:
        raise UserError("E120", "a grid is a mapping of keys to lists of values", fix, source.where(()))
    for key, values in source.data.items():
        where = source.where((key,))
        if not isinstance(key, str) or not isinstance(values, list) or len(values) < 2 or None in values:
            raise UserError("E120", f"'{key}' has no list of several values", fix, where)
        _require_once(values, where)
    return dict(source.data)


def _require_once(values: list[Any], where: str) -> None:
    if any(values.count(value) > 1 for value in values):
        raise UserError("E115", f"{where}: a value appears twice", "Write each value once")


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key -> its last part, or the whole key where two of them end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)}


def shown_value(value: Any) -> str:
    """A value as a cell of a table: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", shown_value(value)).strip("_.")


def _distinct(names: list[str]) -> list[str]:
    """Names that no two trials share and every file system takes: a/b and a b give the same, and a long list too long a one."""
    if len(set(names)) == len(names) and all(0 < len(name) <= LONGEST for name in names):
        return names
    width = len(str(len(names)))
    return [f"{name[:LONGEST].rstrip('._-')}-{number:0{width}}".lstrip("-") for number, name in enumerate(names, start=1)]
