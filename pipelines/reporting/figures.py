"""The report's figures as plain plotly descriptions, styled by the page so that they follow light, dark and print."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compressor.models.modules import STRUCTURES, TILED
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.reporting.format import scaled, sentence, significant

Record = dict[str, Any]

SHORT = 0.2
"""Share of the longest bar with its whisker: shorter bars have their number behind them. It is a number's width on a phone."""
DENSE, COMPRESSED, PALE = "#8492a6", "#0f9d8a", "rgba(132,146,166,0.22)"
SYMBOLS = {
    ("pytorch", "fp32"): "square",
    **{(name, precision): symbol for name, row in RUNTIMES.items() for precision, symbol in row.symbols.items()},
}
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
MARGIN = {"l": 8, "r": 16, "t": 8, "b": 44}
BINS = 32
"""Columns in which a layer's neurons are drawn."""


@dataclass(frozen=True)
class Figure:
    """A figure: `id` of its div; `caption` is also read by screen readers; `wide` spans both columns of the page."""

    id: str
    title: str
    caption: str
    data: list[Record]
    layout: Record
    wide: bool = False


def figures(report: Record) -> list[Record]:
    """Every figure for which the stages ran."""
    every = [quality(report), kept(report), losses(report)]
    if report["measured"] is not None:
        cells = [latency(report, cell) for cell in grid(report)]
        every = [tradeoff(report), *cells, stored(report), *every]
    return [asdict(figure) for figure in every if figure is not None]


def layout(height: int = 300, **changes: Any) -> Record:
    """Plain plotly layout: no background, thin grid, no title (the page has its own)."""
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(132,146,166,0.25)", "gridwidth": 1}
    base = {
        "height": height,
        "margin": MARGIN,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": "#6b7788"},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "dragmode": False,
        "xaxis": axis,
        "yaxis": axis,
    }
    axes = {key: {**axis, **value} for key, value in changes.items() if "axis" in key}
    for titled in (frame for frame in axes.values() if "title" in frame):
        titled["title"] = {**titled["title"], "font": {"size": 13}}
    return {**base, **changes, **axes}


def colour(variant: Record) -> str:
    """Colour of a variant: grey for dense, teal for compressed."""
    return COMPRESSED if variant["model"] == "compressed" else DENSE


def whisker(low: list[float], high: list[float], axis: str = "y") -> Record:
    """plotly's error bars from distances below and above."""
    bars = {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1.3, "width": 4}
    return {f"error_{axis}": {**bars, "color": "#6b7788"}}


def interval_whisker(qualities: list[Record], key: str, scale: float = 100) -> Record:
    """Error bars, times `scale`, of a metric with its intervals."""
    low = [scale * (row[key] - row["interval"][0]) for row in qualities]
    return whisker(low, [scale * (row["interval"][1] - row[key]) for row in qualities])


def grid(report: Record) -> list[tuple[int, int]]:
    """Every (batch, length) that was measured."""
    return [(row["batch"], row["length"]) for row in report["variants"][0]["latency"]]


def at(variant: Record, cell: tuple[int, int]) -> Record:
    return next(row for row in variant["latency"] if (row["batch"], row["length"]) == cell)


def tradeoff(report: Record) -> Figure:
    cell, metric = (report["cells"][-1]["batch"], report["cells"][-1]["length"]), report["metric"]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": row["name"],
            "x": [at(row, cell)["p50"]],
            "y": [100 * row["quality"][metric["key"]]],
            "marker": {"size": 13, "color": colour(row), "symbol": SYMBOLS.get((row["runtime"], row["precision"]), "cross")},
            **interval_whisker([row["quality"]], metric["key"]),
        }
        for row in report["variants"]
    ]
    side = {"title": {"text": metric["axis"]}}
    axes = {"xaxis": {"title": {"text": "p50 latency, ms"}, "rangemode": "tozero"}, "yaxis": side}
    caption = (
        f"{sentence(metric['title'])} (whiskers: 95 % interval) against median latency at batch {cell[0]} × {cell[1]}: "
        "left and high is good."
    )
    # plotly gives a legend half of the height at most: on a phone it has one variant a line
    return Figure("tradeoff", "Quality against time", caption, data, layout(280 + 20 * len(data), **axes), wide=True)


