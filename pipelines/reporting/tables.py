"""The report's tables as strings: one source for Markdown and for the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from compressor.cost import human_bytes
from pipelines.reporting.candidates import timing
from pipelines.reporting.format import (
    Speed,
    factor,
    hundredths,
    interval,
    limit_share,
    milliseconds,
    percent,
    points,
    scaled,
    significant,
    verdict,
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its title, `l`(eft) for words or `r`(ight) for numbers, and the cell that it makes of a record."""

    title: str
    align: str
    cell: Callable[[Any], str]


@dataclass(frozen=True)
class ReportTable:
    """A table. `align` has one letter per column: l(eft) for words, r(ight) for numbers. `rows` hold as many strings."""

    id: str
    title: str
    note: str
    columns: tuple[str, ...]
    align: str
    rows: list[tuple[str, ...]]


def made(id: str, title: str, columns: Sequence[Column], records: Iterable[Any], note: str) -> ReportTable:
    """A table with a row for every record."""
    rows = [tuple(column.cell(record) for column in columns) for record in records]
    return ReportTable(
        id, title, note, tuple(column.title for column in columns), "".join(column.align for column in columns), rows
    )


def tables(report: Record) -> list[ReportTable]:
    """Every table of the report, in order; those without rows (a stage that did not run) are left out."""
    if report["measured"] is None:
        return [table for table in (make(report) for make in (bare_summary, quality, density, trainable, parity)) if table.rows]
    chosen = (tried, sensitivity) if report["precision"] else ()
    every = (summary, quality, steps, *chosen, density, trainable, parity, variants, latency, time_by_kind, real_lengths)
    return [table for table in (make(report) for make in every) if table.rows]


def text(key: str) -> Callable[[Record], str]:
    """A cell that shows the value of a key unchanged, empty if there is none."""
    return lambda record: str(record.get(key, ""))


def count(key: str) -> Callable[[Record], str]:
    """A cell that shows a whole number."""
    return lambda record: f"{record[key]:,}"


def digits(key: str) -> Callable[[Record], str]:
    """A cell that shows three significant digits."""
    return lambda record: significant(record[key])


def summary(report: Record) -> ReportTable:
    _, runtime, _ = report["deployed"].split()
    columns = [
        Column("", "l", text("metric")),
        Column("dense PyTorch", "r", text("dense")),
        Column(f"dense {runtime} fp32", "r", text("runtime")),
        Column(report["deployed"], "r", text("compressed")),
        Column("against PyTorch", "l", text("change")),
        Column(f"against {runtime} fp32", "l", text("change_runtime")),
    ]
    note = (
        "Dense is the tuned model before pruning, merged; intervals are 95 %, those of latency over rounds. "
        "FLOPs count a multiply-add as two and include the attention scores; "
        "the papers count linear layers only, adapters among them, and leave tune's deltas unmerged."
    )
    return made("summary", "Dense and compressed", columns, report["summary"], note)


def bare_summary(report: Record) -> ReportTable:
    """The summary of a run without a benchmark."""
    columns = [
        Column("", "l", text("metric")),
        Column("dense", "r", text("dense")),
        Column(f"after {report['deployed']}", "r", text("compressed")),
        Column("against dense", "l", text("change")),
    ]
    note = (
        "Dense is the tuned model before pruning; intervals are 95 %. FLOPs count a multiply-add as two and include the "
        "attention scores; of an encoder with a decoder both read so many tokens."
    )
    return made("summary", "Dense and compressed", columns, report["summary"], note)


def quality(report: Record) -> ReportTable:
    # reports of earlier versions have neither
    metric, records = report["metric"], report.get("quality_by_file", [])
    every = [one for one in metric.get("every", []) if any(one["key"] in row for row in records)]
    scale = metric.get("scale", 100)

    def cell(key: str, unit: str) -> Callable[[Record], str]:
        # trainings of earlier versions measured fewer metrics
        return lambda row: scaled(row[key], scale if key == metric["key"] else 100, unit) if key in row else ""

    columns = [
        Column("after", "l", text("stage")),
        Column("rows of", "l", text("file")),
        Column("rows", "r", count("rows")),
        *(Column(one["title"], "r", cell(one["key"], one["unit"])) for one in every),
        Column(f"95 % interval of {metric['name']}", "r", lambda row: interval(*row["interval"], scale)),
    ]
    note = "Every metric in PyTorch, that of the exported files in their runtime. A test file is only scored: it chose nothing."
    return made("metrics", "Every metric, stage by stage", columns, records, note)


