"""Every bound of the parity checks, in one table: what each hop, precision and kind of task may change, and why.

Changing a bound is changing a line here; export/parity/compare.py applies them. Measured reasons stand in docs/results/gate.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressor.tasks.task_kind import TaskKind

GENERATED = ", generated"
"""Ends the rows of the table for models whose outputs are the words of a vocabulary."""
ROUNDING_FACTOR = 1.35
"""How much further than by rounding outputs may move. Sound files move .5 (OpenVINO) to 1.15 times as far; where a matrix's
scale is wrong by a quarter .9 to 7 times, 4 bits 3 to 11 times (docs/results/gate.md)."""


@dataclass(frozen=True)
class Bound:
    """Bound of a kind of conversion. `difference` is the largest allowed |Δlogit|, times max(1, |logit|) when `relative`, or
    times the largest of those in its row when `of_row`: where every word is one product with one state, it rounds them alike.

    Where there is none, `metric_loss` is the most that the task's metric may be shown to fall (a share, or nats a token),
    `agreement` how far the outputs must agree, by kind of task (`compressor.tasks.task_kind.Agreement.measure`), and
    `rounding` the most that outputs may move, as a multiple of what rounding to the precision moves them in PyTorch. Outputs
    of static int8 may move by `static` of their spread in any case.
    """

    difference: float | None = None
    relative: bool = False
    of_row: bool = False
    metric_loss: float = 0.0
    agreement: Mapping[str, float] = field(default_factory=dict)
    rounding: float = ROUNDING_FACTOR
    static: float = 0.0


BOUNDS = {
    # PyTorch, pruned against masked: the same sums in another order
    "removed": Bound(difference=1e-4),
    "removed, generated": Bound(difference=1e-4, relative=True, of_row=True),
    # PyTorch, merged against unmerged: the computed weight itself is kept
    "merged": Bound(difference=0.0),
    "merged, generated": Bound(difference=0.0, relative=True, of_row=True),
    # a file in fp32: other kernels and fused operators sum in another order
    "fp32": Bound(difference=1e-4, relative=True),
    "fp32, generated": Bound(difference=1e-4, relative=True, of_row=True),
    # behind random words some states are sums of large numbers that cancel: rounding moves their logits further
    "fp32 on random tokens": Bound(difference=1e-3, relative=True, of_row=True),
    # the same file in the same runtime, through the server
    "served": Bound(difference=1e-5),
    # 10 bits of mantissa
    "fp16": Bound(difference=2e-2, relative=True),
    # bf16 has 3 bits less
    "bf16": Bound(difference=0.16, relative=True),
    # no difference of int8 is bounded: a point of the metric, and what rounding alone turns. Tags and numbers agree closer than
    # labels, because most of them are far from turning. A twentieth of the spread (static) turns about 1.6 % of the labels, and
    # rounding to int8 itself .5 to 2 %
    "int8": Bound(metric_loss=0.01, static=0.05, agreement={"classification": 0.97, "regression": 0.99, "tokens": 0.98}),
    # nats a token: 5 % of the perplexity. A likelihood of .2 % cannot fall by a point
    "int8, generated": Bound(metric_loss=0.05, agreement={"generation": 0.9}),
    # random text has no right answers: labels turn more easily there, and nothing is known of the metric
    "int8 on random rows": Bound(metric_loss=0.1, agreement={"classification": 0.9, "regression": 0.9}),
    "int8 on random tokens": Bound(metric_loss=0.1, agreement={"classification": 0.9}),
    "int4 on random tokens": Bound(metric_loss=0.5, agreement={"classification": 0.5}),
}
"""Every hop's bound, by the kind of hop. Where logits are bounded, two logits closer than the bound may swap the label."""

BIT_EXACT_TOLERANCE = 1e-5
"""|Δlogit| that is allowed in other batches even where equal bits are required: PyTorch's kernels for one row, and so the last
bits, depend on where in memory the weights begin."""
METRIC_DRIFT = 0.005
"""Most that a metric may differ from the recorded one in `compress verify`: another processor may turn a row on the edge."""
LEAST_UNLABELLED_ROWS = 800
"""Rows of the checks that need no labels: where there are fewer validation rows, training rows join them."""
ACCURACY_BUDGET = 0.5
"""Points of the metric that `precision: auto` may lose by default: half of what int8 is refused for."""
SUSPECT_SHARE = 0.1
"""A block is suspected when its difference is this share of the largest; rounding before the fault is far below it."""
BLOCKS_AGREE = 1e-4
"""Differences (of a block's output, over its spread) that are rounding: the fault is then behind the last block."""
MATRIX_DIFFERS = 1e-5
"""The same of a matrix in the first block that differs, where little has been summed before it."""


def row_of(kind: str, task: TaskKind) -> str:
    """The key of a kind of conversion in BOUNDS: for generative tasks some kinds have a separate bound."""
    generated = f"{kind}{GENERATED}"
    return generated if task.generates and generated in BOUNDS else kind


def kind_on(precision: str, sample: str) -> str:
    """The kind of hop of a file of a precision that is compared on a `sample`: "random rows" or "random tokens"."""
    kind = f"{precision} on {sample}"
    return kind if kind in BOUNDS else precision
