"""Every bound of the parity checks, in one table: what each conversion, precision and kind of task may change, and why.

export/parity/compare.py applies them. The measurements behind them are in docs/results/gate.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compressor.arguments import require_one_of

if TYPE_CHECKING:
    from compressor.tasks.task_kind import TaskKind

GENERATED = ", generated"
"""Suffix of the rows for models whose outputs are logits over a vocabulary."""
ROUNDING_FACTOR = 1.35
"""How much more outputs may change than by rounding. Correct files change .5 (OpenVINO) to 1.15 times as much; a matrix with a
scale wrong by a quarter .9 to 7 times, 4-bit weights 2.2 to 8 times (docs/results/gate.md)."""
NUMBERS = {"regression": 0.99}
"""Concordance of numbers, which have any scale: the mean in place of each is within .16 of labels from 0 to .3, and within 2 %
of labels from 36 to 37."""


@dataclass(frozen=True)
class Bound:
    """Bound of a kind of conversion. `difference` is the largest allowed |Δlogit|, times max(1, |logit|) when `relative`, or
    times the largest of those in its row when `of_row`: logits over a vocabulary are products with one hidden state, so they
    have similar rounding errors. `agreement` is the required agreement by kind of task
    (`compressor.tasks.task_kind.Agreement.measure`), beside a `difference` or without. Without a `difference`, `metric_loss` is
    the largest loss of the task's metric that may be shown (a share, or nats a token), and `rounding` the largest change of the
    outputs, as a multiple of the change by rounding to the precision in PyTorch. Outputs of static int8 may always change by
    `static` of their standard deviation.
    """

    difference: float | None = None
    relative: bool = False
    of_row: bool = False
    metric_loss: float = 0.0
    agreement: Mapping[str, float] = field(default_factory=dict)
    rounding: float = ROUNDING_FACTOR
    static: float = 0.0


BOUNDS = {
    # PyTorch, pruned against masked: the same sums in another order. On a GPU, whose kernels change with the shape, a logit of
    # twelve layers moved by 1.2e-4 (docs/results/papers_dsee_table6_mpnet.md)
    "removed": Bound(difference=1e-4, relative=True, agreement=NUMBERS),
    "removed, generated": Bound(difference=1e-4, relative=True, of_row=True),
    # PyTorch, merged against unmerged: the computed weight itself is kept
    "merged": Bound(difference=0.0),
    "merged, generated": Bound(difference=0.0, relative=True, of_row=True),
    # a file in fp32: other kernels and fused operators sum in another order
    "fp32": Bound(difference=1e-4, relative=True, agreement=NUMBERS),
    "fp32, generated": Bound(difference=1e-4, relative=True, of_row=True),
    # behind random words some states are sums of large numbers that cancel: rounding moves their logits further
    "fp32 on random tokens": Bound(difference=1e-3, relative=True, of_row=True),
    # the same file in the same runtime, through the server
    "served": Bound(difference=1e-5, agreement=NUMBERS),
    # on a GPU, where the kernel of a product may be another one: half of what the precision may change
    "served, fp16": Bound(difference=1e-2, relative=True, agreement=NUMBERS),
    "served, bf16": Bound(difference=0.08, relative=True, agreement=NUMBERS),
    # 10 bits of mantissa
    "fp16": Bound(difference=2e-2, relative=True, agreement=NUMBERS),
    # bf16 has 3 bits less
    "bf16": Bound(difference=0.16, relative=True, agreement=NUMBERS),
    # int8: no single difference is bounded, but a loss of one point of the metric, and flips beyond those of rounding. Tags
    # and numbers agree more closely than labels, because most are far from flipping. A twentieth of the spread (static) flips
    # about 1.6 % of the labels, and rounding to int8 itself .5 to 2 %
    "int8": Bound(
        metric_loss=0.01,
        static=0.05,
        agreement={
            **NUMBERS,
            "classification": 0.97,
            "tokens": 0.98,
            "multilabel": 0.98,
            "spans": 0.99,
            "choices": 0.97,
            "marked": 0.97,
        },
    ),
    # nats a token: 5 % of the perplexity. A likelihood of .2 % cannot fall by a point
    "int8, generated": Bound(metric_loss=0.05, agreement={"generation": 0.9, "text2text": 0.9}),
    # random text has no correct labels: predictions flip more easily there, and there is no metric
    "int8 on random rows": Bound(metric_loss=0.1, agreement={"classification": 0.9, "regression": 0.9, "multilabel": 0.9}),
    "int8 on random tokens": Bound(metric_loss=0.1, agreement={"classification": 0.9}),
    "int4 on random tokens": Bound(metric_loss=0.5, agreement={"classification": 0.5}),
}
"""Bound of every kind of parity check. Where logits are bounded, two logits closer than the bound may swap the label."""

ROUNDING_SHARE = 0.05
"""Share of a bounded difference that rounding alone takes, even of a model that predicts almost the same number for every row,
of which no agreement is asked then. bf16: .001 of a bound of .16, where MiniLM's numbers varied by .0016."""
BIT_EXACT_TOLERANCE = 1e-5
"""|Δlogit| that is allowed in other batches even where equal bits are required: the last bits of PyTorch's kernels for one row
depend on where in memory the weights begin."""
METRIC_DRIFT = 0.005
"""Largest difference of a metric from the recorded one in `compress verify`: another processor may flip a borderline row."""
LEAST_UNLABELLED_ROWS = 800
"""Rows of the checks that need no labels: if there are fewer validation rows, training rows are added."""
ACCURACY_BUDGET = 0.5
"""Points of the metric that `precision: auto` may lose by default: half of the bound of int8."""
SUSPECT_SHARE = 0.1
"""A block is suspected if its difference is at least this share of the largest; rounding before the fault is far below it."""
BLOCKS_AGREE = 1e-4
"""Differences (of a block's output, over its standard deviation) up to this are rounding; if all blocks are below it, the
fault is after the last block."""
MATRIX_DIFFERS = 1e-5
"""The same for a matrix in the first block that differs, where less rounding has accumulated."""


def row_of(kind: str, task: TaskKind) -> str:
    """The key of a kind of conversion in BOUNDS: for generative tasks some kinds have a separate bound. Raises ValueError for
    another kind."""
    require_one_of("kind", kind, BOUNDS)
    generated = f"{kind}{GENERATED}"
    return generated if task.generates and generated in BOUNDS else kind


def kind_on(precision: str, sample: str) -> str:
    """The kind of check for a file of a precision that is compared on a `sample`: "random rows" or "random tokens"."""
    kind = f"{precision} on {sample}"
    return kind if kind in BOUNDS else precision
