"""A load test as one self-contained HTML page: its table and two figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from pipelines.loadtest.load_table import COLUMNS, level_rows, notes
from pipelines.reporting.figures import COMPRESSED, DENSE, Figure, layout
from pipelines.reporting.templates import templates

COLOURS = (COMPRESSED, "#d9822b", "#7a5cc4", DENSE, "#c2455e", "#3b7dd8")
Record = dict[str, Any]


def to_page(test: Record) -> str:
    """The page: plotly is inlined, no other file and no network access is needed."""
    figures = [asdict(curves(test["levels"])), asdict(served(test["levels"]))]
    return (
        templates(Path(__file__).parent)
        .get_template("load_page.html.j2")
        .render(
            test=test,
            columns=COLUMNS,
            rows=level_rows(test["levels"]),
            notes=notes(test),
            figures=figures,
            plotly_js=get_plotlyjs(),
        )
    )


def curves(levels: list[Record]) -> Figure:
    """Latency by percentile, one line a level; the axis widens towards 100 %."""
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": level["load"],
            "x": [1 / (1 - share) for share, _ in level["curve"]],
            "y": [milliseconds for _, milliseconds in level["curve"]],
            "text": [f"{100 * share:g} %" for share, _ in level["curve"]],
            "hovertemplate": "%{text}: %{y:.3g} ms",
            "line": {"color": COLOURS[number % len(COLOURS)], "width": 2},
        }
        for number, level in enumerate(levels)
    ]
    ticks = (0.0, 0.5, 0.9, 0.99, 0.999)
    axes = {
        "xaxis": {
            "type": "log",
            "tickvals": [1 / (1 - share) for share in ticks],
            "ticktext": [f"{100 * share:g} %" for share in ticks],
            "title": {"text": "share of the requests"},
        },
        "yaxis": {"type": "log", "title": {"text": "latency at most, ms"}},
    }
    caption = "Latency that a share of the requests did not exceed, counted from when each was due."
    return Figure("curves", "Latency by percentile", caption, data, layout(360, **axes) | {"showlegend": True})


def served(levels: list[Record]) -> Figure:
    """p99 latency against the throughput, one point a level."""
    data = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [level["throughput"] for level in levels],
            "y": [level["latency_ms"][name] for level in levels],
            "text": [level["load"] if name == "p50" else "" for level in levels],
            "textposition": "bottom center",
            "name": name,
            "marker": {"size": 11, "color": colour},
        }
        for name, colour in (("p50", COMPRESSED), ("p99", DENSE))
    ]
    axes = {
        "xaxis": {"title": {"text": "answers a second"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "latency, ms"}, "rangemode": "tozero"},
    }
    caption = "Latency against throughput, one pair of points for each load: right and low is good."
    return Figure("served", "Latency and throughput", caption, data, layout(360, **axes) | {"showlegend": True})
