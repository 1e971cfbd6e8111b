"""`prune: {target: ...}`: kinds of targets, a model's cost in their terms, and the widths that meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compressor.errors import UserError
from compressor.pruning_criteria import Criterion, Unit, require_rows_used
from export.runtimes.runtime_registry import CPU_PRECISIONS, CPU_RUNTIMES, DEFAULT, RUNTIMES, packages_of
from pipelines.file import limits
from pipelines.reporting.format import milliseconds

if TYPE_CHECKING:
    from compressor.cost import ModelShape
    from compressor.pruning.search import Measure, Prices, Widths


TIMED = ("speedup", "p50_ms")
"""Targets that are measured; the others are computed in closed form."""

GOALS = (*TIMED, "flops", "parameters")


class Target(BaseModel):
    """The target of the pruned model, relative to the dense one: exactly one of speedup, p50_ms, flops and parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speedup: float | None = Field(default=None, gt=1, le=limits.SPEEDUP, description="times the dense model's speed")
    p50_ms: float | None = Field(
        default=None, gt=0, le=limits.MILLISECONDS, description="median milliseconds of one forward pass"
    )
    flops: float | None = Field(default=None, gt=0, lt=1, description="share of the dense model's FLOPs that is left")
    parameters: float | None = Field(default=None, gt=0, lt=1, description="share of its parameters that is left")
    batch: int = Field(default=1, ge=1, le=limits.BATCH, description="rows of the pass that is measured")
    length: int = Field(default=128, ge=2, le=limits.TOKENS, description="tokens a row")
    lengths: Literal["fixed", "data"] = Field(
        default="fixed", description="what is timed: rows of `length` tokens, or validation rows of their own lengths"
    )
    runtime: Literal[*CPU_RUNTIMES] = Field(
        default=DEFAULT.key,
        description="the runtime in which it is measured; without it and precision, those of the file that `deploy` serves",
    )
    precision: Literal[*CPU_PRECISIONS] = Field(default="fp32", description="precision of the measured files")
    rounds: int = Field(default=20, ge=3, le=limits.ROUNDS, description="rounds of the measurement")

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, given: Any) -> Any:
        """So that --set KEY=null takes a key of the file away."""
        return {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else given

    @field_validator(*GOALS, mode="before")
    @classmethod
    def _one_value(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("one run has one target; for several: compress sweep FILE --over prune.target.KEY=1.5,2,3")
        return value

    @model_validator(mode="after")
    def _one_goal(self) -> Target:
        goals = [name for name in GOALS if getattr(self, name) is not None]
        if len(goals) != 1:
            raise ValueError(f"a target is exactly one of {', '.join(GOALS)}")
        senseless = {"batch", "lengths", "runtime", "precision", "rounds"} | ({"length"} if goals == ["parameters"] else set())
        unused = sorted(self.model_fields_set & senseless)
        if unused and not self.timed:
            raise ValueError(f"{unused[0]} is not used by a target of {goals[0]}, which is not measured")
        if self.lengths == "data" and "length" in self.model_fields_set:
            raise ValueError("length is not used with lengths: data, which times rows of their own lengths")
        row = RUNTIMES[self.runtime]
        if "cpu" not in row.precisions.get(self.precision, ()):
            able = ", ".join(name for name, devices in row.precisions.items() if "cpu" in devices)
            raise ValueError(f"{row.title} computes {able} on the CPU, not {self.precision}")
        return self

    @property
    def goal(self) -> str:
        """Name of the goal that was given, one of GOALS."""
        return next(name for name in GOALS if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        return getattr(self, self.goal)

    @property
    def timed(self) -> bool:
        """Whether the target is a time on this machine."""
        return self.goal in TIMED

    def budget(self, dense: float) -> float:
        """The maximum cost of the pruned model, where the dense one costs `dense`."""
        return {"speedup": dense / self.value, "p50_ms": self.value}.get(self.goal, self.value * dense)

    def reached(self, cost: float, dense: float) -> float:
        """Convert a cost to the target's unit."""
        return {"speedup": dense / cost, "p50_ms": cost}.get(self.goal, cost / dense)

    def say(self, value: float) -> str:
        """Format a value in the target's unit: 1.97 -> '1.97x', '12.3 ms', '0.500 of the FLOPs'."""
        words = {"speedup": f"{value:.2f}x", "p50_ms": milliseconds(value)}
        return words.get(self.goal, f"{value:.3f} of the {'FLOPs' if self.goal == 'flops' else 'parameters'}")


class Least(BaseModel):
    """Number of units that stay in every block that is not dropped; of layers, in every stack."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int = Field(default=0, ge=0, le=limits.UNITS, description="the least heads in a block")
    cross_heads: int = Field(default=0, ge=0, le=limits.UNITS, description="the least cross-attention heads in a block")
    neurons: int = Field(default=0, ge=0, le=limits.UNITS, description="the least neurons in a block")
    layers: int = Field(default=1, ge=1, le=limits.UNITS, description="the least blocks in a stack")


class TargetSearch(BaseModel):
    """Remove the least important units until a target is met: the number per block is searched for, not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Target = Field(description="the target to reach")
    structures: list[Unit] = Field(
        default=["heads", "neurons"], min_length=1, max_length=limits.LIST, description="the structures that may be removed"
    )
    criterion: Criterion | dict[Unit, Criterion] = Field(
        default="taylor",
        description="which units of a sublayer are removed first: one criterion, or one for each structure but layers",
    )
    rows: int = Field(default=512, ge=1, le=limits.ROWS, description="training rows that taylor, fisher and reconstruction use")
    price_rows: int = Field(
        default=256, ge=1, le=limits.ROWS, description="training rows on which the loss of removing units is measured"
    )
    keep: Least = Field(default=Least(), description="the least that stays")

    @model_validator(mode="after")
    def _each_has_a_criterion(self) -> TargetSearch:
        if len(set(self.structures)) < len(self.structures):
            raise ValueError("structures names one twice")
        if (ignored := {"criterion", "rows"} & self.model_fields_set) and not self.ranked:
            raise ValueError(f"{min(ignored)} orders the units of a sublayer: whole layers do not use it")
        if isinstance(self.criterion, dict) and set(self.criterion) != set(self.ranked):
            named = ", ".join(self.criterion) or "nothing"
            raise ValueError(f"criterion names {named}; of the structures, {', '.join(self.ranked)} have one")
        require_rows_used(self.model_fields_set, self.criteria.values())
        return self

    @property
    def ranked(self) -> list[str]:
        """The structures of which a block has several units, which are ranked by a score."""
        return [name for name in self.structures if name != "layers"]

    @property
    def criteria(self) -> dict[str, Criterion]:
        """The criterion of each structure."""
        return self.criterion if isinstance(self.criterion, dict) else dict.fromkeys(self.ranked, self.criterion)


@dataclass(frozen=True)
class ScoreSettings:
    """Arguments of scoring: see `pipelines.stages.prune.remove_units.score`."""

    structure: Unit
    criterion: Criterion
    rows: int
    modules: tuple[str, ...] | None = None


def closed_form(target: Target) -> Measure:
    """FLOPs of a row, or number of parameters, as a function of the shape."""
    return (lambda shape: shape.flops(target.length)) if target.goal == "flops" else (lambda shape: shape.parameters)


def widths(
    search: TargetSearch, shape: ModelShape, dense: ModelShape, measure: Measure, prices: Prices | None, share: float = 1.0
) -> Widths | None:
    """The widths that cost at most `share` of the target's budget, at the least price (None: all units count the same); None
    if the model of `shape` already meets it. Raises UserError E520 when there are none.
    """
    from compressor.pruning.search import blocks_of, choose_widths, even_prices, most_saved

    target, now, dense_cost = search.target, measure(shape), measure(dense)
    need = now - share * target.budget(dense_cost)
    if need <= 0:
        return None
    prices = prices or even_prices(shape, search.structures)
    blocks = blocks_of(shape, prices, measure, search.keep.model_dump(), _staying(search, shape, prices), tile_of(target))
    chosen = choose_widths(blocks, need)
    if chosen is None:
        best = target.say(target.reached(now - most_saved(blocks), dense_cost))
        more = "" if "layers" in search.structures else ", or allow layers to be removed too"
        what = f"{target.say(target.value)} is out of reach: removing everything allowed gives {best}"
        raise UserError("E520", what, f"Choose a lower target{more}")
    return chosen


def tile_of(target: Target) -> int:
    """The columns that the kernels of a timed target's runtime take at once."""
    return RUNTIMES[target.runtime].tiles.get(target.precision, 1) if target.timed else 1


def _staying(search: TargetSearch, shape: ModelShape, prices: Prices) -> list[int]:
    """The blocks that each stack must keep, up to the minimum: required ones first, then those most costly to lose."""
    if "layers" not in search.structures:
        return []
    stacks: dict[bool, list[int]] = {}
    for place, layer in enumerate(shape.layers):
        stacks.setdefault(layer.cross_heads is not None, []).append(place)
    least = search.keep.layers

    def last_to_go(place: int) -> tuple[bool, float]:
        return not shape.layers[place].needed, -prices["layers"][place][-1]

    return [place for stack in stacks.values() for place in sorted(stack, key=last_to_go)[:least]]


def surroundings(target: Target) -> dict[str, Any]:
    """The machine and the runtime of a timed target, and what writes its files. Raises UserError E901."""
    from compressor.processor import processor
    from export.graph.graph_version import GRAPHS
    from pipelines.engine.environment import distribution

    runtime = " ".join([target.runtime, *map(distribution, timed_packages(target))])
    exporter = [*map(distribution, ("torch", "transformers", "onnx-ir", "onnxscript")), GRAPHS]
    return {"runtime": runtime, "exporter": exporter, **processor()}


def timed_packages(target: Target) -> tuple[str, ...]:
    """The distributions that affect a timed target's cost. Raises UserError E901 for one that is missing, E904 where the CPU
    cannot compute in the target's precision."""
    RUNTIMES[target.runtime].require(writing=True)
    RUNTIMES[target.runtime].require_instructions(target.precision)
    return packages_of([target.runtime], writing=True)
