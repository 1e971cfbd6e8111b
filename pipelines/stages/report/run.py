"""The work of stage `report`: gather what the run measured and write it as report.json, report.md and report.html."""

from __future__ import annotations

import json
from typing import Any

from compressor.json_numbers import without_infinity
from pipelines.engine.stage import Inputs, Workspace
from pipelines.reporting.candidates import NO_BENCHMARK, why_unmeasured
from pipelines.reporting.gather import gather
from pipelines.reporting.render import to_html, to_markdown
from pipelines.stages.report.config import STAGE, ReportConfig


def run(config: ReportConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Collect the run's record and write it in three formats; the metadata is what the terminal shows of it."""
    report = _gathered(inputs)
    pages = {
        "report.json": json.dumps(without_infinity(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": to_markdown(report),
        "report.html": to_html(report),
    }
    for name, text in pages.items():
        (workspace.folder / name).write_text(text, encoding="utf-8")
    return {"headline": report["headline"], "summary": report["summary"]}


def _gathered(inputs: Inputs) -> dict[str, Any]:
    """The record of the run; without latency where no compressed model was timed."""
    if inputs.tasks:
        from pipelines.reporting.task_report import gather_tasks

        return gather_tasks(inputs, STAGE)
    benchmark = inputs.nearest("measurements")
    measurements = json.loads((benchmark.folder / "measurements.json").read_text(encoding="utf-8")) if benchmark else None
    why = NO_BENCHMARK if measurements is None else why_unmeasured(measurements)
    if why:
        from pipelines.reporting.unmeasured import gather_unmeasured  # loads the models, and torch with them

        return gather_unmeasured(inputs, STAGE, why)
    return gather(inputs, measurements)
