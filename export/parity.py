"""Is it still the same function? Logits before and after each hop, compared on real rows, with a bound a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from compressor.errors import CheckError
from compressor.tasks.answers import rows_of
from compressor.tasks.classification import KIND as CLASSIFICATION
from compressor.tasks.features import Forward, answers_of
from compressor.tasks.kinds import Agreement, Kind

Batches = dict[str, np.ndarray]
"""Logits (answers, classes) of some rows in several batch compositions, by the name of the composition."""

RESAMPLES = 1000
MORE_ROWS = 128
"""Rows that are compared once more, in other batches."""
ROUNDING = 1e-5
"""|Δlogit| that is allowed there even where equal bits are asked for: PyTorch's kernels for one row, and so the last bits,
depend on where in memory the weights begin."""


@dataclass(frozen=True)
class Bound:
    """What a kind of hop may change. `difference` is the largest allowed |Δlogit|, times max(1, |logit|) when `relative`, or
    times the largest of those in its row when `of_row`: where every word is one product with one state, it rounds them alike.

    Where there is none, `metric_loss` is the most that the task metric may fall, and the kind of task says how far the outputs
    must agree (`Agreement.least`).
    """

    difference: float | None = None
    relative: bool = False
    of_row: bool = False
    metric_loss: float = 0.0


BOUNDS = {
    "removed": Bound(difference=1e-4),
    "merged": Bound(difference=0.0),
    "onnx": Bound(difference=1e-4, relative=True),
    "onnx, generated": Bound(difference=1e-4, relative=True, of_row=True),
    # behind random words some states are sums of large numbers that cancel: rounding moves their logits further
    "onnx on random tokens": Bound(difference=1e-3, relative=True, of_row=True),
    "removed, generated": Bound(difference=1e-4, relative=True, of_row=True),
    "merged, generated": Bound(difference=0.0, relative=True, of_row=True),
    "served": Bound(difference=1e-5),
    "int8": Bound(metric_loss=0.01),
    "fp16": Bound(difference=2e-2, relative=True),
    # bf16 has 3 bits less
    "bf16": Bound(difference=0.16, relative=True),
    "int8 on random rows": Bound(metric_loss=0.1),
    "int8 on random tokens": Bound(metric_loss=0.1),
    "int4 on random tokens": Bound(metric_loss=0.5),
}
"""Every hop's bound, in one table. Where logits are bounded, two logits closer than the bound may swap the label."""


def row_of(kind: str, task: Kind) -> str:
    """The row of the table for a kind of hop: one whose outputs are the words of a vocabulary has some of its own."""
    own = f"{kind}, generated"
    return own if task.generates and own in BOUNDS else kind


@dataclass(frozen=True)
class ParityResult:
    """One comparison. `worst_row` is the row with the largest excess over the bound; `metric_*` are the task metric,
    `agreement` is what the kind of task measures: the share of rows with the same label, or the concordance of numbers.

    `metric_interval` is the 95 % paired bootstrap interval of metric(candidate) - metric(reference). `batches` has the largest
    |Δlogit| of the rows that were compared in other batches, `agreement_in_batches` their agreement, `failed_batches` those of
    them beyond the bound.
    """

    hop: str
    kind: str
    rows: int
    max_difference: float
    mean_difference: float
    agreement: float
    metric_reference: float
    metric_candidate: float
    metric_interval: tuple[float, float]
    worst_row: int
    bound: str
    passed: bool
    batches: dict[str, float]
    agreement_in_batches: dict[str, float]
    failed_batches: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As it stands in an artifact's metadata."""
        return asdict(self)


def compare(
    hop: str,
    kind: str,
    reference: np.ndarray,
    candidate: np.ndarray,
    labels: np.ndarray,
    *,
    task: Kind = CLASSIFICATION,
    batches: tuple[Batches, Batches] = ({}, {}),
) -> ParityResult:
    """Compare outputs (answers, outputs) by the bound of the hop's `kind`, as `row_of` has it. Another shape or a NaN fails.

    `batches` are the same two models on some of the rows in other batches (`in_other_batches` of each): the same bound holds
    there, but for the metric; and an agreement may be less by what so few answers leave to chance.
    """
    kind = row_of(kind, task)
    bound, others = BOUNDS[kind], {name: (batches[0][name], theirs) for name, theirs in batches[1].items()}
    loose = replace(bound, difference=ROUNDING) if bound.difference == 0.0 else bound
    if reference.shape != candidate.shape or not len(reference):
        return _hopeless(hop, kind, labels, f"shape {reference.shape}, got {candidate.shape}")
    rows = rows_of(labels)
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        broken = ~(np.isfinite(reference) & np.isfinite(candidate)).all(axis=1)
        return _hopeless(hop, kind, labels, "finite logits", worst_row=int(rows[broken.argmax()]))
    reference, candidate = reference.astype(np.float64), candidate.astype(np.float64)
    difference = np.abs(candidate - reference)
    within = partial(_within, kind, task.agreement)
    (ours, known), (theirs, _) = (task.judged(outputs, labels) for outputs in (reference, candidate))
    before, after = (task.metric.value(found, known) for found in (ours, theirs))
    failed = tuple(name for name, pair in others.items() if not within(loose, *pair, some=True))
    # 1e-9: a loss of exactly one point must not fail by rounding
    kept = bound.difference is not None or before - after <= bound.metric_loss + 1e-9
    return ParityResult(
        hop=hop,
        kind=kind,
        rows=len(labels),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        agreement=task.agreement.measure(reference, candidate),
        metric_reference=before,
        metric_candidate=after,
        metric_interval=task.change(theirs, ours, known, resamples=RESAMPLES),
        worst_row=int(rows[(difference / _scale(bound, reference)).max(axis=1).argmax()]),
        bound=describe(bound, kind, task),
        passed=within(bound, reference, candidate) and kept and not failed,
        batches={name: float(np.abs(one - other).max()) for name, (one, other) in others.items()},
        agreement_in_batches={name: task.agreement.measure(*pair) for name, pair in others.items()},
        failed_batches=failed,
    )