def steps(report: Record) -> ReportTable:
    metric, records = report["metric"], report["steps"]
    columns = [Column("", "l", text("step"))]
    for place, cell in enumerate(report["cells"]):
        columns += [
            Column(f"p50, batch {cell['batch']}", "r", lambda step, place=place: milliseconds(step["latency"][place]["p50"])),
            # the first step is what the others are compared with
            Column(
                "factor",
                "r",
                lambda step, place=place: "" if step is records[0] else gained(step["latency"][place]),
            ),
        ]
    columns += [
        Column("stored", "r", lambda step: human_bytes(step["bytes"])),
        Column(metric["title"], "r", lambda step: hundredths(step[metric["key"]], metric["unit"])),
    ]
    note = (
        "One change at a time; a factor is the speed-up over the line above. Within 3 % of 1 is no gain; it is not shown where "
        "the rounds leave open which of the two is faster."
    )
    return made("steps", "Where the gain comes from", columns, records, note)


def gained(latency: Record) -> str:
    """The factor of a step: '1.91 ×', or '1.50 × (0.862 to 2.47): not shown'."""
    speed = Speed(latency["speedup"], *latency["interval"])
    low, high = map(significant, (speed.low, speed.high))
    return factor(speed.ratio) + (f" ({low} to {high}): not shown" if speed.is_open else "")


def tried(report: Record) -> ReportTable:
    account = report["precision"]
    columns = [
        Column("runtime", "l", text("runtime")),
        Column("precision", "l", text("precision")),
        Column("matrices in fp32", "r", lambda row: f"{row['excluded']:,}" if row["precision"] != "fp32" else "all"),
        Column("p50 ms", "r", lambda row: significant(row["ms"]) if row["ms"] else "not timed"),
        Column("speed of fp32", "r", lambda row: factor(row["speed"]) if row["speed"] else ""),
        Column("metric against fp32", "r", lambda row: points(-row["loss"]) if "loss" in row else ""),
        Column("labels agree", "r", lambda row: percent(row["agreement"]) if "agreement" in row else ""),
        Column("verdict", "l", lambda row: f"kept: {row['verdict']}" if row["kept"] else row["verdict"]),
    ]
    note = (
        f"The fastest first; kept is the first that loses at most {account['budget']:g} points against the compressed model in "
        f"PyTorch (fp32) on all {account['rows']:,} validation rows: chosen on them, its figure there is a little optimistic. "
        f"Timed in {account['rounds']} interleaved rounds of {account['batch']} × {account['length']} tokens; a file with "
        "matrices in fp32 in a later run, so compare its factor (1 is the fastest fp32 file of the same run) and not its ms."
    )
    return made("precision", "Which precision is kept, and why", columns, account["tried"], note)


def sensitivity(report: Record) -> ReportTable:
    account = report["precision"]
    kept = account["kept"]
    columns = [
        Column("runtime", "l", text("runtime")),
        Column("matrix", "l", text("name")),
        Column("|Δlogit|", "r", digits("difference")),
        Column("left in", "l", lambda row: "fp32" if row["spared"] else ""),
    ]
    records = [
        {**row, "runtime": runtime, "spared": runtime == kept["runtime"] and row["name"] in kept["excluded"]}
        for runtime, ranking in account["sensitivity"].items()
        for row in ranking
    ]
    note = (
        f"Mean |Δlogit| over {account['ranking_rows']} training rows when that matrix alone is rounded to 8 bits, in PyTorch: "
        f"the first of the ranking. At most {percent(account['most_excluded'])} of the matrices may stay in fp32."
    )
    return made("sensitivity", "Which matrices int8 hurts most", columns, records, note)


def density(report: Record) -> ReportTable:
    columns = [
        Column("pattern", "l", lambda row: row["pattern"] or "not masked"),
        Column("matrices", "r", count("matrices")),
        Column("weights", "r", count("entries")),
        Column("non-zeros", "r", count("nonzeros")),
        Column("density", "r", lambda row: percent(row["nonzeros"] / row["entries"])),
    ]
    note = (
        "Linear layers of the blocks, merged unless it says: of W alone. n:m: at most n non-zeros in m consecutive inputs. "
        "Zeros are stored and computed: parameters, bytes, FLOPs and latency count them."
    )
    return made("density", "What is zero", columns, report["density"], note)


