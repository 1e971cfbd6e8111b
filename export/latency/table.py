"""How long the parts of a model take in a runtime: a table that prices every pruned model of the same dense one.

Whole models are timed, with all blocks at one width, in one interleaved run: caches, fusions and threads then behave as in a
real model, unlike in a single block. The differences to the dense model, divided among the blocks, give the time of a sublayer
with so many units; between the measured widths the table is linear (ZipLM, Kurtic et al. 2023, section 3.3, prices its choices
by such a table). Where the head reads the first token alone, files compute less in the last block: it is then timed by itself.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls
from torch import nn

from compressor.cost import LayerShape, ModelShape, shape_of
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.models.first_token import reads_first_token
from compressor.models.modules import STRUCTURES
from compressor.models.special_tokens import end_id_of
from compressor.pruning.sizes import stacks_of
from compressor.pruning.surgery import Removal, blocks_can_go, heads_can_go, remove
from export.graph.trace import trace
from export.latency.measure import LatencyVariant, Measurement, measure
from export.latency.passes import Pass, PassMeasurement, measure_passes
from export.runtimes.runtime_registry import DEFAULT, RUNTIMES

KNOTS = (0.0, 0.25, 0.5)
"""Shares of a structure's units at which models are timed, besides the dense model."""

Workload = tuple[int, int] | Pass
"""What is timed: one (batch, length), or batches of rows of their own lengths, of which the mean batch counts."""


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of one forward pass at one workload, precision and thread count.

    `sublayers`: structure -> ((units left, ms of one such sublayer), ...) from 0 units (0 ms) up; `block_ms` is the time of a
    block whose sublayers are all empty (norms, residuals), `rest_ms` the time outside the blocks. `last` is as `sublayers`, of
    the last block; empty where that is like the others. `facts` describe the measurement; `waited` is the share of time that
    most of the measured processes waited for a core.
    """

    facts: dict[str, Any]
    sublayers: dict[str, tuple[tuple[int, float], ...]]
    block_ms: float
    rest_ms: float
    waited: float = 0.0
    last: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def sublayer_ms(self, structure: str, units: int, *, last: bool = False) -> float:
        """Milliseconds of one sublayer with `units` units left; `last`: of the last block."""
        rows = self.last if last and self.last else self.sublayers
        widths, times = zip(*rows[structure], strict=True)
        return float(np.interp(units, widths, times))

    def ms(self, shape: ModelShape) -> float:
        """Milliseconds of a model whose blocks were pruned from those of the dense one."""
        blocks = [(layer, place == len(shape.layers)) for place, layer in enumerate(shape.layers, start=1)]
        inside = sum(self.sublayer_ms(name, layer.units(name), last=last) for layer, last in blocks for name in self.sublayers)
        return self.rest_ms + len(shape.layers) * self.block_ms + inside

    def to_json(self) -> str:
        """The table as JSON; `from_json` reads it."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, facts: Mapping[str, Any]) -> LatencyTable:
        """Read the table in `text`, which must have been measured for exactly these `facts`. Raises UserError E803."""
        try:
            data = json.loads(text)
            rows, last = (
                {name: tuple((int(n), float(ms)) for n, ms in row) for name, row in rows.items()}
                for rows in (data["sublayers"], data["last"])
            )
            times = (float(data["block_ms"]), float(data["rest_ms"]), float(data["waited"]))
            table = cls(data["facts"], rows, *times, last)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError("E803", "the latency table is unreadable", "Delete the file: it is measured again") from error
        if table.facts != json.loads(json.dumps(facts)):
            raise UserError(
                "E803", "the latency table belongs to another model or machine", "Delete the file: it is measured again"
            )
        return table


