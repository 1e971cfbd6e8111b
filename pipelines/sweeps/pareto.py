"""Quality against cost: which settings no other one beats in both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipelines.reporting.figures import COMPRESSED, DENSE, Figure, layout, whisker
from pipelines.sweeps.sweep_summary import Setting, Spread, SweepResult


def figures_of(result: SweepResult) -> list[Figure]:
    """One Pareto plot for every cost in which settings differ, and for every main metric of the last stage and every task
    that is compared."""
    last = [spread for spread in _of_the_last_stage(result) if spread.metric == result.mains.get(spread.setting)]
    columns = dict.fromkeys(_column(result, spread) for spread in last)
    figures: list[Figure] = []
    for (cost, costs), column in itertools.product(result.costs.items(), columns):
        quality = {spread.setting: spread for spread in last if _column(result, spread) == column}
        known = {setting: value for setting, value in costs.items() if setting in quality}
        if len(set(known.values())) > 1:
            _, *task = column
            title = f"Quality against {cost}{': ' if task else ''}{', '.join(task)}"
            figures.append(
                _figure(f"pareto-{len(figures) + 1}", title, cost, known, quality, not result.falling.isdisjoint(quality))
            )
    return figures


def _of_the_last_stage(result: SweepResult) -> list[Spread]:
    return [spread for spread in result.spreads if spread.mean is not None and spread.stage == result.spreads[-1].stage]


def _column(result: SweepResult, spread: Spread) -> tuple[str, ...]:
    """What the qualities of one plot have in common: their metric, and what decides the task."""
    return spread.metric, *(spread.setting[place] for place in result.tasks)


def front(costs: Mapping[Setting, float], quality: Mapping[Setting, float]) -> list[Setting]:
    """The settings that no other one beats: none is as good at a lower cost, or better at the same; by rising cost."""
    best: list[Setting] = []
    for setting in sorted(costs, key=lambda name: (costs[name], -quality[name])):
        alike = best and (costs[setting], quality[setting]) == (costs[best[-1]], quality[best[-1]])
        if not best or alike or quality[setting] > quality[best[-1]]:
            best.append(setting)
    return best


def _figure(
    name: str, title: str, cost: str, costs: Mapping[Setting, float], quality: Mapping[Setting, Spread], falls: bool
) -> Figure:
    means = {setting: quality[setting].mean or 0.0 for setting in costs}
    best = front(costs, {setting: -mean if falls else mean for setting, mean in means.items()})
    beaten = [setting for setting in costs if setting not in best]
    stage, metric = next((spread.stage, spread.metric) for spread in quality.values())
    data = [
        _trace("on the front", best, costs, quality, {"mode": "lines+markers", "line": {"color": COMPRESSED, "width": 1.5}}),
        _trace("beaten", beaten, costs, quality, {"mode": "markers", "marker": {"color": DENSE, "size": 9}}),
    ]
    axes = {"xaxis": {"title": {"text": cost}}, "yaxis": {"title": {"text": f"{metric} after {stage}"}}}
    good = "low" if falls else "high"
    caption = (
        f"Mean {metric} after {stage} (whiskers: standard deviation over the runs) against {cost}: left and {good} is good. "
        "The line joins the settings that no other one beats in both."
    )
    return Figure(name, title, caption, data, layout(400, **axes) | {"showlegend": True}, wide=True)


def _trace(
    name: str, settings: list[Setting], costs: Mapping[Setting, float], quality: Mapping[Setting, Spread], look: dict[str, Any]
) -> dict[str, Any]:
    spreads = [quality[setting].std or 0.0 for setting in settings]
    return {
        "type": "scatter",
        "name": name,
        "x": [costs[setting] for setting in settings],
        "y": [quality[setting].mean for setting in settings],
        "text": [", ".join(setting) for setting in settings],
        "hovertemplate": "%{text}: %{y:.4f}",
        "marker": {"color": COMPRESSED, "size": 11},
        **look,
        **whisker(spreads, spreads),
    }
