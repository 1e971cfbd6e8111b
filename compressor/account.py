"""The account of a pipeline before it runs: what each stage would train, remove and leave, in closed form.

A stage's `plan` takes a `Plan` and gives the next one; `compress run --dry-run` shows the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.cost import ModelShape, human_bytes, shape_of, share
from compressor.methods import Options, method
from compressor.methods.selective import sizes
from compressor.models.hub import hollow
from compressor.tasks.kinds import kind_of
from compressor.tasks.reading import read_task

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Places:
    """How many places of Ω a select chooses, in closed form: `count` a matrix, a layer or in all, or a share of them.

    `ground` are the options that say in which tensors Ω lies: `on`, and what that reads.
    """

    ground: Options
    scope: str = "matrix"
    count: int | None = None
    ratio: float | None = None

    def total(self, shape: ModelShape) -> int:
        """|Ω| in a model of `shape`, exact in each scope."""
        return sum(self.of(size) for size in self.scopes(shape))

    def scopes(self, shape: ModelShape) -> list[int]:
        """How many places each scope has."""
        layers = [sizes(replace(shape, layers=(layer,)), self.ground) for layer in shape.layers]
        if self.scope == "matrix":
            return [size for layer in layers for size in layer]
        return [sum(layer) for layer in layers] if self.scope == "layer" else [sum(map(sum, layers))]

    def of(self, size: int) -> int:
        """The places chosen among `size`."""
        return share(self.ratio if self.count is None else self.count, size)


@dataclass(frozen=True)
class Trained:
    """What a training stage trains: a method's options, and the places of Ω where it uses them."""

    method: str
    options: Options
    places: Places | None = None

    def count(self, shape: ModelShape) -> int:
        """The closed form of its trainable parameters in a model of `shape`, task head apart."""
        row = method(self.method)
        return row.count(shape, self.options, self.places.total(shape) if row.uses_omega and self.places else 0)

    def kept(self, shape: ModelShape) -> int:
        """What of that is left when training is over, for a later stage to go on with."""
        row = method(self.method)
        return row.kept(shape, self.options) if row.kept else self.count(shape)


@dataclass(frozen=True)
class Sparsity:
    """Single weights that a prune holds at zero: `hidden` of the `entries` of `modules`, as they were then."""

    pattern: str
    modules: tuple[str, ...]
    entries: int
    hidden: int
    over_others: bool = False
    """Some of them were hidden before: no run of a pattern then has more left than it allows, but fewer perhaps."""

    def left(self, shape: ModelShape) -> tuple[int, bool]:
        """How many are left in a model of `shape`, and whether that is exact: a later removal of units takes some of both."""
        entries = sum(out * into for _, out, into in shape.matrices(self.modules))
        return round(entries * (1 - self.hidden / self.entries)), entries == self.entries

    def row(self, dense: ModelShape, shape: ModelShape) -> tuple[str, str, str]:
        """(what, before, after) for the plan's table."""
        (left, exact), before = self.left(shape), sum(out * into for _, out, into in dense.matrices(self.modules))
        what = f"non-zeros of {', '.join(self.modules)} ({self.pattern})"
        doubt = "at most " if self.over_others else "" if exact else "about "
        return what, f"{before:,}", f"{doubt}{left:,} ({1 - self.hidden / self.entries:.1%} dense)"


@dataclass(frozen=True)
class Plan:
    """The account that `--dry-run` keeps while it walks the stages: nothing is trained, everything is closed form."""

    dense: ModelShape
    shape: ModelShape
    model: nn.Module
    """Weightless (meta), in the dense shapes: stages are applied to it, so that errors appear before training."""
    places: Places | None = None
    """Of the last select."""
    trainable: tuple[tuple[str, int], ...] = ()
    trained: tuple[Trained, ...] = ()
    """Every training stage whose deltas are there, which `recover: {method: same}` goes on with."""
    length: int = 128
    sparsity: tuple[Sparsity, ...] = ()
    """Of every prune of single weights; it makes nothing smaller."""
    tuned: ModelShape | None = None
    """As the first prune finds the model, its adapters and prefixes included: what a target is against."""

    @classmethod
    def start(cls, base_folder: Path, task) -> Plan:
        """The account of the dense model, before any stage."""
        model = hollow(base_folder, read_task(task).label_names, kind_of(task.kind).auto_class)
        shape = shape_of(model)
        return cls(shape, shape, model, length=task.max_length)

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, before, after) for the table."""
        dense, shape, length = self.dense, self.shape, self.length
        trainable = [
            (f"trainable in {stage} (head {self.dense.head:,} apart)", f"{dense.parameters:,}", f"{count:,}")
            for stage, count in self.trainable
        ]
        return [
            *trainable,
            ("parameters", f"{dense.parameters:,}", f"{shape.parameters:,}"),
            *([(f"of these {shape.inserted_kinds} (cannot be merged)", "0", f"{shape.inserted:,}")] if shape.inserted else []),
            *(one.row(dense, shape) for one in self.sparsity),
            ("stored weights, fp32", human_bytes(dense.bytes), human_bytes(shape.bytes)),
            (f"GFLOPs of a row of {length} tokens", f"{dense.flops(length) / 1e9:.3f}", f"{shape.flops(length) / 1e9:.3f}"),
        ]
