"""The report's tables as strings: one source for Markdown and for the HTML page."""

from __future__ import annotations

from collections.abc import Callable

from compressor.cost import human_bytes
from export.latency.core_time import disturbance
from pipelines.reporting.format import (
    Speed,
    factor,
    hundredths,
    interval,
    is_finite,
    milliseconds,
    percent,
    points,
    points_between,
    scaled,
    sentence,
    significant,
    verdict,
)
from pipelines.reporting.latency_tables import further_tokens, latency, real_lengths, time_by_kind
from pipelines.reporting.report_table import Column, Record, ReportTable, count, digits, heads_of, made, text


def tables(report: Record) -> list[ReportTable]:
    """Every table of the report, in order; those without rows (a stage that did not run) are left out."""
    chosen = (tried, sensitivity) if report["precision"] else ()
    if report["measured"] is None:
        every = (bare_summary, quality, *chosen, density, trainable, parity)
    else:
        every = (summary, quality, steps, *chosen, density, trainable, parity, variants)
        every += (latency, time_by_kind, real_lengths, further_tokens)
    return [table for table in (make(report) for make in every) if table.rows]


def summary(report: Record) -> ReportTable:
    note = (
        "Dense is the tuned model before pruning, merged; intervals are 95 %, those of latency over rounds. "
        "FLOPs are those of PyTorch, count a multiply-add as two and include the attention scores; "
        "the papers count linear layers only, adapters among them, and leave tune's deltas unmerged."
    )
    return made("summary", "Dense and compressed", summary_columns(report), report["summary"], note)


def summary_columns(report: Record) -> list[Column]:
    words = ("metric", "change", "change_runtime")
    return [Column(head, "l" if key in words else "r", text(key)) for key, head in heads_of(report).items()]


def bare_summary(report: Record) -> ReportTable:
    """The summary of a run without a benchmark."""
    note = (
        "Dense is the tuned model before pruning; intervals are 95 %. FLOPs count a multiply-add as two and include the "
        "attention scores; of an encoder with a decoder both read so many tokens."
    )
    return made("summary", "Dense and compressed", summary_columns(report), report["summary"], note)


def quality(report: Record) -> ReportTable:
    metric, records = report["metric"], report["quality_by_file"]
    every = [one for one in metric["every"] if any(one["key"] in row for row in records)]
    scale = metric.get("scale", 100)

    def cell(key: str, unit: str) -> Callable[[Record], str]:
        # texts are not generated of every model
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
    account, unit = report["precision"], report["metric"].get("outputs", report["metric"])["unit"]
    agreement = report["metric"]["agreement"]
    columns = [
        Column("runtime", "l", text("runtime")),
        Column("precision", "l", text("precision")),
        Column("matrices in fp32", "r", lambda row: f"{row['excluded']:,}" if row["precision"] != "fp32" else "all"),
        Column("p50 ms", "r", lambda row: significant(row["ms"]) if row["ms"] else "not timed"),
        Column("speed of fp32", "r", lambda row: factor(row["speed"]) if row["speed"] else ""),
        Column("metric against fp32", "r", lambda row: points(-row["loss"]) if "loss" in row else ""),
        Column(agreement, "r", lambda row: hundredths(row["agreement"], unit) if "agreement" in row else ""),
        Column("verdict", "l", lambda row: f"kept: {row['verdict']}" if row["kept"] else row["verdict"]),
    ]
    note = (
        "In the order judged, the fastest first, then those that are slower than what is kept: the first that loses at most "
        f"{account['budget']:g} points against the compressed model in "
        f"PyTorch (fp32) on all {account['rows']:,} validation rows: chosen on them, its figure there is a little optimistic. "
        f"Timed in {account['rounds']} interleaved rounds of {account['batch']} × {account['length']} tokens; a file with "
        "matrices in fp32 in a later run, so compare its factor (1 is the fastest fp32 file of the same run) and not its ms."
    )
    if disturbed := disturbance(account["waited"]):
        note += f" {sentence(disturbed)}."
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
    if rounded := [row["stage"] for row in report["trainable"] if row["precision"] != "fp32"]:
        note += f" Matrix products of {' and '.join(rounded)} were computed in bf16, all else in fp32."
    return made("trainable", "What was trained", columns, report["trainable"], note)


def parity(report: Record) -> ReportTable:
    metric, agreement = report["metric"].get("outputs", report["metric"]), report["metric"]["agreement"]
    unit = metric["unit"]

    def before_and_after(row: Record) -> str:
        return f"{hundredths(row['metric_reference'], unit)} → {hundredths(row['metric_candidate'], unit)}"

    def measured(cell: Callable[[Record], str]) -> Callable[[Record], str]:
        """The cell; empty for outputs that could not be compared (not finite, or of another shape)."""
        return lambda row: cell(row) if is_finite(row["max_difference"]) else ""

    columns = [
        Column("stage", "l", text("stage")),
        Column("check", "l", text("hop")),
        Column("rows", "r", count("rows")),
        Column("max |Δlogit|", "r", digits("max_difference")),
        Column(agreement, "r", measured(lambda row: hundredths(row["agreement"], unit))),
        Column(metric["title"], "r", measured(before_and_after)),
        Column("of rounding", "r", measured(distance)),
        Column("allowed", "l", text("bound")),
        Column("", "l", lambda row: row.get("verdict") or ("passed" if row["passed"] else "FAILED")),
    ]
    note = (
        'Outputs before and after each conversion on real validation rows. A file is refused if a fault is shown; "not shown" '
        "passes, and the notes say of compressed files which loss so many rows can detect. "
        '"Of rounding": change of the outputs, as a multiple of the change by rounding to int8 in PyTorch. '
        "Only deployed files must pass; dense files are baselines."
    )
    return made("parity", "Is it the same function?", columns, report["parity"], note)


def distance(row: Record) -> str:
    """Output distance as a multiple of that of rounding alone: '1.02 ×'; '' where there is none."""
    ours, alone = row.get("distance"), row.get("rounding")
    return factor(ours / alone) if alone and is_finite(ours) and is_finite(alone) else ""


def variants(report: Record) -> ReportTable:
    metric, baseline = report["metric"], report["baseline"]

    def against_dense(row: Record) -> str:
        low, high = row["difference_interval"]
        return "" if row["name"] == baseline else points_between(low, high)

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
