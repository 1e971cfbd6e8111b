"""The part of a report on a growing Ω: in which tensors its positions were, step by step (ID3 section 6, figures 7 to 9)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import numpy as np

from compressor.models.modules import EVERYTHING
from compressor.selection.allocation import ALLOCATION
from pipelines.engine.stage import Artifact, Inputs
from pipelines.reporting.figures import COMPRESSED, DENSE, MARGIN, PALE, Figure, layout
from pipelines.reporting.format import percent
from pipelines.reporting.report_table import Column, ReportTable, count, digits, made, text

Record = dict[str, Any]

SHOWN = 6
"""Steps of a stage in the table, evenly spaced."""
BLOCK = re.compile(r"^(.*?\.\d+)\.")
"""The path of a tensor's block: up to its first number."""


def allocation_record(inputs: Inputs) -> Record:
    """{"allocation": one record for each training with a growing Ω}; {} where there is none."""
    records = [_of_stage(artifact) for artifact in inputs.artifacts if ALLOCATION in artifact.files]
    return {"allocation": records} if records else {}


def _of_stage(artifact: Artifact) -> Record:
    """The statistics of every recorded step, and the shares of the budget by module and block of the first and last one."""
    facts = json.loads((artifact.folder / ALLOCATION).read_text(encoding="utf-8"))
    first, last = (_shares(facts, step["entries"]) for step in (facts["steps"][0], facts["steps"][-1]))
    blocks = _blocks(facts)
    return {
        "stage": artifact.entry,
        "tensors": len(facts["matrices"]),
        "blocks": len(blocks),
        "modules": _modules(facts, blocks),
        "first": first,
        "last": last,
        "steps": [{key: value for key, value in step.items() if key != "entries"} for step in facts["steps"]],
    }


def _block_of(matrix: Record) -> str | None:
    found = BLOCK.match(matrix["path"])
    return found.group(1) if found else None


def _blocks(facts: Record) -> list[str]:
    return list(dict.fromkeys(filter(None, map(_block_of, facts["matrices"]))))


def _modules(facts: Record, blocks: list[str]) -> list[str]:
    """The names of the modules in blocks, in their usual order."""
    present = dict.fromkeys(matrix["module"] for matrix in facts["matrices"] if _block_of(matrix) in blocks)
    return sorted(present, key=lambda name: EVERYTHING.index(name) if name in EVERYTHING else len(EVERYTHING))


def _shares(facts: Record, entries: list[int]) -> list[list[float]]:
    """(modules, blocks): the part of the budget that a step's entries in each are."""
    blocks = _blocks(facts)
    modules = _modules(facts, blocks)
    counts = np.zeros((len(modules), len(blocks)))
    for matrix, number in zip(facts["matrices"], entries, strict=True):
        if (block := _block_of(matrix)) is not None:
            counts[modules.index(matrix["module"]), blocks.index(block)] += number
    return (counts / facts["budget"]).tolist()


def allocation_tables(report: Record) -> list[ReportTable]:
    """The statistics of some steps; none in reports without a growing Ω."""
    records = [
        {"stage": record["stage"], **record["steps"][place]}
        for record in report.get("allocation", ())
        for place in sorted({number * (len(record["steps"]) - 1) // (SHOWN - 1) for number in range(SHOWN)})
    ]
    columns = [
        Column("stage", "l", text("stage")),
        Column("step", "r", count("step")),
        Column("positions", "r", count("chosen")),
        Column("tensors without any", "r", lambda row: percent(row["tensor_sparsity"])),
        Column("entropy", "r", digits("entropy")),
    ]
    note = (
        "Positions: those in Ω at that step; with deselected: freeze also those that left it and keep their values. Tensors "
        "without any: ID3's tensor sparsity. Entropy: of the tensors' shares of such entries, over that of equal shares. "
        "Every recorded step is in the stage's allocation.json."
    )
    return [made("allocation", "Where Ω grew", columns, records, note)] if records else []


def allocation_figures(report: Record) -> list[Record]:
    """For each training with a growing Ω its first and last allocation, and the statistics of its steps."""
    return [
        asdict(figure)
        for record in report.get("allocation", ())
        for figure in (*([allotted(record)] if record["blocks"] else []), statistics(record))
    ]


def allotted(record: Record) -> Figure:
    """The budget by module and block, in the first and in the last recorded step."""
    look = {"type": "heatmap", "y": record["modules"], "x": list(range(record["blocks"])), "xgap": 2, "ygap": 2}
    look |= {"colorscale": [[0, PALE], [1, COMPRESSED]], "showscale": False, "hoverinfo": "x+y+z"}
    ends = [(key, record["steps"][place]["step"]) for key, place in (("first", 0), ("last", -1))]
    data, axes = [], {}
    for place, (key, step) in enumerate(ends):
        number = str(place + 1) if place else ""
        data.append({**look, "z": record[key], "xaxis": f"x{number}"})
        title = {"text": f"block, step {step:,}", "standoff": 4}
        axes[f"xaxis{number}"] = {"showgrid": False, "domain": [0.52 * place, 0.48 + 0.52 * place], "title": title}
    most = [max(map(max, record[key])) for key, _ in ends]
    caption = (
        f"Share of the budget in each module of each block, in the first and in the last recorded step of {record['stage']}. "
        f"The deepest colours are {percent(most[0])} and {percent(most[1])}."
    )
    side = {"autorange": "reversed", "showgrid": False, "type": "category"}
    frame = layout(90 + 26 * len(record["modules"]), margin={**MARGIN, "b": 52}, **axes, yaxis=side)
    return Figure(f"allocation-{record['stage']}", f"Where Ω is: {record['stage']}", caption, data, frame, wide=True)


def statistics(record: Record) -> Figure:
    """Tensor sparsity and entropy of every recorded step."""
    steps = record["steps"]
    words = {"tensor_sparsity": ("tensors without a position", DENSE), "entropy": ("entropy", COMPRESSED)}
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [step["step"] for step in steps],
            "y": [step[key] for step in steps],
            "line": {"color": color, "width": 2},
        }
        for key, (name, color) in words.items()
    ]
    frame = layout(xaxis={"title": {"text": "step"}}, yaxis={"range": [0, 1.05]})
    caption = (
        f"Share of the {record['tensors']:,} tensors without a position of Ω, and entropy of the shares of chosen entries "
        f"(1: equal in all tensors), while {record['stage']} trains."
    )
    title = f"Sparsity of Ω: {record['stage']}"
    return Figure(f"sparsity-{record['stage']}", title, caption, data, {**frame, "showlegend": True})
