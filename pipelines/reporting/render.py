"""report.json's content as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from pipelines.reporting.facts import about, facts
from pipelines.reporting.figures import figures, losses
from pipelines.reporting.format import markdown
from pipelines.reporting.generated import generated_tables
from pipelines.reporting.growth_report import allocation_figures, allocation_tables
from pipelines.reporting.report_table import ReportTable
from pipelines.reporting.tables import tables, trainable
from pipelines.reporting.task_report import task_figure, task_tables
from pipelines.reporting.templates import templates


def environment():
    """jinja2 environment for the templates beside this file."""
    live = templates(Path(__file__).parent)
    live.filters |= {"md": markdown, "bound": bound}
    return live


def bound(text: str) -> str:
    """Keep numbers with their units, and short brackets, on one line by non-breaking spaces."""
    text = re.sub(r"(?<=\d) (?=[×%]|ms|[KMG]?B\b)", "\u00a0", text)
    return re.sub(r"\([^()]{1,20}\)", lambda match: match.group().replace(" ", "\u00a0"), text)


def tables_of(report: dict[str, Any]) -> list[ReportTable]:
    """Every table of the report, those of generated texts last."""
    if "reads" in report:
        return [*task_tables(report), trainable(report)]
    return [*tables(report), *allocation_tables(report), *generated_tables(report)]


def figures_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every figure of the report."""
    if "reads" in report:
        return [asdict(figure) for figure in (task_figure(report), losses(report)) if figure is not None]
    return [*figures(report), *allocation_figures(report)]


def to_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    return environment().get_template("report.md.j2").render(report=report, tables=tables_of(report), facts=facts(report))


def to_html(report: dict[str, Any]) -> str:
    """The report as one page: plotly is inlined, no other file and no network access is needed."""
    summary, *others = tables_of(report)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            summary=summary,
            tables=others,
            facts=facts(report),
            about=about(report),
            figures=figures_of(report),
            plotly_js=get_plotlyjs(),
        )
    )
