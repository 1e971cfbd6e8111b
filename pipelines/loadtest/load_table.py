"""The figures of a load test as a table, and what a reader must know beside it as notes."""

from __future__ import annotations

from typing import Any

from pipelines.reporting.format import percent, significant

Record = dict[str, Any]

COLUMNS = ("load", "answers/s", "in time/s", "p50 ms", "p90", "p99", "p99.9", "batch", "queue ms", "compute ms", "errors")
LIMITS = {
    "busy": "the client was the limit: raise --clients, or send from another machine",
    "late": "the client had to wait for a core, and that time is in the latencies: stop other programs, or send from elsewhere",
}
RISE = 0.01
"""Growth of the server's memory, as a share of it a minute, from which on it is told."""


def level_rows(levels: list[Record]) -> list[list[str]]:
    """A row for each level under COLUMNS; '-' for what was not measured, or not shown by so few requests."""
    return [
        [
            level["load"],
            shown(level["throughput"]),
            shown(level.get("goodput")),
            *(shown(level["latency_ms"][name]) for name in ("p50", "p90", "p99", "p99.9")),
            *(shown(level["server"][name]) for name in ("mean_batch", "queue_ms", "compute_ms")),
            share_of_errors(level),
        ]
        for level in levels
    ]


def share_of_errors(level: Record) -> str:
    count = sum(level["errors"].values())
    return f"{count} ({percent(count / level['requests'])})" if count else "0"


def shown(value: float | None) -> str:
    return "-" if value is None else significant(value)


def notes(test: Record) -> list[str]:
    """What was sent, errors by kind, answers that differ, memory, and whether the clients were the limit."""
    levels = test["levels"]
    lines = [
        f"sent: {test['rows']}" + (f", {significant(test['mean_tokens'])} tokens on average" if test["mean_tokens"] else "")
    ]
    lines += [f"{level['load']}: {count} x {kind}" for level in levels for kind, count in level["errors"].items()]
    return [*lines, *answer_notes(levels), *server_notes(levels), *client_notes(levels)]


def answer_notes(levels: list[Record]) -> list[str]:
    """How the answers compare with those of rows that come alone."""
    counts = {
        key: sum(level["answers"][key] for level in levels) for key in ("answers", "near", "wrong", "changed", "unchecked")
    }
    differences = [level["answers"]["max_difference"] for level in levels]
    worst = significant(None if None in differences else max(differences))
    if not counts["near"] + counts["wrong"] + counts["changed"]:
        lines = [f"answers: all {counts['answers']:,} as for a row that comes alone (largest difference {worst})"]
    else:
        parts = [f"{counts[key]:,} {key}" for key in ("near", "changed", "wrong") if counts[key]]
        lines = [f"answers: of {counts['answers']:,}, {', '.join(parts)}; largest difference {worst}"]
    return lines + ([f"answers not compared, for memory: {counts['unchecked']:,}"] if counts["unchecked"] else [])


def server_notes(levels: list[Record]) -> list[str]:
    """Memory and CPU time of a server on this machine, and requests of others."""
    last, lines = levels[-1]["server"], []
    if "memory_mb" in last:
        rise = last["memory_mb_a_minute"]
        grows = rise is not None and rise > RISE * last["memory_mb"]
        change = f"growing by {significant(rise)} MB a minute" if grows else "steady"
        lines.append(f"server's memory: {significant(last['memory_mb'])} MB, {change}")
        each = ", ".join(shown(level["server"].get("cpu_ms_a_request")) for level in levels)
        lines.append(f"server's CPU ms a request: {each}")
    for level in levels:
        answered = level["server"]["requests"]
        if answered is None:
            told = (
                "the server or its model ended, was started again, or did not tell in time: what it says of itself is left out"
            )
            lines.append(f"{level['load']}: {told}")
            continue
        others = answered - level["requests"]
        if others > 0.1 * level["requests"] + 50:
            lines.append(f"{level['load']}: the model answered about {others} requests of others meanwhile")
    return lines


def client_notes(levels: list[Record]) -> list[str]:
    """The clients' own share, and a warning where it was the limit."""
    used = ", ".join(significant(level["client"]["cores"]) for level in levels)
    late = significant(max(level["client"]["late_ms"] for level in levels))
    lines = [f"clients' cores: {used}; at most {late} ms late (99 % of the time)"]
    for limit, advice in LIMITS.items():
        if limited := [level["load"] for level in levels if level["client"]["limit"] == limit]:
            lines.append(f"{', '.join(limited)}: {advice}")
    return lines
