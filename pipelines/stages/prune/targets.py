"""`prune: {target: ...}`: what a target is, what a model costs in its terms, and the widths that meet it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compressor.errors import UserError
from compressor.pruning_criteria import Criterion, Unit
from pipelines.file import limits
from pipelines.reporting.format import milliseconds

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from compressor.cost import ModelShape
    from compressor.pruning.search import Measure, Prices, Widths
    from compressor.pruning.surgery import Removal
    from export.latency.table import LatencyTable
    from pipelines.engine.stage import Inputs, Workspace
    from pipelines.stages.loading import Data

TIMED = ("speedup", "p50_ms")
"""Targets that are measured; the others are closed forms."""
GOALS = (*TIMED, "flops", "parameters")
MISS = 0.02
"""By what share of itself a time may be over what the target allows, before the widths are chosen anew."""
OFF = 0.1
"""By what share a latency table may be off: no measurement makes the next widths narrower than that."""
TRIES = 3
"""Times that widths are chosen and measured."""

UNTIMED = ("id2label", "label2id", "_name_or_path", "architectures", "transformers_version")
"""Keys of config.json that say nothing about a graph that the shape does not say."""


class Target(BaseModel):
    """What the pruned model is to reach, always against the dense one: exactly one of speedup, p50_ms, flops and parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speedup: float | None = Field(default=None, gt=1, le=limits.SPEEDUP, description="times the dense model's speed")
    p50_ms: float | None = Field(
        default=None, gt=0, le=limits.MILLISECONDS, description="median milliseconds of one forward pass"
    )
    flops: float | None = Field(default=None, gt=0, lt=1, description="share of the dense model's FLOPs that is left")
    parameters: float | None = Field(default=None, gt=0, lt=1, description="share of its parameters that is left")
    batch: int = Field(default=1, ge=1, le=limits.BATCH, description="rows of the pass that is measured")
    length: int = Field(default=128, ge=2, le=limits.TOKENS, description="tokens a row")
    runtime: Literal["onnx", "openvino"] = Field(default="onnx", description="what it is measured in")
    precision: Literal["fp32", "int8"] = Field(default="fp32", description="of the files that are measured")
    rounds: int = Field(default=20, ge=3, le=limits.ROUNDS, description="of the measuring")

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
        senseless = {"batch", "runtime", "precision", "rounds"} | ({"length"} if goals == ["parameters"] else set())
        given = sorted(self.model_fields_set & senseless)
        if given and not self.timed:
            raise ValueError(f"{given[0]} means nothing to a target of {goals[0]}, which is not measured")
        return self

    @property
    def goal(self) -> str:
        """Which of GOALS was given."""
        return next(name for name in GOALS if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        return getattr(self, self.goal)

    @property
    def timed(self) -> bool:
        """Whether it is a time on this machine."""
        return self.goal in TIMED

    def budget(self, dense: float) -> float:
        """The most that the pruned model may cost, where the dense one costs `dense`."""
        return {"speedup": dense / self.value, "p50_ms": self.value}.get(self.goal, self.value * dense)

    def reached(self, cost: float, dense: float) -> float:
        """A cost in the target's own unit."""
        return {"speedup": dense / cost, "p50_ms": cost}.get(self.goal, cost / dense)

    def say(self, value: float) -> str:
        """1.97 -> '1.97x', '12.3 ms', '0.500 of the FLOPs'."""
        words = {"speedup": f"{value:.2f}x", "p50_ms": milliseconds(value)}
        return words.get(self.goal, f"{value:.3f} of the {'FLOPs' if self.goal == 'flops' else 'parameters'}")


class Least(BaseModel):
    """How many units stay in every block that is not dropped; of layers, in every stack."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int = Field(default=0, ge=0, le=limits.UNITS, description="heads that stay in a block")
    cross_heads: int = Field(default=0, ge=0, le=limits.UNITS, description="heads that look at the encoder and stay in a block")
    neurons: int = Field(default=0, ge=0, le=limits.UNITS, description="neurons that stay in a block")
    layers: int = Field(default=1, ge=1, le=limits.UNITS, description="blocks that stay in a stack")


class Search(BaseModel):
    """Remove what matters least until a target is met: how many units of which block is found, not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Target = Field(description="what is to be reached")
    structures: list[Unit] = Field(
        default=["heads", "neurons"], min_length=1, max_length=limits.LIST, description="what may go"
    )
    criterion: Criterion | dict[Unit, Criterion] = Field(
        default="taylor", description="which units of a sublayer go first: one, or one for each structure but layers"
    )
    rows: int = Field(default=512, ge=1, le=limits.ROWS, description="training rows that taylor and fisher look at")
    price_rows: int = Field(
        default=256, ge=1, le=limits.ROWS, description="training rows that what losing units costs is measured on"
    )
    keep: Least = Field(default=Least(), description="what must stay")

    @model_validator(mode="after")
    def _each_has_a_criterion(self) -> Search:
        if len(set(self.structures)) < len(self.structures):
            raise ValueError("structures names one twice")
        if (told := {"criterion", "rows"} & self.model_fields_set) and not self.ranked:
            raise ValueError(f"{min(told)} is about which units of a sublayer go first; a whole layer is measured")
        if isinstance(self.criterion, dict) and set(self.criterion) != set(self.ranked):
            named = ", ".join(self.criterion) or "nothing"
            raise ValueError(f"criterion names {named}; of the structures, {', '.join(self.ranked)} have one")
        return self

    @property
    def ranked(self) -> list[str]:
        """The structures of which a block has several units, so that some go before others."""
        return [name for name in self.structures if name != "layers"]

    @property
    def criteria(self) -> dict[str, Criterion]:
        """Structure -> its criterion."""
        return self.criterion if isinstance(self.criterion, dict) else dict.fromkeys(self.ranked, self.criterion)


@dataclass(frozen=True)
class Trial:
    """Widths that were measured: milliseconds of the dense and of the pruned model, and what the table made of them."""

    widths: Widths
    predicted: float
    dense_ms: float
    ms: float

    def excess(self, target: Target) -> float:
        """The time over the most that it may be: at most 1 where the target is met."""
        return self.ms / target.budget(self.dense_ms)

    def to_json(self, target: Target) -> dict[str, float]:
        """What is recorded of it, `measured` in the target's own unit."""
        measured = target.reached(self.ms, self.dense_ms)
        return {"predicted": self.predicted, "measured": measured, "dense_ms": self.dense_ms, "ms": self.ms}


@dataclass(frozen=True)
class Judged:
    """What scores are asked for: see `pipelines.stages.prune.config.score`."""

    structure: Unit
    criterion: Criterion
    rows: int


def closed_form(target: Target) -> Measure:
    """FLOPs of a row, or parameters."""
    return (lambda shape: shape.flops(target.length)) if target.goal == "flops" else (lambda shape: shape.parameters)


def widths(
    search: Search, shape: ModelShape, dense: ModelShape, measure: Measure, prices: Prices | None, share: float = 1.0
) -> Widths | None:
    """The widths that cost at most `share` of what the target allows, at the least price (None: every unit alike); None where
    the model of `shape` costs no more already.

    Raises UserError E520 when there are none.
    """
    from compressor.pruning.search import blocks_of, choose, even_prices, most_saved

    target, now, whole = search.target, measure(shape), measure(dense)
    need = now - share * target.budget(whole)
    if need <= 0:
        return None
    prices = prices or even_prices(shape, search.structures)
    blocks = blocks_of(shape, prices, measure, search.keep.model_dump(), _staying(search, shape, prices))
    found = choose(blocks, need)
    if found is None:
        best = target.say(target.reached(now - most_saved(blocks), whole))
        more = "" if "layers" in search.structures else ", or let layers go too"
        what = f"{target.say(target.value)} cannot be had: with all gone that may go it would be {best}"
        raise UserError("E520", what, f"Ask for less{more}")
    return found


def settled(choose: Callable[..., Widths | None], trial: Callable[[Widths], Trial], target: Target) -> list[Trial]:
    """What was tried until a timed target was met by its measurement, the widths that count last.

    `choose` finds the widths that cost a share (1) of what the target allows by the latency table, or raises UserError E520.
    Where they turn out slower than allowed, the table is off by as much, and the next are chosen for less.
    """
    share, tried = 1.0, [trial(choose())]
    while tried[-1].excess(target) > 1 + MISS and len(tried) < TRIES:
        share /= min(tried[-1].excess(target), 1 + OFF)
        try:
            narrower = choose(share)
        except UserError:  # E520: there is no more to be saved
            break
        tried.append(trial(narrower))
    return tried


def _staying(search: Search, shape: ModelShape, prices: Prices) -> list[int]:
    """The blocks of each stack that cost most to lose, after those that stay anyway: as many as must be left of it."""
    if "layers" not in search.structures:
        return []
    stacks: dict[bool, list[int]] = {}
    for place, layer in enumerate(shape.layers):
        stacks.setdefault(layer.cross_heads is not None, []).append(place)
    least = search.keep.layers

    def last_to_go(place: int) -> tuple[bool, float]:
        return not shape.layers[place].needed, -prices["layers"][place][-1]

    return [place for stack in stacks.values() for place in sorted(stack, key=last_to_go)[:least]]


def lowest_of(found: Widths, scores: Mapping[str, Sequence[Any]]) -> dict[int, Removal]:
    """The units with the lowest scores (tensors) of every block, as many as the widths say."""
    from compressor.pruning.scores import lowest
    from compressor.pruning.surgery import Removal

    removals = {}
    for place, left in enumerate(found):
        if left is None:
            removals[place] = Removal(whole=True)
            continue
        own = {name: scores[name][place] for name in left}
        gone = {name: lowest([one], [len(one) - left[name]])[0] for name, one in own.items()}
        if any(gone.values()):
            removals[place] = Removal(**gone)
    return removals


def latency_table(target: Target, dense: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> LatencyTable:
    """The table of the dense model's shape on this machine: read where it was measured before, measured otherwise.

    Raises UserError E803 where the file is another's, E901 where ONNX Runtime is missing.
    """
    from export.latency.table import LatencyTable, measure_table, steps

    facts = facts_of(target, dense, inputs)
    name = table_name(facts)

    def measure() -> str:
        with workspace.progress(f"measuring {name}", steps(dense, target.rounds)) as bar:
            return measure_table(
                dense,
                sample_of(data),
                facts,
                batch=target.batch,
                length=target.length,
                runtime=target.runtime,
                precision=target.precision,
                threads=inputs.threads,
                rounds=target.rounds,
                on_step=bar.advance,
            ).to_json()

    return LatencyTable.from_json(once(name, measure, workspace), facts)


def once(name: str, measure: Callable[[], str], workspace: Workspace) -> str:
    """What `measure` says, from the file `name` of the cache where it was measured before and not asked for anew.

    A file without its seal is measured again. Raises UserError E803 where it has changed since.
    """
    from pipelines.engine.store import lock, replace_files, sealed

    path = workspace.cache / f"{name}.json"
    seal = path.with_suffix(".sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.with_suffix(".lock"), lambda pid: workspace.say(f"waiting for process {pid}, which measures the same")):
        if path.is_file() and seal.is_file() and not workspace.again:
            content = path.read_bytes()
            if seal.read_bytes() != sealed(content, path.name):
                raise UserError("E803", "has changed since it was measured", "Delete it: it is measured again", str(path))
            workspace.say(f"{name} is there")
            return content.decode()
        found = measure()
        content = found.encode()
        replace_files({path: content, seal: sealed(content, path.name)})
    return found


def prices(
    search: Search, scores: Mapping[str, Sequence[Tensor]], model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace
) -> Prices:
    """What losing the lowest units of every block costs, measured on training rows once for a model and its scores.

    Raises UserError E521, E803 where the file is damaged.
    """
    import numpy as np
    import torch

    from compressor.deltas.links import merged_copy
    from compressor.pruning.prices import prices_of, trials
    from compressor.pruning.scores import units_of
    from pipelines.engine.store import fingerprint
    from pipelines.stages.loading import tensor_batches

    alike = [torch.zeros(units) for units in units_of(model, "layers")]
    order = {structure: scores.get(structure, alike) for structure in search.structures}

    def measure() -> str:
        batches = list(tensor_batches(data.train.sample(search.price_rows), data.pad_id, data.batch_size))
        with workspace.progress("measuring what units are worth", len(batches) * trials(model, search.structures)) as bar:
            found = prices_of(merged_copy(model), order, batches, data.kind, bar.advance)
        return json.dumps({structure: [one.tolist() for one in blocks] for structure, blocks in found.items()})

    ranks = {structure: [torch.argsort(one, stable=True).tolist() for one in blocks] for structure, blocks in order.items()}
    facts = {"model": inputs.nearest("model").id, "ranks": ranks, "rows": search.price_rows, "threads": inputs.threads}
    text = once(f"prices-{fingerprint(facts)[:16]}", measure, workspace)
    try:
        return {structure: [np.array(one, dtype=float) for one in blocks] for structure, blocks in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError("E803", "the prices of units are unreadable", "Delete the file: they are measured again") from error


def table_name(facts: Mapping[str, Any]) -> str:
    """What a table of these facts is called."""
    from pipelines.engine.store import fingerprint

    return f"latency-{fingerprint(dict(facts))[:16]}"


def facts_of(target: Target, dense: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Everything that decides what a latency table says."""
    from dataclasses import asdict

    from compressor.cost import shape_of
    from export.latency.table import KNOTS
    from pipelines.engine.environment import distribution
    from pipelines.engine.store import fingerprint

    # the shape knows no activation and no attention window
    config = {key: value for key, value in dense.config.to_dict().items() if key not in UNTIMED}
    return {
        "architecture": dense.config.model_type,
        "config": fingerprint(config),
        "shape": asdict(shape_of(dense)),
        "knots": KNOTS,
        "exporter": [distribution("torch"), distribution("transformers")],
        "batch": target.batch,
        "length": target.length,
        "precision": target.precision,
        "rounds": target.rounds,
        "threads": inputs.threads,
        **surroundings(target),
    }


def surroundings(target: Target) -> dict[str, Any]:
    """The machine and the runtime that a timed target is about. Raises UserError E901."""
    from compressor.processor import processor
    from pipelines.engine.environment import distribution

    return {"runtime": " ".join(map(distribution, packages_of(target))), **processor()}


def packages_of(target: Target) -> tuple[str, ...]:
    """The distributions that decide what a timed target costs. Raises UserError E901 for one that is missing."""
    from export.runtimes.openvino import PACKAGES, require_openvino
    from pipelines.engine.environment import distribution

    if target.runtime == "openvino":
        require_openvino()
        return PACKAGES
    if distribution("onnxruntime") is None:
        raise UserError(
            "E901", f"a target of {target.goal} needs the package onnxruntime", "Install it: pip install onnxruntime"
        )
    return ("onnxruntime",)


def sample_of(data: Data) -> dict[str, np.ndarray]:
    """Two padded rows to trace with."""
    from compressor.tasks.features import pad

    return pad(data.validation.sample(2).tokens, data.pad_id)


def measured(
    target: Target, dense: nn.Module, pruned: nn.Module, inputs: Inputs, data: Data, workspace: Workspace
) -> list[float]:
    """Milliseconds of the dense and the pruned model (no chains), exported and timed in one interleaved run."""
    from export.latency.measure import measure
    from export.latency.table import exported, undisturbed

    with (
        tempfile.TemporaryDirectory() as scratch,
        workspace.progress("measuring what the target asks for", target.rounds) as bar,
    ):
        pair = (("dense", dense), ("pruned", pruned))
        how = (target.precision, target.runtime)
        variants = [exported(name, model, sample_of(data), Path(scratch), *how) for name, model in pair]
        options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
        times = undisturbed(measure(variants, [(target.batch, target.length)], target.rounds, **options))
    return [times["dense"], times["pruned"]]
