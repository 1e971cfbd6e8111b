"""The report of a training of several tasks: what each reaches, what it stores beside the base, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compressor.cost import human_bytes
from compressor.tasks.task_kind import Metric, kind_for
from pipelines.engine.environment import machine
from pipelines.engine.stage import Inputs, Stage
from pipelines.reporting.candidates import Record
from pipelines.reporting.figures import COMPRESSED, DENSE, Figure, interval_whisker, layout
from pipelines.reporting.format import interval, percent, scaled
from pipelines.reporting.gather import failure_notes, run_facts, task_facts, title_of, trainable_rows
from pipelines.reporting.report_table import Column, ReportTable, count, made, text
from pipelines.stages.training_verdicts import UNLEARNT, below_constant

SHOWN = ("task", "metric", "quality", "constant", "bytes", "file")
"""Keys of the summary that the terminal shows."""
PARTS = {"prototype": "the prototype", "layer_scores": "the masks of blocks", "task_scores": "the masks of tasks"}
"""Trained parts of ProPETL, in words."""


def gather_tasks(inputs: Inputs, stage: Stage) -> Record:
    """The whole record of a run of many tasks; `stage` is the one that asks, whose packages are told."""
    from compressor.training.multitask import start_plan  # torch with it

    trained = inputs.nearest("model").metadata
    base = start_plan(inputs.base.folder, inputs.tasks).shape
    tasks = [_task_record(row, inputs) for row in trained["tasks"]]
    bare = base.bytes - 4 * base.head
    files = [_stored("the base, once", bare)]
    files += [_stored(f"shared: {trained['shared_file']['file']}", trained["shared_file"]["bytes"])]
    files += [_stored(f"{row['task']}: {row['file']}", row["bytes"]) for row in tasks]
    beside = sum(row["bytes"] for row in files[1:])
    unlearnt = list(_unlearnt(trained, inputs))
    whole, several = len(tasks) * bare + 4 * base.head, "s" * (len(tasks) > 1)
    return {
        **run_facts(inputs),
        "reads": {name: task_facts(inputs.of_task(name)) for name in inputs.tasks},
        "headline": f"{len(tasks)} task{several} in {human_bytes(beside)} beside one base of {human_bytes(bare)}, where "
        f"{len(tasks)} model{several} tuned in full take{'' if several else 's'} {human_bytes(whole)}",
        "brief": unlearnt,
        "notes": [*failure_notes(inputs), *unlearnt, *_notes(trained)],
        "shown": list(SHOWN),
        "summary": tasks,
        "stored": [*files, _stored(f"{len(tasks)} models, each tuned in full, in comparison", whole)],
        "trainable": trainable_rows(inputs, base.parameters),
        "measured": None,
        "targets": [],
        "pruning": {"items": [], "layers": []},
        "machine": machine([stage], inputs.threads),
    }


def _stored(what: str, size: int) -> Record:
    return {"what": what, "bytes": size}


def _task_record(row: Record, inputs: Inputs) -> Record:
    """A task's row: its figures as they are shown, those of every file, and examples of the texts it generates."""
    kind = kind_for(inputs.tasks[row["task"]], row["labels"] or None)
    metric, quality = kind.metric, row["quality"]
    constant = row.get("constant")
    return {
        "task": row["task"],
        "kind": kind.name,
        "metric": metric.name,
        "quality": scaled(quality[metric.key], metric.scale, metric.unit),
        "interval": interval(*quality["interval"], metric.scale),
        "constant": "" if constant is None else scaled(constant, metric.scale, metric.unit),
        "validation_rows": quality["rows"],
        "training_rows": row["rows"],
        "share": row["probability"],
        "bytes": row["bytes"],
        "file": row["file"],
        "drawn": {
            "value": metric.scale * quality[metric.key],
            "interval": [metric.scale * edge for edge in quality["interval"]],
        },
        "drawn_constant": None if constant is None else metric.scale * constant,
        "measured": [
            {"rows_of": file, "rows": of["rows"], "metrics": _in_words(of, kind.choices)}
            for file, of in {"validation": quality, **row.get("tests", {})}.items()
        ],
        "examples": row.get("generated", {}).get("examples", []),
    }


def _in_words(quality: Record, metrics: list[Metric]) -> str:
    shown = (one for one in metrics if one.key in quality)
    return ", ".join(f"{title_of(one)} {scaled(quality[one.key], one.scale, one.unit)}" for one in shown)