def _scale(bound: Bound, reference: np.ndarray) -> np.ndarray | float:
    scale = np.maximum(1.0, np.abs(reference)) if bound.relative else 1.0
    return scale.max(axis=-1, keepdims=True) if bound.of_row else scale


def _within(
    kind: str, agreement: Agreement, bound: Bound, reference: np.ndarray, candidate: np.ndarray, *, some: bool = False
) -> bool:
    """Whether outputs keep the part of a bound that needs no labels; False for a NaN, too. `some`: of some of the rows."""
    if bound.difference is None:
        least = agreement.least[kind]
        least -= agreement.chance(least, len(reference)) if some else 0.0
        return bool(np.isfinite(candidate).all()) and agreement.measure(reference, candidate) >= least
    return bool((np.abs(candidate - reference) <= bound.difference * _scale(bound, reference)).all())


def in_other_batches(
    forward: Forward,
    rows: Sequence[dict[str, list[int]]],
    pad_id: int,
    most: int = 32,
    labels: np.ndarray | None = None,
) -> Batches:
    """A model on up to MORE_ROWS of `rows`, one at a time and in batches of `most` where short and long rows share one.

    The batches of `compressor.tasks.features.predict` have rows of similar length: they hardly see padding, and nothing there
    tells a graph that is right for one batch size alone, or that mixes the rows of a batch. `labels` as there.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
    chosen = [order[place] for place in np.linspace(0, len(order) - 1, min(MORE_ROWS, len(order))).astype(int)]
    groups = -(-len(chosen) // most)
    # every groups-th row of the sorted ones: each batch has all lengths
    mixed = [chosen[start::groups] for start in range(groups)]
    made = {"batch 1": [[row] for row in chosen], f"batch {most}, mixed lengths": mixed}
    # copied out of each pass before the next: outputs of all of them at once may not fit into memory
    return {
        name: np.concatenate([one.copy() for batch in each for one in answers_of(forward, rows, batch, pad_id, labels)])
        for name, each in made.items()
    }


def describe(bound: Bound, kind: str, task: Kind) -> str:
    """The bound of a hop's kind in words."""
    if bound.difference is None:
        agree = task.agreement
        return f"{agree.words} {agree.least[kind]:.0%}, metric falls by at most {100 * bound.metric_loss:.1f} points"
    if bound.difference == 0.0:
        return "equal bit for bit"
    scale = " x max(1, largest |logit| of the row)" if bound.of_row else " x max(1, |logit|)" if bound.relative else ""
    return f"|Δlogit| <= {bound.difference:g}{scale}"


def _hopeless(hop: str, kind: str, labels: np.ndarray, bound: str, worst_row: int = 0) -> ParityResult:
    """A comparison that cannot be made, which is a failed one."""
    infinite, none = float("inf"), (0.0, 0.0)
    figures = (infinite, infinite, 0.0, 0.0, 0.0, none)
    return ParityResult(hop, kind, len(labels), *figures, worst_row, bound, False, {}, {}, ())


def failure(result: ParityResult, suspect: str = "") -> CheckError:
    """E610 with the hop, the figures, the worst row and, where it is known, the layer that is suspected."""
    apart = "; ".join(
        f"{name}: |Δlogit| {result.batches[name]:.3g}, agreement {result.agreement_in_batches[name]:.1%}"
        for name in result.failed_batches
    )
    return CheckError(
        "E610",
        f"{result.hop}: not the same function (allowed: {result.bound}; found: |Δlogit| {result.max_difference:.3g}, "
        f"agreement {result.agreement:.1%}, metric {result.metric_reference:.4f} -> {result.metric_candidate:.4f}, "
        f"worst row {result.worst_row} of {result.rows}{'; ' + apart if apart else ''}"
        f"{'; suspected: ' + suspect if suspect else ''})",
        "Nothing was published; look at that row first",
    )


def require(result: ParityResult, suspect: Callable[[], str] = lambda: "") -> None:
    """Raises CheckError E610 when the comparison failed; only then `suspect` is asked which layer it may be."""
    if not result.passed:
        raise failure(result, suspect())
