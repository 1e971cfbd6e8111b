"""Is it still the same function? Logits before and after each hop, compared on real rows, with a bound a kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compressor.errors import CheckError
from compressor.tasks.metrics import accuracy

Metric = Callable[[np.ndarray, np.ndarray], float]


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
}
"""Every hop's bound, in one table. Where logits are bounded, two logits closer than the bound may swap the label."""


@dataclass(frozen=True)
class ParityResult:
    """One comparison. `worst_row` is the row with the largest excess over the bound; `metric_*` are the task metric."""

    hop: str
    kind: str
    rows: int
    max_difference: float
    mean_difference: float
    agreement: float
    metric_reference: float
    metric_candidate: float
    worst_row: int
    bound: str
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """As it stands in an artifact's metadata."""
        return asdict(self)


def compare(
    hop: str, kind: str, reference: np.ndarray, candidate: np.ndarray, labels: np.ndarray, *, metric: Metric = accuracy
) -> ParityResult:
    """Compare logits (rows, classes) by the bound of `kind`. A shape that differs or a NaN fails, whatever the bound."""
    bound = BOUNDS[kind]
    if reference.shape != candidate.shape or not len(reference):
        return _hopeless(hop, kind, reference, f"shape {reference.shape}, got {candidate.shape}")
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        broken = ~(np.isfinite(reference) & np.isfinite(candidate)).all(axis=1)
        return _hopeless(hop, kind, reference, "finite logits", worst_row=int(broken.argmax()))
    reference, candidate = reference.astype(np.float64), candidate.astype(np.float64)
    difference = np.abs(candidate - reference)
    scale = np.maximum(1.0, np.abs(reference)) if bound.relative else 1.0
    same = reference.argmax(axis=1) == candidate.argmax(axis=1)
    before, after = metric(reference, labels), metric(candidate, labels)
    if bound.difference is None:
        # 1e-9: a loss of exactly one point must not fail by rounding
        passed = same.mean() >= bound.agreement and before - after <= bound.metric_loss + 1e-9
    else:
        passed = bool((difference <= bound.difference * scale).all())
    return ParityResult(
        hop=hop,
        kind=kind,
        rows=len(reference),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        agreement=float(same.mean()),
        metric_reference=before,
        metric_candidate=after,
        worst_row=int((difference / scale).max(axis=1).argmax()),
        bound=describe(bound),
        passed=bool(passed),
    )


def describe(bound: Bound) -> str:
    """A bound in words."""
    if bound.difference is None:
        return f"labels agree on {bound.agreement:.0%}, metric falls by at most {100 * bound.metric_loss:.1f} points"
    if bound.difference == 0.0:
        return "equal bit for bit"
    return f"|Δlogit| <= {bound.difference:g}" + (" x max(1, |logit|)" if bound.relative else "")


def _hopeless(hop: str, kind: str, reference: np.ndarray, bound: str, worst_row: int = 0) -> ParityResult:
    """A comparison that cannot be made, which is a failed one."""
    infinite = float("inf")
    return ParityResult(hop, kind, len(reference), infinite, infinite, 0.0, 0.0, 0.0, worst_row, bound, passed=False)


def require(result: ParityResult) -> None:
    """Raises CheckError E610 with the hop, the figures and the worst row when the comparison failed."""
    if result.passed:
        return
    raise CheckError(
        "E610",
        f"{result.hop}: not the same function (allowed: {result.bound}; found: |Δlogit| {result.max_difference:.3g}, "
        f"labels agree on {result.agreement:.1%}, metric {result.metric_reference:.4f} -> {result.metric_candidate:.4f}, "
        f"worst row {result.worst_row} of {result.rows})",
        "Nothing was published; look at that row first",
    )
