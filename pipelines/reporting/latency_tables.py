"""The report's tables of times, variant by variant: fixed shapes, kinds of work, rows of their own lengths, further tokens."""

from __future__ import annotations

from operator import itemgetter

from export.latency.core_time import disturbance
from export.latency.measure import TOKENS
from pipelines.reporting.candidates import timing
from pipelines.reporting.format import factor, limit_share, percent
from pipelines.reporting.report_table import Column, Record, ReportTable, count, digits, made, text


def cells_of(report: Record, of: str) -> list[Record]:
    """What was timed of every variant, with its name; models of other kinds have less."""
    return [{**cell, "name": row["name"]} for row in report["variants"] for cell in row.get(of, [])]


def speed_up(report: Record, records: list[Record], *keys: str) -> Column:
    """The speed of each record over that of the baseline at equal `keys`."""
    key = itemgetter(*keys)
    base = {key(cell): cell["p50"] for cell in records if cell["name"] == report["baseline"]}
    return Column("speed-up", "r", lambda row: factor(base[key(row)] / row["p50"]))


def limits_of(measured: Record) -> Record | None:
    """The machine's measured rates; none of a GPU, and of a disturbed benchmark, which measured these between the same other
    work: shares of them come out above 100 %."""
    return None if disturbance(measured["waited"]) else measured["limits"]


def with_limits(report: Record, columns: list[Column], note: str, meaning: str) -> tuple[list[Column], str]:
    """A column of shares of the machine's limit, and what they mean, where the limits are known."""
    if not limits_of(report["measured"]):
        return columns, note
    return [*columns, Column("of the limit", "r", limit_share)], f"{note} Of the limit: {meaning}, over p50."


LEAST_TIME = (
    "the least time for the FLOPs at this machine's rate in the file's precision, or for reading the weights once from memory "
    "where that is longer (memory)"
)


def latency(report: Record) -> ReportTable:
    records = cells_of(report, "latency")
    columns = [
        Column("variant", "l", text("name")),
        Column("batch", "r", count("batch")),
        Column("length", "r", count("length")),
        Column("p50 ms", "r", digits("p50")),
        Column("p95 ms", "r", digits("p95")),
        Column("p99 ms", "r", digits("p99")),
        Column("IQR ms", "r", digits("iqr")),
        Column("rows/s", "r", digits("throughput")),
        speed_up(report, records, "batch", "length"),
    ]
    rounds = report["measured"]["rounds"]
    few = f", so p99 is nearly the slowest of {rounds}" if rounds <= 100 else ""
    note = f"{rounds:,} interleaved rounds{few}. Speed-up is against {report['baseline']}."
    columns, note = with_limits(report, columns, note, LEAST_TIME)
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
    records = cells_of(report, "real_lengths")
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
        speed_up(report, records, "batch", "order"),
    ]
    few, many = (edge((row["rounds"] for row in records), default=0) for edge in (min, max))
    rounds = f"{many}" if few == many else f"{few} to {many}"
    note = (
        "A pass is some validation rows of their own lengths, each batch padded to its longest. In the first pass of a new "
        "process every shape is new, and a runtime that compiles for a shape does so there: a new shape is the mean call on "
        f"the first batch of a shape, then and later. Rows/s, tokens/s (without padding) and speed-up are of the {rounds} "
        f"later passes, interleaved. Sorted: rows of similar length share a batch. Speed-up is against {report['baseline']}."
    )
    columns, note = with_limits(report, columns, note, f"{LEAST_TIME}, of every batch as it is padded, added up")
    return made("real-lengths", "Every variant: rows of their own lengths", columns, records, note)


def further_tokens(report: Record) -> ReportTable:
    records = cells_of(report, "further_tokens")
    columns = [
        Column("variant", "l", text("name")),
        Column("texts", "r", count("batch")),
        Column("behind tokens", "r", count("length")),
        Column("a token, p50 ms", "r", digits("p50")),
        Column("IQR ms", "r", digits("iqr")),
        Column("tokens/s", "r", digits("throughput")),
        speed_up(report, records, "batch", "length"),
    ]
    note = (
        f"{TOKENS} tokens of each text, one after the other, on the cached keys and values of prompts of that length; their "
        "mean is one of the samples, which are interleaved. Choosing a token is not in it. Speed-up is against "
        f"{report['baseline']}."
    )
    columns, note = with_limits(
        report, columns, note, "the least time for reading all weights once from memory, or for their FLOPs"
    )
    return made("further-tokens", "Every variant: tokens one at a time", columns, records, note)
