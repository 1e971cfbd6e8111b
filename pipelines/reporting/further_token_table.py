"""The report's table of what a generating model takes to write one token after another."""

from __future__ import annotations

from typing import Any

from export.latency.further_tokens import TOKENS
from pipelines.reporting.format import factor
from pipelines.reporting.tables import Column, ReportTable, count, digits, limit_share, made, text

Record = dict[str, Any]


def further_token_tables(report: Record) -> list[ReportTable]:
    """The table of further tokens; none without a benchmark, for models that do not generate, and in earlier reports."""
    records = [{**cell, "name": row["name"]} for row in report.get("variants", []) for cell in row.get("further_tokens", [])]
    return [further_tokens(report, records)] if records else []


def further_tokens(report: Record, records: list[Record]) -> ReportTable:
    base = {(cell["batch"], cell["length"]): cell["p50"] for cell in records if cell["name"] == report["baseline"]}
    columns = [
        Column("variant", "l", text("name")),
        Column("texts", "r", count("batch")),
        Column("behind tokens", "r", count("length")),
        Column("a token, p50 ms", "r", digits("p50")),
        Column("IQR ms", "r", digits("iqr")),
        Column("tokens/s", "r", digits("throughput")),
        Column("speed-up", "r", lambda row: factor(base[row["batch"], row["length"]] / row["p50"])),
    ]
    note = (
        f"{TOKENS} tokens of each text, one after the other, on the cached keys and values of prompts of that length; their "
        "mean is one of the samples, which are interleaved. Choosing a token is not in it. Speed-up is against "
        f"{report['baseline']}."
    )
    if report["measured"].get("limits"):
        columns.append(Column("of the limit", "r", limit_share))
        note += " Of the limit: the least time for reading all weights once from memory, or for their FLOPs, over p50."
    return made("further-tokens", "Every variant: tokens one at a time", columns, records, note)
