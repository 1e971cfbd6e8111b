"""Is it still the same function? Logits before and after each hop, compared on real rows, with a bound a kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from compressor.errors import CheckError
from compressor.tasks.features import Forward, pad
from compressor.tasks.metrics import accuracy

Metric = Callable[[np.ndarray, np.ndarray], float]
Batches = dict[str, np.ndarray]
"""Logits (rows, classes) of some rows in several batch compositions, by the name of the composition."""

RESAMPLES = 1000
MORE_ROWS = 128
"""Rows that are compared once more, in other batches."""
ROUNDING = 1e-5
"""|Δlogit| that is allowed there even where equal bits are asked for: PyTorch's kernels for one row, and so the last bits,
depend on where in memory the weights begin."""


@dataclass(frozen=True)
class Bound:
    """What a kind of hop may change. `difference` is the largest allowed |Δlogit|, times max(1, |logit|) when `relative`.

    `agreement` is the least share of rows with the same label, `metric_loss` the most that the task metric may fall.
    """

    difference: float | None = None
    relative: bool = False
    agreement: float = 1.0
    metric_loss: float = 0.0


BOUNDS = {
    "removed": Bound(difference=1e-4),
    "merged": Bound(difference=0.0),
    "onnx": Bound(difference=1e-4, relative=True),
    "served": Bound(difference=1e-5),
    "int8": Bound(agreement=0.97, metric_loss=0.01),
    "fp16": Bound(difference=2e-2, relative=True),
    # bf16 has 3 bits less
    "bf16": Bound(difference=0.16, relative=True),
    # random rows lie where a classifier is unsure: this finds what is broken, and proves no quality
    "int8 on random rows": Bound(agreement=0.9, metric_loss=0.1),
}
"""Every hop's bound, in one table. Where logits are bounded, two logits closer than the bound may swap the label."""


@dataclass(frozen=True)
class ParityResult:
    """One comparison. `worst_row` is the row with the largest excess over the bound; `metric_*` are the task metric.

    `metric_interval` is the 95 % paired bootstrap interval of metric(candidate) - metric(reference). `batches` has the largest
    |Δlogit| of the rows that were compared in other batches, `failed_batches` those of them beyond the bound.
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
    metric: Metric = accuracy,
    batches: tuple[Batches, Batches] = ({}, {}),
) -> ParityResult:
    """Compare logits (rows, classes) by the bound of `kind`. A shape that differs or a NaN fails, whatever the bound.

    `batches` are the same two models on some of the rows in other batches (`in_other_batches` of each): the same bound holds
    there, but for the metric.
    """
    bound, others = BOUNDS[kind], {name: (batches[0][name], theirs) for name, theirs in batches[1].items()}
    loose = replace(bound, difference=ROUNDING) if bound.difference == 0.0 else bound
    if reference.shape != candidate.shape or not len(reference):
        return _hopeless(hop, kind, reference, f"shape {reference.shape}, got {candidate.shape}")
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        broken = ~(np.isfinite(reference) & np.isfinite(candidate)).all(axis=1)
        return _hopeless(hop, kind, reference, "finite logits", worst_row=int(broken.argmax()))
    reference, candidate = reference.astype(np.float64), candidate.astype(np.float64)
    difference = np.abs(candidate - reference)
    before, after = metric(reference, labels), metric(candidate, labels)
    failed = tuple(name for name, pair in others.items() if not _within(loose, *pair))
    # 1e-9: a loss of exactly one point must not fail by rounding
    kept = bound.difference is not None or before - after <= bound.metric_loss + 1e-9
    return ParityResult(
        hop=hop,
        kind=kind,
        rows=len(reference),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        agreement=_agreement(reference, candidate),
        metric_reference=before,
        metric_candidate=after,
        metric_interval=paired_interval(metric, reference, candidate, labels),
        worst_row=int((difference / _scale(bound, reference)).max(axis=1).argmax()),
        bound=describe(bound),
        passed=_within(bound, reference, candidate) and kept and not failed,
        batches={name: float(np.abs(one - other).max()) for name, (one, other) in others.items()},
        failed_batches=failed,
    )


def _scale(bound: Bound, reference: np.ndarray) -> np.ndarray | float:
    return np.maximum(1.0, np.abs(reference)) if bound.relative else 1.0


def _agreement(reference: np.ndarray, candidate: np.ndarray) -> float:
    return float((reference.argmax(axis=1) == candidate.argmax(axis=1)).mean())


def _within(bound: Bound, reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether logits keep the part of a bound that needs no labels; False for a NaN, too."""
    if bound.difference is None:
        return bool(np.isfinite(candidate).all()) and _agreement(reference, candidate) >= bound.agreement
    return bool((np.abs(candidate - reference) <= bound.difference * _scale(bound, reference)).all())


