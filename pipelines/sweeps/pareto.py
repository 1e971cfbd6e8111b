"""Quality against cost: which settings no other one beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reporting.figures import COMPRESSED, DENSE, Figure, layout, whisker
from pipelines.sweeps.sweep_summary import Setting, Spread, SweepResult


def figures_of(result: SweepResult) -> list[Figure]:
    """One Pareto plot for every cost in which settings differ, for every main metric of the last stage, every task that is
    compared, and every value of a key that changes the cost and not the model whose quality it is."""
    last = [spread for spread in _of_the_last_stage(result) if spread.metric == result.mains.get(spread.setting)]
    figures: list[Figure] = []
    for cost, costs in result.costs.items():
        apart = (*result.tasks, *(place for place in result.same_model if _changes(costs, place)))
        columns: dict[tuple[str, ...], dict[Setting, Spread]] = {}
        for spread in last:
            columns.setdefault(_column(spread, apart), {})[spread.setting] = spread
        for (_, *values), quality in columns.items():
            known = {setting: value for setting, value in costs.items() if setting in quality}
            if len(set(known.values())) > 1:
                title = f"Quality against {cost}{': ' if values else ''}{', '.join(values)}"
                falls = not result.falling.isdisjoint(quality)
                figures.append(_figure(f"pareto-{len(figures) + 1}", title, cost, known, quality, falls))
    return figures


def _of_the_last_stage(result: SweepResult) -> list[Spread]:
    return [spread for spread in result.spreads if spread.mean is not None and spread.stage == result.spreads[-1].stage]


def _column(spread: Spread, apart: Sequence[int]) -> tuple[str, ...]:
    """What the qualities of one plot have in common: their metric, and the values of the keys at the places `apart`."""
    return spread.metric, *(spread.setting[place] for place in apart)


def _changes(costs: Mapping[Setting, float], place: int) -> bool:
    """Whether a cost differs between settings that differ in the key at a place alone."""
    found: dict[tuple[Setting, Setting], set[float]] = {}
    for setting, value in costs.items():
        found.setdefault((setting[:place], setting[place + 1 :]), set()).add(value)
    return any(len(values) > 1 for values in found.values())


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
    repeated = any(quality[setting].std is not None for setting in costs)
    whiskers = " (whiskers: standard deviation over the runs)" if repeated else ""
    caption = (
        f"Mean {metric} after {stage}{whiskers} against {cost}: left and {good} is good. "
        "The line joins the settings that no other one beats in both."
    )
    return Figure(name, title, caption, data, layout(400, **axes) | {"showlegend": True}, wide=True)


def _trace(
    name: str, settings: list[Setting], costs: Mapping[Setting, float], quality: Mapping[Setting, Spread], look: dict[str, Any]
) -> dict[str, Any]:
    spreads = [quality[setting].std for setting in settings]
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
