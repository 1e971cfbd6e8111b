"""Closed-form estimate of a pipeline before it runs: what each stage would train, remove and keep.

A stage's `plan` takes a `Plan` and gives the next one; `compress run --dry-run` shows that of the last stage that runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.cost import ModelShape, human_bytes, shape_of, share
from compressor.methods import Options, method
from compressor.methods.selective import sizes
from compressor.models.build import GENERATIVE, auto_class_of, weightless_model
from compressor.models.modules import STRUCTURES
from compressor.pruning_criteria import Hides
from compressor.tasks.reading import check_data
from compressor.tasks.task_kind import kind_of

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Places:
    """Size of the support Ω that a select stage chooses: `count` per matrix, layer or model, or a fraction. Closed form.

    `ground` are the options that determine in which tensors Ω lies: `on`, and the options that go with it.
    """

    ground: Options
    scope: str = "matrix"
    count: int | None = None
    ratio: float | None = None

    def total(self, shape: ModelShape) -> int:
        """|Ω| in a model of `shape`, exact in each scope."""
        return sum(self.of(size) for size in self.scopes(shape))

    def scopes(self, shape: ModelShape) -> list[int]:
        """Number of entries in each scope (each matrix, each layer, or the whole model) that has any: not every layer needs to
        have the modules."""
        if self.scope == "global":
            return [sum(sizes(shape, self.ground))]
        layers = [sizes(replace(shape, layers=(layer,)), self.ground) for layer in shape.layers]
        found = [size for layer in layers for size in layer] if self.scope == "matrix" else map(sum, layers)
        return [size for size in found if size]

    def of(self, size: int) -> int:
        """Number of entries chosen among `size`."""
        return share(self.ratio if self.count is None else self.count, size)


@dataclass(frozen=True)
class Trained:
    """What a training stage trains: a method's options, and the support Ω for methods that use one."""

    method: str
    options: Options
    places: Places | None = None
    before: ModelShape | None = None
    """The model in which it is trained, without what it adds; None: of the shape that is asked about."""

    def count(self, shape: ModelShape) -> int:
        """Number of trainable parameters in a model of `shape`, in closed form, without the task head."""
        row = method(self.method)
        return row.count(shape, self.options, self.places.total(shape) if row.uses_omega and self.places else 0)

    def kept(self, shape: ModelShape) -> int:
        """Number of those parameters that remain after training."""
        row = method(self.method)
        return (row.kept(shape, self.options) if row.kept else 0) or self.count(shape)

    def continued(self, shape: ModelShape, uneven: Collection[str]) -> int:
        """Number of those that a later stage can train further; the most where only the run decides how many units of the
        `uneven` structures each block keeps."""
        row = method(self.method)
        if row.continued is None:
            return self.kept(shape)
        spans = [STRUCTURES[name] for name in uneven]
        modules = {module for span in spans for module in (*span.rows, span.columns)}
        return row.continued(shape, self.options, self.before or shape, modules)


@dataclass(frozen=True)
class Sparsity:
    """Weights that a prune sets to zero: `hidden` of the `entries` that `modules` had at that time."""

    pattern: str
    modules: tuple[str, ...]
    entries: int
    hidden: int
    over_others: bool = False
    """Some weights were masked by an earlier prune: a group of an n:m pattern then keeps n weights at most, possibly fewer."""
    hides: Hides = "both"
    parts: tuple[tuple[frozenset[str], int], ...] = ()
    """Groups of matrices ("query 0" is that of the first block with one), and how many of the weights of each are zero."""

    def nonzeros(self, shape: ModelShape) -> tuple[int, bool]:
        """Number of weights left in a model of `shape`, and whether it is exact: removing units later can take pruned ones."""
        entries = sum(rows * columns for _, rows, columns in shape.matrices(self.modules))
        return round(entries * (1 - self.hidden / self.entries)), entries == self.entries

    def row(self, dense: ModelShape, shape: ModelShape) -> tuple[str, str, str]:
        """Row of the plan's table: (quantity, before, after)."""
        before = sum(rows * columns for _, rows, columns in dense.matrices(self.modules))
        nonzeros, exact = self.nonzeros(shape)
        quantity = f"non-zeros of {', '.join(self.modules)} ({self.pattern}{', of W alone' if self.hides == 'weight' else ''})"
        doubt = "at most " if self.over_others else "" if exact else "about "
        return quantity, f"{before:,}", f"{doubt}{nonzeros:,} ({1 - self.hidden / self.entries:.1%} dense)"


@dataclass(frozen=True)
class Plan:
    """Running estimate of `--dry-run`, updated stage by stage: nothing is trained, every figure is in closed form."""

    dense: ModelShape
    shape: ModelShape
    model: nn.Module
    """Weightless (meta), in the dense shapes: stages are applied to it, so that errors appear before training."""
    places: Places | None = None
    """Size of the Ω of the last select."""
    trainable: tuple[tuple[str, int], ...] = ()
    trained: tuple[Trained, ...] = ()
    """The training stages whose deltas are attached, which `recover: {method: same}` continues to train."""
    length: int = 128
    sparsity: tuple[Sparsity, ...] = ()
    """One for every prune of single weights; these do not change shapes."""
    tuned: ModelShape | None = None
    """The model before the first prune, with its adapters and prefixes: the dense model that a target is relative to."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Of structures of which only the run decides how many units each layer keeps: a number of which that is a multiple."""
    train_rows: int | None = None
    """Number of the task's training rows; None for several tasks."""

    @classmethod
    def start(cls, base_folder: Path, task) -> Plan:
        """Plan of the dense model, before any stage."""
        names, rows = check_data(task)
        model = weightless_model(base_folder, names, kind_of(task.kind).auto_class)
        shape = shape_of(model)
        return cls(shape, shape, model, length=task.max_length, train_rows=rows)

    @property
    def generates(self) -> bool:
        """Whether its model writes texts."""
        return auto_class_of(self.model) in GENERATIVE

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of the plan's table: (quantity, before, after)."""
        dense, shape, length = self.dense, self.shape, self.length
        trainable = [
            (f"trainable in {stage} (head {self.dense.head:,} apart)", f"{dense.parameters:,}", f"{count:,}")
            for stage, count in self.trainable
        ]
        return [
            *trainable,
            ("parameters", f"{dense.parameters:,}", f"{shape.parameters:,}"),
            *([(f"of these {shape.inserted_kinds} (cannot be merged)", "0", f"{shape.inserted:,}")] if shape.inserted else []),
            *(sparsity.row(dense, shape) for sparsity in self.sparsity),
            ("stored weights, fp32", human_bytes(dense.bytes), human_bytes(shape.bytes)),
            (f"GFLOPs of a row of {length} tokens", f"{dense.flops(length) / 1e9:.3f}", f"{shape.flops(length) / 1e9:.3f}"),
        ]