def paired_interval(
    metric: Metric, reference: np.ndarray, candidate: np.ndarray, labels: np.ndarray, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of metric(candidate) - metric(reference), both judged on the same draws of rows."""
    if np.array_equal(reference, candidate):
        return 0.0, 0.0
    draws = np.random.default_rng(seed).integers(0, len(labels), size=(RESAMPLES, len(labels)))
    changes = [metric(candidate[rows], labels[rows]) - metric(reference[rows], labels[rows]) for rows in draws]
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high)


def in_other_batches(forward: Forward, rows: Sequence[dict[str, list[int]]], pad_id: int, most: int = 32) -> Batches:
    """A model on up to MORE_ROWS of `rows`, one at a time and in batches of `most` where short and long rows share one.

    The batches of `compressor.tasks.features.predict` have rows of similar length: they hardly see padding, and nothing there
    tells a graph that is right for one batch size alone, or that mixes the rows of a batch.
    """
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
    chosen = [rows[order[place]] for place in np.linspace(0, len(order) - 1, min(MORE_ROWS, len(order))).astype(int)]
    groups = -(-len(chosen) // most)
    # every groups-th row of the sorted ones: each batch has all lengths
    mixed = [chosen[start::groups] for start in range(groups)]
    made = {"batch 1": [[row] for row in chosen], f"batch {most}, mixed lengths": mixed}
    return {name: np.concatenate([forward(pad(list(batch), pad_id)) for batch in each]) for name, each in made.items()}


def describe(bound: Bound) -> str:
    """A bound in words."""
    if bound.difference is None:
        return f"labels agree on {bound.agreement:.0%}, metric falls by at most {100 * bound.metric_loss:.1f} points"
    if bound.difference == 0.0:
        return "equal bit for bit"
    return f"|Δlogit| <= {bound.difference:g}" + (" x max(1, |logit|)" if bound.relative else "")


def _hopeless(hop: str, kind: str, reference: np.ndarray, bound: str, worst_row: int = 0) -> ParityResult:
    """A comparison that cannot be made, which is a failed one."""
    infinite, none = float("inf"), (0.0, 0.0)
    figures = (infinite, infinite, 0.0, 0.0, 0.0, none)
    return ParityResult(hop, kind, len(reference), *figures, worst_row, bound, False, {}, ())


def failure(result: ParityResult, suspect: str = "") -> CheckError:
    """E610 with the hop, the figures, the worst row and, where it is known, the layer that is suspected."""
    apart = "; ".join(f"{name}: |Δlogit| {result.batches[name]:.3g}" for name in result.failed_batches)
    return CheckError(
        "E610",
        f"{result.hop}: not the same function (allowed: {result.bound}; found: |Δlogit| {result.max_difference:.3g}, "
        f"labels agree on {result.agreement:.1%}, metric {result.metric_reference:.4f} -> {result.metric_candidate:.4f}, "
        f"worst row {result.worst_row} of {result.rows}{'; ' + apart if apart else ''}"
        f"{'; suspected: ' + suspect if suspect else ''})",
        "Nothing was published; look at that row first",
    )


def require(result: ParityResult, suspect: Callable[[], str] = lambda: "") -> None:
    """Raises CheckError E610 when the comparison failed; only then `suspect` is asked which layer it may be."""
    if not result.passed:
        raise failure(result, suspect())