def probes(model: nn.Module, reads_first: bool | None = None) -> list[dict[int, Removal]]:
    """Removals to time for the cost of every structure that can be removed from `model`; blocks that others depend on are left
    as they are. Whether the head reads the first token alone is by default found by a pass, for which a model needs weights.

    A last block of which files compute one token keeps a head: without any, nothing reads the other tokens of the blocks before
    it, and files compute one token there, too.
    """
    layers = dict(enumerate(layers_of(model)))
    last = len(layers) - 1 if (reads_first_token(model) if reads_first is None else reads_first) else None
    removals = []
    for structure in (name for name in STRUCTURES if name != "heads" or heads_can_go(model)):
        free = {n: layer for n, layer in layers.items() if layer.units(structure) and not layer.needed}
        total = max((layer.units(structure) for layer in free.values()), default=0)
        for kept in sorted({int(knot * total) for knot in KNOTS} - {total}):
            cut = [number for number in free if kept or structure != "heads" or number != last]
            removals.append({number: Removal(**{structure: list(range(kept, total))}) for number in cut})
        if last in free:
            gone = list(range(int(structure == "heads"), total))
            removals.append({last: Removal(**{structure: gone})} if gone else {})
    gone, start = [], 0
    for stack in stacks_of(model) if blocks_can_go(model) else ():
        gone += range(start + (len(stack) + 1) // 2, start + len(stack))
        start += len(stack)
    removals.append({number: Removal(whole=True) for number in gone})
    return [removal for removal in removals if removal]


def fit(facts: Mapping[str, Any], timed: Sequence[tuple[ModelShape, float]], *, last: bool = False) -> LatencyTable:
    """The table that fits the times (ms) of some models best, by least squares of relative errors. `last`: the last block has
    times of its own, linear in its units.

    Times are constrained to be non-negative and non-decreasing in the units, whatever the noise.
    """
    several = last and any(len(shape.layers) > 1 for shape, _ in timed)
    layers = [layer for shape, _ in timed for layer in (shape.layers[:-1] if several else shape.layers)]
    seen = {name: {layer.units(name) for layer in layers} | {0} for name in STRUCTURES}
    knots = {name: sorted(units) for name, units in seen.items() if len(units) > 1}
    of_last = {name: [0, widths[-1]] for name, widths in knots.items()} if last else {}

    def terms(shape: ModelShape) -> list[float]:
        """How often a model contains the rest, a block, and each piece between two knots of a structure."""
        alike = shape.layers[:-1] if last else shape.layers
        return [1.0, len(shape.layers), *_pieces(alike, knots), *_pieces(shape.layers[-1:], of_last)]

    rows = np.array([terms(shape) for shape, _ in timed]) / np.array([[ms] for _, ms in timed])
    (rest_ms, block_ms, *costs), _ = nnls(rows, np.ones(len(timed)))
    costs = iter(map(float, costs))
    sublayers, last_times = ({name: _curve(widths, costs) for name, widths in each.items()} for each in (knots, of_last))
    return LatencyTable(dict(facts), sublayers, float(block_ms), float(rest_ms), last=last_times)


def _pieces(layers: Sequence[LayerShape], knots: Mapping[str, Sequence[int]]) -> list[float]:
    """How often blocks contain each piece between two knots of a structure."""
    counts = {name: np.array([layer.units(name) for layer in layers]) for name in knots}
    pieces = [(counts[name], low, high) for name, widths in knots.items() for low, high in itertools.pairwise(widths)]
    return [float(np.clip((units - low) / (high - low), 0, 1).sum()) for units, low, high in pieces]


def _curve(widths: Sequence[int], costs: Iterator[float]) -> tuple[tuple[int, float], ...]:
    """(units, ms) at the knots `widths`, of which the first is 0, from the times between two of them."""
    return tuple(zip(widths, itertools.accumulate(itertools.islice(costs, len(widths) - 1), initial=0.0), strict=True))


def measure_table(
    model: nn.Module,
    encoding: dict[str, np.ndarray],
    facts: Mapping[str, Any],
    *,
    workload: Workload,
    runtime: str = DEFAULT.key,
    precision: str = "fp32",
    threads: int | None = None,
    rounds: int = 20,
    on_step: Callable[[int], None] = lambda steps: None,
) -> LatencyTable:
    """Export the dense `model` (no chains) and its pruned probes, time all of them on a workload in one run and fit the table.

    `encoding` is a sample to trace with, int64 (2 or more, 2 or more). `on_step(n)` is called with n of
    `steps(model, turns(workload, rounds))`.
    Raises UserError E603, E901.
    """
    removals_tried = probes(model)
    with tempfile.TemporaryDirectory() as scratch:
        variants, shapes = [], []
        for number, removals in enumerate([{}, *removals_tried]):
            cut = copy.deepcopy(model)
            remove(cut, removals)
            shapes.append(shape_of(cut))
            variants.append(exported(str(number), cut, encoding, Path(scratch), precision, runtime))
            on_step(EXPORT_STEPS)
        options = {"threads": threads, "on_round": lambda: on_step(1)}
        times = times_of(variants, workload, rounds, **options)
    timed = [(shape, times.ms[str(number)]) for number, shape in enumerate(shapes)]
    table = fit(facts, timed, last=reads_first_token(model))
    return replace(table, waited=times.waited)


def turns(workload: Workload, rounds: int) -> int:
    """Number of rounds of `times_of`: the first pass over new shapes, which does not count, is one more."""
    return rounds + isinstance(workload, Pass)


@dataclass(frozen=True)
class Times:
    """Milliseconds of every variant by its name; `waited` is the share of time that most waited for a core."""

    ms: dict[str, float]
    waited: float


def times_of(variants: Sequence[LatencyVariant], workload: Workload, rounds: int, **options: Any) -> Times:
    """The times of one run with the `options` of `measure`. Raises UserError E603."""
    of_rows = isinstance(workload, Pass)
    rows = (measure_passes if of_rows else measure)(variants, [workload], rounds, **options)
    calls = len(workload.batches) if of_rows else 1
    return Times({name: ms / calls for name, ms in undisturbed(rows).items()}, max(row.waited for row in rows))


def undisturbed(rows: Sequence[Measurement] | Sequence[PassMeasurement]) -> dict[str, float]:
    """Milliseconds of every variant of one run at one workload, corrected for other work on the machine.

    Other load only lengthens times, long ones more than short ones, so ratios of medians depend on the load, and ratios of the
    fastest rounds do not. All are then scaled to the level of medians.
    """
    fastest = np.array([row.fastest_ms for row in rows])
    level = np.median([row.p50 for row in rows] / fastest)
    return dict(zip((row.variant for row in rows), (fastest * level).tolist(), strict=True))


EXPORT_STEPS = 5
"""Weight of an export in the progress bar, in rounds of measuring."""


def steps(model: nn.Module, rounds: int) -> int:
    """Number of progress steps of `measure_table`."""
    return EXPORT_STEPS * (1 + len(probes(model))) + rounds


def exported(
    name: str,
    model: nn.Module,
    encoding: dict[str, np.ndarray],
    folder: Path,
    precision: str = "fp32",
    runtime: str = DEFAULT.key,
) -> LatencyVariant:
    """A model as a variant of a latency run, exported below `folder` for a runtime. Raises UserError E901.

    Static int8 is calibrated on `encoding`: the scales do not affect the latency.
    """
    row = RUNTIMES[runtime]
    options = {"precisions": (precision,), "rows": [encoding], "fuse": row.can_fuse(model)}
    path = row.write(trace(model, encoding), folder / name, **options)[precision]
    return LatencyVariant(name, runtime, path, vocabulary=model.config.vocab_size, end=end_id_of(model))
