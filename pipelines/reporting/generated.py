"""The part of a report on generated texts: their scores after every stage against the dense model, and examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.decoding.text_quality import change, read_statistics
from pipelines.engine.stage import TEXTS, Artifact, Inputs
from pipelines.reporting.format import digits_of, interval, signed, verdict
from pipelines.reporting.report_table import Column, ReportTable, made, text
from pipelines.stages.generated_texts import value_in_words

Record = dict[str, Any]


def generated_record(inputs: Inputs) -> Record:
    """The scores of every stage with generated texts, and the examples of dense and last model; empty where there is none."""
    stages = [artifact for artifact in inputs.artifacts if "generated" in artifact.metadata]
    if not stages:
        return {}
    last, facts = stages[-1], stages[-1].metadata["generated"]
    dense = inputs.dense if inputs.dense and "generated" in inputs.dense.metadata else None
    return {
        "prompts": facts["prompts"],
        "references": facts["references"],
        "settings": inputs.task.decode.model_dump(exclude_none=True),
        "scores": [row for stage in stages for row in scores_of(stage, dense, inputs.task.decode.metrics)],
        "examples": examples(dense, last),
    }


def scores_of(stage: Artifact, dense: Artifact | None, metrics: Sequence[str]) -> Iterator[Record]:
    """One record for each of `metrics`, with the paired difference from the dense model for the others."""
    facts = stage.metadata["generated"]
    compared = dense is not None and stage.id != dense.id
    ours, theirs = (read_statistics(of.folder / TEXTS) for of in (stage, dense)) if compared else ({}, {})
    for key in metrics:
        row = {"stage": stage.entry, "metric": key, "value": facts["values"][key], "interval": facts["intervals"][key]}
        if compared:
            row["change"], row["change_interval"] = change(key, ours[key], theirs[key])
        yield row


def examples(dense: Artifact | None, last: Artifact) -> list[Record]:
    """The recorded examples of the last model, with the dense model's texts for the same prompts."""
    theirs = {row["prompt"]: row["text"] for row in dense.metadata["generated"]["examples"]} if dense else {}
    return [{**row, "dense": theirs.get(row["prompt"], "")} for row in last.metadata["generated"]["examples"]]


def generated_tables(report: Record) -> list[ReportTable]:
    """The tables of the generated texts; none in reports without, or made before there were any."""
    record = report.get("generated")
    return [score_table(record), example_table(record)] if record else []


def score_table(record: Record) -> ReportTable:
    columns = [
        Column("stage", "l", text("stage")),
        Column("metric", "l", lambda row: TEXT_METRICS[row["metric"]].name),
        Column("value", "r", lambda row: value_in_words(row["metric"], row["value"])),
        Column("95 % interval", "r", lambda row: interval(*row["interval"], TEXT_METRICS[row["metric"]].scale)),
        Column("against dense", "l", changed),
    ]
    settings = record["settings"]
    search = f"beam search of width {settings['beams']}" if settings["beams"] > 1 else "greedy search"
    note = (
        f"Texts of at most {settings['max_new_tokens']} tokens by {search} for {record['prompts']:,} validation prompts with "
        f"{record['references']:,} references. A smaller TER is better, of all others a larger value; NIST has no maximum. "
        "Intervals are bootstraps over prompts, paired for differences."
    )
    return made("generated", "Generated texts: scores", columns, record["scores"], note)


def changed(row: Record) -> str:
    """'−1.2 (−1.9 to −0.4): worse than dense'; empty for the dense model itself."""
    if "change" not in row:
        return ""
    scale = TEXT_METRICS[row["metric"]].scale
    values = [scale * value for value in (row["change"], *row["change_interval"])]
    digits = digits_of(*values[1:], 1 if scale > 1 else 2)
    change, low, high = (signed(value, digits).removeprefix("+") for value in values)
    return f"{change} ({low} to {high}): {difference_in_words(row)}"


def difference_in_words(row: Record) -> str:
    """'worse than dense', by the metric's own direction."""
    low, high = row["change_interval"]
    return verdict(-high, -low) if TEXT_METRICS[row["metric"]].falls else verdict(low, high)


def example_table(record: Record) -> ReportTable:
    columns = [
        Column("prompt", "l", text("prompt")),
        Column("dense", "l", text("dense")),
        Column("last model", "l", text("text")),
        Column("references", "l", lambda row: " / ".join(row["references"])),
    ]
    note = "Evenly spread over the prompts, not chosen by quality. The last model is that of the last stage with scores."
    return made("generated-examples", "Generated texts: examples", columns, record["examples"], note)
