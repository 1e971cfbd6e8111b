"""Quantiles of latencies and the slope of a series, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
MOST_POINTS = 1000


def quantile(ordered: np.ndarray, share: float) -> float | None:
    """The smallest of the `ordered` values that at least `share` of them do not exceed; None where none lies above it, because
    too few values do not show that quantile."""
    rank = math.ceil(round(share * len(ordered), 9))
    return float(ordered[rank - 1]) if 0 < rank < len(ordered) else None


def tail(ordered: np.ndarray) -> float:
    """The 99 % quantile, or the maximum where too few values show it; 0 of none."""
    found = quantile(ordered, 0.99)
    return float(ordered[-1]) if found is None and len(ordered) else found or 0.0


def latency_figures(seconds: np.ndarray) -> dict[str, float | None]:
    """Mean, QUANTILES and maximum in milliseconds; None for what so few values do not show."""
    ordered = np.sort(seconds) * 1000
    if not len(ordered):
        return dict.fromkeys(("mean", *QUANTILES, "max"))
    figures = {name: quantile(ordered, share) for name, share in QUANTILES.items()}
    return {"mean": float(ordered.mean()), **figures, "max": float(ordered[-1])}


CURVE = (0.0, *(step / 20 for step in range(1, 19)), 0.925, 0.95, 0.975, 0.99, 0.995, 0.9975, 0.999)


def curve(seconds: np.ndarray) -> list[tuple[float, float]]:
    """(share, milliseconds that this share of the requests did not exceed), for drawing; without what so few do not show."""
    ordered = np.sort(seconds) * 1000
    points = [(share, quantile(ordered, share) if share else float(ordered[0])) for share in CURVE if len(ordered)]
    return [(share, value) for share, value in points if value is not None]


def slope(times: Sequence[float], values: Sequence[float]) -> float | None:
    """The median slope between all pairs of points (Theil-Sen), which single jumps do not move; None for under 4 points.

    Of more than MOST_POINTS it takes so many, at equal distances: memory grows with the square of their number."""
    if len(times) < 4:
        return None
    if len(times) > MOST_POINTS:
        kept = np.linspace(0, len(times) - 1, MOST_POINTS).round().astype(int)
        times, values = np.asarray(times)[kept], np.asarray(values)[kept]
    from scipy.stats import theilslopes  # imported here: slow

    return float(theilslopes(values, times).slope)
