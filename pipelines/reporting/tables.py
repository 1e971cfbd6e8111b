"""The report's tables as strings: one source for Markdown and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressor.cost import human_bytes
from export.runtimes.registry import RUNTIMES
from pipelines.reporting.format import factor, hundredths, interval, milliseconds, percent, points, significant, verdict

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """`align` has one letter a column: l(eft) for words, r(ight) for numbers. `rows` hold as many strings."""

    id: str
    title: str
    note: str
    columns: tuple[str, ...]
    align: str
    rows: list[tuple[str, ...]]


def tables(report: Record) -> list[Table]:
    """Every table of the report, in order; those without rows (a stage that did not run) are left out."""
    every = (summary, steps, tried, sensitivity, density, trainable, parity, variants, latency)
    return [table for table in (make(report) for make in every) if table.rows]


def summary(report: Record) -> Table:
    _, runtime, _ = report["deployed"].split()
    columns = ("", "dense PyTorch", f"dense {runtime} fp32", report["deployed"], "against PyTorch", f"against {runtime} fp32")
    keys = ("metric", "dense", "runtime", "compressed", "change", "change_runtime")
    rows = [tuple(row.get(key, "") for key in keys) for row in report["summary"]]
    note = (
        "Dense is the tuned model before pruning, merged; intervals are 95 %, those of latency over rounds. "
        "FLOPs count a multiply-add as two and include the attention scores; "
        "the papers count linear layers only, adapters among them, and leave tune's deltas unmerged."
    )
    return Table("summary", "Dense and compressed", note, columns, "lrrrll", rows)


def steps(report: Record) -> Table:
    batches = [f"p50, batch {cell['batch']}" for cell in report["cells"]]
    metric = report["metric"]
    columns = ("", *(word for name in batches for word in (name, "factor")), "stored", metric["title"])
    rows = []
    for step in report["steps"]:
        speeds = [(milliseconds(row["p50"]), factor(row["speedup"]) if rows else "") for row in step["latency"]]
        times = [word for pair in speeds for word in pair]
        rows.append((step["step"], *times, human_bytes(step["bytes"]), hundredths(step[metric["key"]], metric["unit"])))
    note = "One change at a time; a factor is the speed-up over the line above. Within 3 % of 1 is no gain."
    return Table("steps", "Where the gain comes from", note, columns, "l" + "r" * (len(columns) - 1), rows)


def tried(report: Record) -> Table:
    columns = (
        "runtime",
        "precision",
        "matrices in fp32",
        "p50 ms",
        "speed of fp32",
        "metric against fp32",
        "labels agree",
        "verdict",
    )
    account = report["precision"]
    rows = account and [
        (
            row["runtime"],
            row["precision"],
            f"{row['excluded']:,}" if row["precision"] != "fp32" else "all",
            significant(row["ms"]) if row["ms"] else "not timed",
            factor(row["speed"]) if row["speed"] else "",
            points(-row["loss"]) if "loss" in row else "",
            percent(row["agreement"]) if "agreement" in row else "",
            f"kept: {row['verdict']}" if row["kept"] else row["verdict"],
        )
        for row in account["tried"]
    ]
    note = account and (
        f"The fastest first; kept is the first that loses at most {account['budget']:g} points against the compressed model in "
        f"PyTorch (fp32) on all {account['rows']:,} validation rows: chosen on them, its figure there is a little optimistic. "
        f"Timed in {account['rounds']} interleaved rounds of {account['batch']} × {account['length']} tokens; a file with "
        "matrices in fp32 in a later run, so compare its factor (1 is the fastest fp32 file of the same run) and not its ms."
    )
    return Table("precision", "Which precision is kept, and why", note, columns, "llrrrrrl", rows)


def sensitivity(report: Record) -> Table:
    account = report["precision"]
    rows = account and [
        (
            runtime,
            row["name"],
            significant(row["difference"]),
            "fp32" if runtime == account["kept"]["runtime"] and row["name"] in account["kept"]["excluded"] else "",
        )
        for runtime, ranking in account["sensitivity"].items()
        for row in ranking
    ]
    note = account and (
        f"Mean |Δlogit| over {account['ranking_rows']} training rows when that matrix alone is rounded to 8 bits, in PyTorch: "
        f"the first of the ranking. At most {percent(account['most_excluded'])} of the matrices may stay in fp32."
    )
    return Table(
        "sensitivity", "Which matrices int8 hurts most", note, ("runtime", "matrix", "|Δlogit|", "left in"), "llrl", rows
    )


def density(report: Record) -> Table:
    columns = ("pattern", "matrices", "weights", "non-zeros", "density")
    rows = [
        (
            row["pattern"] or "not masked",
            f"{row['matrices']:,}",
            f"{row['entries']:,}",
            f"{row['nonzeros']:,}",
            percent(row["nonzeros"] / row["entries"]),
        )
        for row in report["density"]
    ]
    note = (
        "Linear layers of the merged blocks. n:m: at most n non-zeros in m consecutive inputs. Zeros are stored and computed: "
        "parameters, bytes, FLOPs and latency count them."
    )
    return Table("density", "What is zero", note, columns, "lrrrr", rows)


def trainable(report: Record) -> Table:
    columns = ("stage", "method", "modules", "formula", "closed form", "counted", "task head", "of dense")
    rows = [
        (
            row["stage"],
            row["method"],
            ", ".join(row["modules"]),
            row["formula"],
            row["closed_form"],
            f"{row['body']:,}",
            f"{row['head']:,}",
            f"{significant(100 * row['share_of_dense'])} %",
        )
        for row in report["trainable"]
    ]
    note = "r rank, m × n a matrix, |Ω| the chosen places. Counted on the live model; a task head is always trained: apart."
    return Table("trainable", "What was trained", note, columns, "lllllrrr", rows)


def parity(report: Record) -> Table:
    metric = report["metric"]
    unit = metric["unit"]
    columns = ("stage", "hop", "rows", "max |Δlogit|", metric["agreement"], metric["title"], "of rounding", "allowed", "")
    rows = [
        (
            row["stage"],
            row["hop"],
            f"{row['rows']:,}",
            significant(row["max_difference"]),
            hundredths(row["agreement"], unit),
            f"{hundredths(row['metric_reference'], unit)} → {hundredths(row['metric_candidate'], unit)}",
            distance(row),
            row["bound"],
            row.get("verdict") or ("passed" if row["passed"] else "FAILED"),
        )
        for row in report["parity"]
    ]
    note = (
        'Outputs before and after each hop on real validation rows. Refused is what is shown to be wrong; "not shown" passes, '
        'and the notes say what so many rows can resolve. "Of rounding": how far the outputs move, as a multiple of what '
        "rounding to int8 moves them in PyTorch. What is shipped is gated; a dense file is only compared with."
    )
    return Table("parity", "Is it the same function?", note, columns, "llrrrrrll", rows)


def distance(row: Record) -> str:
    """'1.02 ×' where rounding explains what moves."""
    return factor(row["distance"] / row["rounding"]) if row.get("rounding") else ""


def variants(report: Record) -> Table:
    metric, rows = report["metric"], []
    columns = ("variant", metric["title"], "95 % interval", "against dense", "", "parameters", "stored")
    for row in report["variants"]:
        low, high = row["difference_interval"]
        is_baseline = row["name"] == report["baseline"]
        rows.append(
            (
                row["name"],
                hundredths(row["quality"][metric["key"]], metric["unit"]),
                interval(*row["quality"]["interval"]),
                "" if is_baseline else f"{points(low, '')} to {points(high, '')}",
                "baseline" if is_baseline else verdict(low, high),
                f"{row['parameters']:,}",
                human_bytes(row["bytes"]),
            )
        )
    note = "Against dense: 95 % interval of the difference in points, a paired bootstrap over the same validation rows."
    return Table("variants", "Every variant: quality and size", note, columns, "lrrrlrr", rows)


def latency(report: Record) -> Table:
    columns = ("variant", "batch", "length", "p50 ms", "p95 ms", "p99 ms", "IQR ms", "rows/s", "speed-up")
    base = {(t["batch"], t["length"]): t["p50"] for row in report["variants"][:1] for t in row["latency"]}
    rows = [
        (
            row["name"],
            f"{t['batch']:,}",
            f"{t['length']:,}",
            *(significant(t[key]) for key in ("p50", "p95", "p99", "iqr", "throughput")),
            factor(base[t["batch"], t["length"]] / t["p50"]),
        )
        for row in report["variants"]
        for t in row["latency"]
    ]
    rounds = report["measured"]["rounds"]
    note = f"{rounds} interleaved rounds, so p99 is nearly the slowest of {rounds}. Speed-up is against {report['baseline']}."
    return Table("latency", "Every variant: latency", note, columns, "lrrrrrrrr", rows)


def facts(report: Record) -> list[tuple[str, str]]:
    """How it was measured, as (name, value)."""
    measured, here, task = report["measured"], report["machine"], report["task"]
    versions = ", ".join(here["packages"].values())
    computed_by = here["cpu"] if measured["device"] == "cpu" else here["accelerator"]
    pruned = "; ".join(asked(item) for item in report["pruning"]["items"])
    rows = [
        ("Base model", report["model"]),
        ("Task", f"{task['kind']}, {', '.join(task['text'])} → {task['label']}; {task['train']}, {task['validation']}"),
        ("Task head", report["head"]),
        ("Stages", " → ".join(row["id"] for row in report["stages"])),
        ("Removed", pruned),
        ("Target", "; ".join(aimed(row) for row in report["targets"])),
        ("Latency", f"{measured['device']}, {measured['rounds']} interleaved rounds in shuffled order, one process a variant"),
        ("Machine", f"{computed_by}, {here['cores']} cores, {here['threads']} used, {here['system']}"),
        ("Instructions", ", ".join(here["instructions"])),
        ("Computed by", "; ".join(f"{RUNTIMES[name].title}: {what}" for name, what in measured["providers"].items())),
        ("Versions", f"Python {here['python']}, {versions}"),
        (
            "Intervals",
            "95 % bootstrap over validation rows, 2,000 draws; differences are paired. One seed, no seed-to-seed spread",
        ),
        ("Seed", str(report["seed"])),
    ]
    return [(name, value) for name, value in rows if value]


def aimed(row: Record) -> str:
    """'target 2.00x, predicted 1.97x, measured 1.94x (ONNX fp32, batch 8 × 128; heads by taylor, neurons by taylor)'."""
    where = (
        f"{RUNTIMES[row['runtime']].label} {row['precision']}, batch {row['batch']} × {row['length']}; "
        if "table" in row
        else ""
    )
    return f"{row['told']} ({where}{', '.join(f'{name} by {criterion}' for name, criterion in row['criterion'].items())})"


def asked(item: Record) -> str:
    """'heads by delta, 6 per layer', 'weights by delta_or_weight, unstructured, 1,234 of 6,170 zero'."""
    if item["structure"] == "weights":
        return f"weights by {item['criterion']}, {item['pattern']}, {item['hidden']:,} of {item['entries']:,} zero"
    everywhere = item["scope"] == "global" or item["structure"] == "layers"
    return f"{item['structure']} by {item['criterion']}, {item['remove']} {'in all' if everywhere else 'per layer'}"
