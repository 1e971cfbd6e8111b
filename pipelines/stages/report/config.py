"""Stage `report`: what the run achieved, as report.json, report.md and one self-contained report.html."""

from __future__ import annotations

import json
from typing import Any

from pipelines.engine.stage import Inputs, Stage, StageConfig, Workspace


class ReportConfig(StageConfig):
    """Nothing to choose: everything that was measured is shown."""


def run(config: ReportConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Gather the run's account and write it in three forms; the metadata is what a terminal shows of it."""
    from pipelines.reporting.gather import gather
    from pipelines.reporting.render import to_html, to_markdown

    measurements = json.loads((inputs.nearest("measurements").folder / "measurements.json").read_text(encoding="utf-8"))
    report = gather(inputs, measurements)
    pages = {
        "report.json": json.dumps(report, indent=1, ensure_ascii=False) + "\n",
        "report.md": to_markdown(report),
        "report.html": to_html(report),
    }
    for name, text in pages.items():
        (workspace.folder / name).write_text(text, encoding="utf-8")
    return {"headline": report["headline"], "summary": report["summary"]}


STAGE = Stage(
    name="report",
    summary="show dense and compressed side by side: report.html, report.md, report.json",
    config=ReportConfig,
    produces="report",
    needs=("measurements",),
    accepts=("*",),
    uses_dense=True,
    reads_data=False,
    packages=("plotly", "jinja2"),
    version=6,
    run=run,
)