def _unlearnt(trained: Record, inputs: Inputs) -> Iterator[str]:
    """What was not learnt."""
    for row in trained["tasks"]:
        kind = kind_for(inputs.tasks[row["task"]], row["labels"] or None)
        if kind.unlearnt(row["quality"]):
            yield f"{row['task']}: {UNLEARNT}."
        if warning := below_constant(kind, row):
            yield f"{row['task']}: {warning}."


def _notes(trained: Record) -> Iterator[str]:
    """What the trained numbers are, and what is not shown of them."""
    counts = trained["trainable"]
    if parts := [f"{counts[key]:,} {words}" for key, words in PARTS.items() if counts.get(key)]:
        stored = ": of a mask one bit for each number is stored" if len(parts) > 1 else ""
        yield f"{counts['body']:,} trained numbers are {', '.join(parts)}{stored}."
    yield (
        f"A step's rows are of one task, drawn by (number of its training rows)^(1/{trained['temperature']:g}). "
        "No task was trained alone beside it: whether sharing costs or brings quality is not shown here."
    )


def task_tables(report: Record) -> list[ReportTable]:
    """The tables of such a report but that of what was trained."""
    rows = report["summary"]
    every = [{"task": row["task"], **of} for row in rows for of in row["measured"]]
    examples = [{"task": row["task"], **one} for row in rows for one in row["examples"]]
    tables = [
        made(
            "summary",
            "What each task reaches",
            _task_columns(_constants(rows)),
            rows,
            "Each from its own file, loaded on the base.",
        ),
        made("stored", "What is stored", _stored_columns(), report["stored"], "The head of a task is in its file."),
        made("metrics", "Every metric", _metric_columns(), every, "A test file is only scored: it chose nothing."),
        made("generated-examples", "Generated texts", _example_columns(), examples, "Evenly spread over the prompts."),
    ]
    return [table for table in tables if table.rows]


def _constants(rows: list[Record]) -> bool:
    """Whether a constant prediction is told of any task: of texts it is of none."""
    return any(row["constant"] for row in rows)


def _task_columns(constants: bool) -> list[Column]:
    return [
        Column("task", "l", text("task")),
        Column("kind", "l", text("kind")),
        Column("metric", "l", text("metric")),
        Column("quality", "r", text("quality")),
        Column("95 % interval", "r", text("interval")),
        *([Column("of a constant prediction", "r", text("constant"))] if constants else []),
        Column("validation rows", "r", count("validation_rows")),
        Column("training rows", "r", count("training_rows")),
        Column("of the steps", "r", lambda row: percent(row["share"])),
        Column("bytes", "r", count("bytes")),
    ]


def _stored_columns() -> list[Column]:
    return [Column("", "l", text("what")), Column("bytes", "r", count("bytes"))]


def _metric_columns() -> list[Column]:
    named = [("task", "task"), ("rows of", "rows_of")]
    words = Column("metrics", "l", text("metrics"))
    return [*(Column(title, "l", text(key)) for title, key in named), Column("rows", "r", count("rows")), words]


def _example_columns() -> list[Column]:
    columns = [Column(title, "l", text(key)) for title, key in (("task", "task"), ("prompt", "prompt"), ("text", "text"))]
    return [*columns, Column("references", "l", lambda row: " / ".join(row["references"]))]


def task_figure(report: Record) -> Figure:
    """The main metric of every task with its interval, and what one constant prediction reaches, where that is told."""
    rows = report["summary"]
    constants = _constants(rows)
    drawn = [row["drawn"] for row in rows]
    look: dict[str, Any] = {"type": "scatter", "mode": "markers", "x": [row["task"] for row in rows]}
    data = [
        {**look, "name": "trained", "y": [one["value"] for one in drawn], "marker": {"size": 10, "color": COMPRESSED}}
        | interval_whisker(drawn, "value", 1),
    ]
    caption = "The main metric of every task (those that are shares times 100) with its 95 % interval"
    if constants:
        grey = {"y": [row["drawn_constant"] for row in rows], "marker": {"size": 9, "color": DENSE}}
        data.append({**look, "name": "constant", **grey})
        caption += "; grey: one constant prediction"
    frame = layout(xaxis={"showgrid": False}, yaxis={"title": {"text": "main metric"}})
    return Figure("tasks", "Quality, task by task", f"{caption}.", data, {**frame, "showlegend": constants})
