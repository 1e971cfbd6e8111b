"""Stage `report`: the results of the run, as report.json, report.md and one self-contained report.html."""

from __future__ import annotations

from pipelines.engine.stage import Stage, StageConfig


class ReportConfig(StageConfig):
    """No options: everything that was measured is shown; without a benchmark quality and sizes, and no latency."""


STAGE = Stage(
    name="report",
    summary="show dense and compressed side by side: report.html, report.md, report.json",
    config=ReportConfig,
    produces="report",
    needs=("model",),
    accepts=("*",),
    uses_dense=True,
    reads_data=False,
    packages=("plotly", "jinja2"),
    version=8,
    run="pipelines.stages.report.run:run",
)