def trainable(report: Record) -> ReportTable:
    columns = [
        Column("stage", "l", text("stage")),
        Column("method", "l", text("method")),
        Column("modules", "l", lambda row: ", ".join(row["modules"])),
        Column("formula", "l", text("formula")),
        Column("closed form", "l", text("closed_form")),
        Column("counted", "r", count("body")),
        Column("task head", "r", count("head")),
        Column("of dense", "r", lambda row: f"{significant(100 * row['share_of_dense'])} %"),
    ]
    note = "r rank, m × n a matrix, |Ω| the chosen positions. Counted on the live model; a task head is always trained: apart."
    return made("trainable", "What was trained", columns, report["trainable"], note)


def parity(report: Record) -> ReportTable:
    metric, agreement = report["metric"].get("outputs", report["metric"]), report["metric"]["agreement"]
    unit = metric["unit"]

    def before_and_after(row: Record) -> str:
        return f"{hundredths(row['metric_reference'], unit)} → {hundredths(row['metric_candidate'], unit)}"

    def measured(cell: Callable[[Record], str], otherwise: str = "") -> Callable[[Record], str]:
        """The cell; `otherwise` for outputs that could not be compared (not finite, or of another shape)."""
        return lambda row: cell(row) if is_finite(row["max_difference"]) else otherwise

    columns = [
        Column("stage", "l", text("stage")),
        Column("check", "l", text("hop")),
        Column("rows", "r", count("rows")),
        Column("max |Δlogit|", "r", measured(digits("max_difference"), "not finite")),
        Column(agreement, "r", measured(lambda row: hundredths(row["agreement"], unit))),
        Column(metric["title"], "r", measured(before_and_after)),
        Column("of rounding", "r", measured(distance)),
        Column("allowed", "l", text("bound")),
        Column("", "l", lambda row: row.get("verdict") or ("passed" if row["passed"] else "FAILED")),
    ]
    note = (
        'Outputs before and after each conversion on real validation rows. A file is refused if a fault is shown; "not shown" '
        'passes, and the notes say which loss so many rows can detect. "Of rounding": change of the outputs, as a multiple of '
        "the change by rounding to int8 in PyTorch. Only deployed files must pass; dense files are baselines."
    )
    return made("parity", "Is it the same function?", columns, report["parity"], note)


def is_finite(value: float | None) -> bool:
    """Whether a number of a record is finite; in report.json others are null."""
    return value is not None and math.isfinite(value)


def distance(row: Record) -> str:
    """Output distance as a multiple of that of rounding alone: '1.02 ×'; '' where there is none."""
    ours, alone = row.get("distance"), row.get("rounding")
    return factor(ours / alone) if alone and is_finite(ours) and is_finite(alone) else ""


def variants(report: Record) -> ReportTable:
    metric, baseline = report["metric"], report["baseline"]

    def against_dense(row: Record) -> str:
        low, high = row["difference_interval"]
        return "" if row["name"] == baseline else f"{points(low, '')} to {points(high, '')}"

    columns = [
        Column("variant", "l", text("name")),
        Column(metric["title"], "r", lambda row: hundredths(row["quality"][metric["key"]], metric["unit"])),
        Column("95 % interval", "r", lambda row: interval(*row["quality"]["interval"])),
        Column("against dense", "r", against_dense),
        Column("", "l", lambda row: "baseline" if row["name"] == baseline else verdict(*row["difference_interval"])),
        Column("parameters", "r", count("parameters")),
        Column("stored", "r", lambda row: human_bytes(row["bytes"])),
    ]
    note = "Against dense: 95 % interval of the difference in points, a paired bootstrap over the same validation rows."
    return made("variants", "Every variant: quality and size", columns, report["variants"], note)