def bars(rows: list[Record], values: list[float], unit: str, ends: list[float] | None = None) -> tuple[list[Record], Record]:
    """Horizontal bars with their numbers, one per variant, the first on top; with whiskers to the `ends`, if given."""
    tails = whisker([0.0] * len(rows), [end - value for value, end in zip(values, ends, strict=True)], "x") if ends else {}
    ends = ends or values
    names = [row["name"].replace(" ", "<br>", 1) for row in rows]
    short = [value < SHORT * max(ends) for value in values]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": values,
        "marker": {"color": [colour(row) for row in rows]},
        "text": ["" if few else significant(value) for value, few in zip(values, short, strict=True)],
        "textposition": "inside",
        # else plotly turns a number, or makes it smaller
        "textangle": 0,
        "constraintext": "none",
        "insidetextanchor": "start",
        "insidetextfont": {"color": "#ffffff"},
        "hoverinfo": "x",
        **tails,
    }
    # plotly's own text outside of a bar would stand on the whisker
    behind = [
        {"x": end, "y": name, "text": significant(value), "xanchor": "left", "xshift": 6, "showarrow": False}
        for name, value, end, few in zip(names, values, ends, short, strict=True)
        if few
    ]
    axes = {
        "xaxis": {"ticksuffix": f" {unit}", "nticks": 5, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    frame = layout(50 + 46 * len(rows), margin={**MARGIN, "b": 8}, bargap=0.3, showlegend=False, annotations=behind, **axes)
    return [trace], frame


def latency(report: Record, cell: tuple[int, int]) -> Figure:
    rows = report["variants"]
    timings = [at(row, cell) for row in rows]
    p50, p95 = ([timing[key] for timing in timings] for key in ("p50", "p95"))
    data, frame = bars(rows, p50, "ms", p95)
    where = f"batch {cell[0]} × {cell[1]} tokens"
    caption = f"Median latency of one call with {where}; the whisker ends at p95. Shorter is better."
    return Figure(f"latency-{cell[0]}-{cell[1]}", f"Latency, {where}", caption, data, frame)


def stored(report: Record) -> Figure:
    rows = report["variants"]
    data, frame = bars(rows, [row["bytes"] / 1e6 for row in rows], "MB")
    return Figure("stored", "Stored bytes", "Bytes of the weights on disk, in MB (10⁶). Shorter is better.", data, frame)


def rows_of(metric: Record) -> str:
    """What the main metric is measured on."""
    return "prompts" if "outputs" in metric else "rows"


def quality(report: Record) -> Figure | None:
    rows, metric = report["quality_by_stage"], report["metric"]
    if not rows:
        return None
    key, scale = metric["key"], metric.get("scale", 100)
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row["stage"] for row in rows],
        "y": [scale * row[key] for row in rows],
        "marker": {"size": 9, "color": COMPRESSED},
        "line": {"color": COMPRESSED, "width": 1.5},
        "hoverinfo": "x+y",
        **interval_whisker(rows, key, scale),
    }
    level = scale * rows[0][key]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
    frame = layout(yaxis={"title": {"text": metric["axis"]}}, xaxis={"showgrid": False}, showlegend=False)
    frame["shapes"] = [{**line, "line": {"color": DENSE, "width": 1.2, "dash": "dot"}}]
    caption = f"{sentence(metric['title'])} after each stage with its 95 % interval on {rows[0]['rows']:,} {rows_of(metric)}; "
    caption += f"dotted: {rows[0]['stage']}, {scaled(rows[0][key], scale, metric['unit'])}."
    return Figure("quality", "Quality, stage by stage", caption, [trace], frame)


def kept(report: Record) -> Figure | None:
    """Units left in each layer: one panel per structure; a removed layer is empty in all."""
    layers = report["pruning"]["layers"]
    if not layers:
        return None
    structures = [name for name in STRUCTURES if any(name in row["units"] for row in layers)]
    look = {"type": "heatmap", "y": [str(row["layer"]) for row in layers], "zmin": 0, "zmax": 1, "ygap": 3}
    look |= {"colorscale": [[0, PALE], [1, COMPRESSED]], "showscale": False, "hoverinfo": "x+y+z"}
    quiet = {"showgrid": False, "showticklabels": False, "ticks": ""}
    data, axes, width = [], {}, 1 / len(structures)
    for place, name in enumerate(structures):
        units = [row["units"].get(name) for row in layers]
        rows = [share_by_bin(counts["left"], counts["of"]) if counts else [] for counts in units]
        number = str(place + 1) if place else ""
        data.append({**look, "z": rows, "xgap": 1 if name in TILED else 3, "xaxis": f"x{number}"})
        domain = [place * width + 0.02 * bool(place), (place + 1) * width - 0.02]
        axes[f"xaxis{number}"] = {**quiet, "domain": domain, "title": {"text": STRUCTURES[name].words, "standoff": 4}}
    side = {"autorange": "reversed", "showgrid": False, "type": "category", "title": {"text": "layer"}}
    caption = f"Filled is kept: {' and '.join(left_of(layers, name) for name in structures)}. "
    caption += f"Where a layer has more than {BINS}, they are drawn in bins by index, the deeper the colour the more are left."
    gone = [str(row["layer"]) for row in layers if row["gone"]]
    caption += f" Removed as a whole: layer{'s' * (len(gone) > 1)} {', '.join(gone)}." if gone else ""
    return Figure("kept", "What is left of each layer", caption, data, layout(70 + 30 * len(layers), **axes, yaxis=side))


def left_of(layers: list[Record], name: str) -> str:
    """Format the units left: '36 of 72 heads'."""
    units = [row["units"][name] for row in layers if name in row["units"]]
    left, of = sum(len(counts["left"]) for counts in units), sum(counts["of"] for counts in units)
    return f"{left:,} of {of:,} {STRUCTURES[name].words}"


def share_by_bin(kept_indices: list[int], total: int) -> list[float]:
    """Share of neurons kept in each of up to BINS bins of neighbouring indices."""
    count = min(BINS, total)
    filled, sizes = [0] * count, [0] * count
    for index in range(total):
        sizes[index * count // total] += 1
    for index in kept_indices:
        filled[index * count // total] += 1
    return [round(full / size, 3) for full, size in zip(filled, sizes, strict=True)]


def losses(report: Record) -> Figure | None:
    if not report["losses"]:
        return None
    colours = (DENSE, COMPRESSED, "#d9822b", "#7a5cc4")
    data = [
        {
            "type": "scatter",
            "mode": "lines" if len(rows) > 1 else "lines+markers",
            "name": stage,
            "x": [row["step"] for row in rows],
            "y": [row["loss"] for row in rows],
            "line": {"color": colours[number % len(colours)], "width": 2},
        }
        for number, (stage, rows) in enumerate(report["losses"].items())
    ]
    frame = layout(xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "training loss"}, "rangemode": "tozero"})
    caption = (
        "Training loss of each training stage. A distilled stage adds the teacher's term: compare losses within one stage only."
    )
    return Figure("losses", "Training", caption, data, {**frame, "showlegend": True})
