"""The tables of benchmarks/peers.py in Markdown: of files, and of the tools that made them."""

from __future__ import annotations

from typing import Any

from export.runtimes.runtime_registry import RUNTIMES

WORKLOADS = ("1 x 128", "8 x 128", "real")
CONTROL_BOUND = 0.03
"""How far a second session of one file may be off."""


def void(ratio: float) -> bool:
    """Whether a column is void for its A/A control."""
    return abs(ratio - 1) > CONTROL_BOUND


def markdown(result: dict[str, Any]) -> str:
    """Both tables: of files, sorted by runtime, precision and time, and of peers."""
    return "\n".join([*head(result["settings"]), "", *file_table(result), "", *peer_table(result["peers"])]) + "\n"


def head(facts: dict[str, Any]) -> list[str]:
    """What was measured, and how to read the tables."""
    command = f"python benchmarks/peers.py RUN --cache DIR --threads {facts['threads']} --rounds {facts['rounds']} --out DIR"
    return [
        "# Peers: what other tools make of the same tuned model",
        "",
        f"`{command}`",
        "",
        f"{facts['cpu']}, {facts['threads']} threads, {', '.join(facts['runtimes'])}, {facts['rounds']} rounds.",
        f"The model is the dense one of the run {facts['run']}: {facts['metric']} {facts['dense']:.2f} in PyTorch on "
        f"{facts['rows']} validation rows.",
        "",
        "- **Every file is opened by the runtimes named above**, all of a runtime in one process, whatever version its tool "
        "has: files are compared, not tools.",
        "- Times are ms of a batch: median and half of the interquartile range. In brackets: the factor over our dense file of "
        "the same runtime and precision, the median over the rounds: above 1 it is faster than ours.",
        f"- `real`: the first {facts['real_rows']} validation rows in batches of 8, in the order of the file.",
        "- Intervals are 95 % bootstraps over the rows; of the change from the dense model in PyTorch, paired.",
        "- `in bf16`: opened as OpenVINO opens any file by default on a processor with bf16. All other OpenVINO rows, "
        "but for our bf16 file, compute in fp32 what is not int8.",
        "- Minutes and lines are of a peer's whole script, and of our whole pipeline file: for dense files minutes of its "
        "stage export, which compares every file with PyTorch, for pruned ones of all stages after the tuning, up to export.",
    ]


def file_table(result: dict[str, Any]) -> list[str]:
    """The rows of files, sorted, then those of the controls."""
    last = {"8 x 128": {"p50": float("inf")}}
    rows = sorted(
        result["files"].values(),
        key=lambda row: (row["runtime"], row["precision"], row.get("times", last)["8 x 128"]["p50"]),
    )
    columns = ("runtime", "precision", "file", result["settings"]["metric"], "to dense, points", *WORKLOADS, "MB", "minutes")
    lines = [line((*columns, "lines", "failed")), "|---|---|---|" + "--:|" * 8 + "---|", *map(file_line, rows)]
    for runtime, control in result["controls"].items():
        cells = [f"{control[name]:.3f}{' (void)' if void(control[name]) else ''}" for name in WORKLOADS]
        lines.append(line((RUNTIMES[runtime].title, "", "A/A control", "", "", *cells, "", "", "", "")))
    return lines


def file_line(row: dict[str, Any]) -> str:
    """A row of the table of files."""
    measured = [""] * (2 + len(WORKLOADS))
    if "times" in row:
        quality = row["quality"]
        (low, high), (down, up) = quality["interval"], quality["change_interval"]
        measured = [f"{quality['value']:.2f} ({low:.1f} to {high:.1f})", f"{quality['change']:+.2f} ({down:+.1f} to {up:+.1f})"]
        measured += [time_cell(row["times"][workload]) for workload in WORKLOADS]
    name = f"**{row['name']}**" if row["ours"] else row["name"]
    about = (f"{row['bytes'] / 1e6:.1f}", minutes_cell(row["minutes"]), str(row["lines"]), row["failure"])
    return line((RUNTIMES[row["runtime"]].title, row["precision"], name, *measured, *about))


def time_cell(timing: dict[str, Any]) -> str:
    factor = "" if timing["over_ours"] is None else f" ({timing['over_ours']:.2f}×)"
    return f"{timing['p50']:.2f} ± {timing['half_iqr']:.2f}{factor}"


def minutes_cell(minutes: float | None) -> str:
    return "" if minutes is None else f"{minutes:.1f}"


def peer_table(peers: dict[str, Any]) -> list[str]:
    """What each tool needs, makes and failed in."""
    lines = [line(("peer", "packages", "files", "minutes", "lines", "failed", "note")), "|---|---|---|--:|--:|---|---|"]
    for name, peer in peers.items():
        files, packages = (", ".join(f"`{part}`" for part in peer[key]) for key in ("files", "packages"))
        about = (minutes_cell(peer["minutes"]), str(peer["lines"]), peer["failure"], peer["note"])
        lines.append(line((f"[{name}](../../{peer['script']})", packages, files, *about)))
    return lines


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
