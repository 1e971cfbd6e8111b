"""Stage `report`: the results of the run, as report.json, report.md and one self-contained report.html."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.engine.stage import Entry, Problem, Stage, StageConfig, entries_after


class ReportConfig(StageConfig):
    """No options: everything that was measured is shown; without a benchmark quality and sizes, and no latency."""


def check(config: ReportConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    measured = next((entry for entry in reversed(earlier) if entry.row.measures), None)
    if measured is None:
        return
    later = entries_after(measured, earlier)
    if changed := next((entry for entry in later if entry.row.publishes_model or entry.row.exports), None):
        what = f"'{measured.id}' has not measured what '{changed.id}' makes"
        yield Problem("E107", what, f"Put a benchmark after '{changed.id}', or the report before it")
        return
    served = next((entry for entry in reversed(later) if entry.row.serves), None)
    if served and served.config.device == "cuda" and measured.config.device == "cpu":
        what = f"'{served.id}' serves on CUDA, and '{measured.id}' measures on the CPU"
        yield Problem("E643", what, f"Use device: cuda in '{measured.id}', or device: cpu in '{served.id}'")


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
    version=13,
    run="pipelines.stages.report.run:run",
    check=check,
    with_tasks=lambda config, many, kinds: (),
)