def latency(report: Record) -> ReportTable:
    base = {(cell["batch"], cell["length"]): cell["p50"] for row in report["variants"][:1] for cell in row["latency"]}
    columns = [
        Column("variant", "l", text("name")),
        Column("batch", "r", count("batch")),
        Column("length", "r", count("length")),
        Column("p50 ms", "r", digits("p50")),
        Column("p95 ms", "r", digits("p95")),
        Column("p99 ms", "r", digits("p99")),
        Column("IQR ms", "r", digits("iqr")),
        Column("rows/s", "r", digits("throughput")),
        Column("speed-up", "r", lambda row: factor(base[row["batch"], row["length"]] / row["p50"])),
    ]
    records = [{**cell, "name": row["name"]} for row in report["variants"] for cell in row["latency"]]
    rounds = report["measured"]["rounds"]
    note = f"{rounds} interleaved rounds, so p99 is nearly the slowest of {rounds}. Speed-up is against {report['baseline']}."
    # measurements on GPUs, and of earlier versions, have no limits
    if report["measured"].get("limits"):
        columns.append(Column("of the limit", "r", limit_share))
        note += (
            " Of the limit: the least time for the FLOPs at this machine's rate in the file's precision, or for reading the "
            "weights once from memory where that is longer (memory), over p50."
        )
    return made("latency", "Every variant: latency", columns, records, note)


SHOWN_SHARE = 0.01
"""Kinds of work with a smaller share of a pass are left out of the table."""


def time_by_kind(report: Record) -> ReportTable:
    # only files of benchmarks with `profile: true` have one
    profiled = [(row, row["profile"]) for row in report["variants"] if row.get("profile")]
    records = [
        {
            **kind,
            "name": row["name"],
            "p50": timing(row, (profile["batch"], profile["length"]))["p50"],
            "profiled": profile["ms"],
        }
        for row, profile in profiled
        for kind in profile["kinds"]
        if kind["share"] >= SHOWN_SHARE
    ]
    columns = [
        Column("variant", "l", text("name")),
        Column("p50 ms", "r", digits("p50")),
        Column("profiled pass ms", "r", digits("profiled")),
        Column("kind of work", "l", text("kind")),
        Column("ms", "r", digits("ms")),
        Column("share", "r", lambda row: percent(row["share"])),
        Column("operators", "l", operators),
    ]
    shapes = {f"{profile['batch']} × {profile['length']} tokens" for _, profile in profiled}
    note = (
        f"Shares of one forward pass of {', '.join(shapes)}, in a separate process after the timing and with the runtime's own "
        "profiler, so it may take longer than p50; kinds below 1 % are left out. An operator that joins several counts as one."
    )
    return made("profile", "Where the time goes", columns, records, note)


def operators(row: Record) -> str:
    """The operator types that take most of a kind's time, by falling time."""
    return ", ".join(name for name, ms in row["types"].items() if ms >= row["ms"] / 20 and name != row["kind"])


ORDER_WORDS = {"arrival": "as they come", "sorted": "sorted by length"}
"""How a report calls the orders of rows in which real lengths are timed."""


def real_lengths(report: Record) -> ReportTable:
    # reports of runs before such rows were timed have none
    records = [{**cell, "name": row["name"]} for row in report["variants"] for cell in row.get("real_lengths", [])]
    key = itemgetter("batch", "order")
    base = {key(cell): cell["p50"] for cell in records if cell["name"] == report["baseline"]}
    columns = [
        Column("variant", "l", text("name")),
        Column("batch", "r", count("batch")),
        Column("order", "l", lambda row: ORDER_WORDS[row["order"]]),
        Column("rows", "r", count("rows")),
        Column("shapes", "r", count("shapes")),
        Column("padding", "r", lambda row: percent(row["padding"])),
        Column("first pass ms", "r", digits("first_ms")),
        Column("later p50 ms", "r", digits("p50")),
        Column("IQR ms", "r", digits("iqr")),
        Column("a new shape, first ms", "r", digits("new_shape_ms")),
        Column("later ms", "r", digits("seen_shape_ms")),
        Column("rows/s", "r", digits("rows_per_second")),
        Column("tokens/s", "r", digits("tokens_per_second")),
        Column("speed-up", "r", lambda row: factor(base[key(row)] / row["p50"])),
    ]
    rounds = max((row["rounds"] for row in records), default=0)
    note = (
        "A pass is some validation rows of their own lengths, each batch padded to its longest. In the first pass of a new "
        "process every shape is new, and a runtime that compiles for a shape does so there: a new shape is the mean call on "
        f"the first batch of a shape, then and later. Rows/s, tokens/s (without padding) and speed-up are of the {rounds} "
        f"later passes, interleaved. Sorted: rows of similar length share a batch. Speed-up is against {report['baseline']}."
    )
    return made("real-lengths", "Every variant: rows of their own lengths", columns, records, note)
