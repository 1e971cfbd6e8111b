"""The files of a finished sweep: sweep.json, sweep.md and sweep.html; equal work gives equal bytes, however it was run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compressor.errors import CompressError
from pipelines.engine.store import replace_files
from pipelines.reporting.format import markdown
from pipelines.sweeps.pareto import figures_of
from pipelines.sweeps.search_ranges import Range
from pipelines.sweeps.search_summary import SearchSummary, search_figure
from pipelines.sweeps.search_trials import recorded
from pipelines.sweeps.sweep_summary import COMPARED, Spread, SweepResult
from pipelines.sweeps.sweep_trials import SweepPlan, SweepTrial
from pipelines.sweeps.table_file import shown_value
from pipelines.sweeps.trial_run import SCORE, check_line, faults_of

FILES = ("sweep.json", "sweep.md", "sweep.html")

Facts = dict[str, Any]


def write_files(result: SweepResult, facts: Facts, plan: SweepPlan, trials: Sequence[SweepTrial]) -> None:
    """Write the three files, without times, machine or engine: a resumed sweep gives the bytes of an undisturbed one."""
    headline = f"{facts['pipeline']}: {described(plan, trials)}"
    contents = {
        "sweep.json": json.dumps(_record(result, facts, plan, trials), indent=1, ensure_ascii=False),
        "sweep.md": _markdown(result, headline, trials),
        "sweep.html": _page(result, headline, trials),
    }
    replace_files({result.folder / name: f"{text}\n".encode() for name, text in contents.items()})


def described(plan: SweepPlan, trials: Sequence[SweepTrial]) -> str:
    """'12 trials, 3 values of rank x 2 values of epochs x 2 seeds', or 'search of 20 trials, rank 4..64 x 2 seeds'."""
    parts = [_values_of(key, values) for key, values in plan.axes.items()]
    parts += [f"{count} {word}" for count, word in ((plan.seeds, "seeds"), (plan.subsets, "subsets")) if count]
    count = f"search of {plan.search.trials} trials" if plan.search else f"{len(trials)} trials"
    return f"{count}, {' × '.join(parts)}"


def _values_of(key: str, values: list[Any] | Range) -> str:
    if isinstance(values, Range):
        return f"{key} {values}"
    return f"{len(values)} values of {key}" if len(values) > 1 else f"{key} {shown_value(values[0])}"


def _record(result: SweepResult, facts: Facts, plan: SweepPlan, trials: Sequence[SweepTrial]) -> Facts:
    errors = {
        word: {name: _error_record(error) for name, error in found.items()}
        for word, found in (("failed", result.failed), ("unreached", result.unreached))
        if found
    }
    axes = [axis for axis in plan.axes if axis not in result.repetitions]
    return {
        **facts,
        "over": recorded(plan.axes),
        "seeds": plan.seeds,
        "subsets": plan.subsets,
        **({"repetitions": result.repetitions} if result.repetitions else {}),
        "trials": [{"name": trial.name, "values": trial.values, "repeat": trial.repeat} for trial in trials],
        "summary": [asdict(spread) for spread in result.spreads],
        "comparisons": [{**asdict(row), "verdict": row.difference.verdict} for row in result.comparisons],
        "costs": [
            {"cost": name, "setting": setting, "mean": value}
            for name, values in result.costs.items()
            for setting, value in values.items()
        ],
        **({"same_model": [axes[place] for place in result.same_model]} if result.same_model else {}),
        **({"unlearnt": list(result.unlearnt)} if result.unlearnt else {}),
        **({"unlearnt_tasks": of_tasks} if (of_tasks := _unlearnt_tasks(result)) else {}),
        **({"disturbed": list(result.disturbed)} if result.disturbed else {}),
        "artifacts": dict(result.artifacts),
        "trials_of_stages": dict(result.trials_of_stages),
        **({"search": _search_record(result.search)} if result.search else {}),
        **errors,
        **({"failures": [_check_record(failure) for failure in result.failures]} if result.failures else {}),
    }


def _unlearnt_tasks(result: SweepResult) -> dict[str, tuple[str, ...]]:
    """Trial -> the tasks that it has not learnt, of trials with several tasks."""
    return {name: tasks for name, tasks in result.unlearnt.items() if any(tasks)}


def _error_record(error: CompressError) -> Facts:
    """The first mistake of an error, and the `others` if there are several."""
    first, *others = ({"code": fault.code, "what": fault.what} for fault in faults_of(error))
    return {**first, **({"others": others} if others else {})}


def _check_record(failure: Facts) -> Facts:
    return {name: failure[name] for name in ("trial", "stage", "code", "what")}


def _search_record(search: SearchSummary) -> Facts:
    trials = [asdict(trial) for trial in search.trials]
    return {"metric": search.metric, "best": search.best and search.best.number, "command": search.command, "trials": trials}


TableParts = tuple[Sequence[str], Sequence[Sequence[str]], int]
"""Header, rows, and how many columns at the left hold words."""


def _tables(result: SweepResult, trials: Sequence[SweepTrial]) -> list[tuple[str, TableParts]]:
    """(note above it, table) of everything that is told."""
    words = len(result.titles)
    tables = (
        [("The main metric of every task: mean ± standard deviation (runs).", crossed)] if (crossed := _crossed(result)) else []
    )
    if result.search:
        note = f"Trials from best to worst by {result.search.metric}. They were chosen by these validation rows: "
        note += "expect less of the best one on other rows."
        tables.append((note, (result.search.columns, result.search.rows, len(result.titles) + 1)))
    tables.append((_measured(result), (result.columns, result.rows, words + 2)))
    if result.comparisons:
        tables.append((_note(result), (COMPARED, [row.cells() for row in result.comparisons], 3)))
    if result.costs:
        title = ", ".join(result.titles) or "setting"
        rows = [
            (name, ", ".join(setting) or "all", f"{value:,.0f}" if value >= 1000 else f"{value:.10g}")
            for name, values in result.costs.items()
            for setting, value in values.items()
        ]
        tables.append(("Costs, mean over the runs.", (("cost", title, "mean"), rows, 2)))
    made = [(entry, str(result.trials_of_stages[entry]), str(count)) for entry, count in result.artifacts.items()]
    note = f"How many {result.unit}s without an error have a result of each stage, and how many different results these are."
    tables.append((note, (("stage", f"{result.unit}s", "results"), made, 1)))
    sets = [(trial.name, " ".join(_settings(trial))) for trial in trials]
    tables.append((f"What each {result.unit} sets.", ((result.unit, "sets"), sets, 2)))
    return tables


def _crossed(result: SweepResult) -> TableParts | None:
    """Rows and columns as in the paper, where two things are compared and trials have tasks of their own. Of a search, which
    tries few of the combinations, there is none."""
    cells = {spread.setting: spread for spread in result.spreads if spread.metric == SCORE}
    if result.search or len(result.titles) != 2 or not cells:
        return None
    rows, columns = (list(dict.fromkeys(setting[place] for setting in cells)) for place in (0, 1))
    table = [(row, *(_cell(cells.get((row, column))) for column in columns)) for row in rows]
    return (result.titles[0], *columns), table, 1


def _cell(spread: Spread | None) -> str:
    if spread is None or spread.mean is None:
        return ""
    deviation = "" if spread.std is None else f" ± {spread.std:.4f}"
    return f"{spread.mean:.4f}{deviation} ({spread.runs})"


def _settings(trial: SweepTrial) -> list[str]:
    return [*(f"{key}: {trial.values[key]}" for key in trial.values if key in trial.named), *trial.settings]


def _measured(result: SweepResult) -> str:
    """What the figures of every stage are of."""
    aimed = any(spread.metric in ("predicted", "measured") for spread in result.spreads)
    target = "; predicted and measured are of the target" if aimed else ""
    return f"Metrics are of all validation rows or the named file{target}; std is the standard deviation of the sample (n − 1)."


def _note(result: SweepResult) -> str:
    count = len(result.comparisons)
    comparisons = "comparisons" if count > 1 else "comparison"
    return (
        "Paired differences over the same seeds or subsets: *shown* where Student's 95 % interval of the mean difference "
        f"does not contain 0. Each interval stands alone: of {count} {comparisons} between equal settings, about "
        f"{0.05 * count:.10g} would be shown by chance."
    )


def _lines(result: SweepResult) -> list[str]:
    """What is told above the tables: errors, failed checks, and what is not compared."""
    failed = [f"FAILED {one.code} {name}: {one.what}." for name, error in result.failed.items() for one in faults_of(error)]
    unreached = [f"{name}: {error.what}." for name, error in result.unreached.items()]
    return [*failed, *unreached, *map(check_line, result.failures), *result.notes]


def _markdown(result: SweepResult, headline: str, trials: Sequence[SweepTrial]) -> str:
    tables = [f"{note}\n\n{_markdown_table(*grid)}" for note, grid in _tables(result, trials)]
    best = result.search.told(_code) if result.search else []
    return "\n\n".join((f"# {markdown(headline)}", *best, *map(markdown, _lines(result)), *tables))


def _code(text: str) -> str:
    """Any text as Markdown's code: between more backticks than there are together in it."""
    runs = re.findall("`+", text)
    fence = "`" * (1 + max(map(len, runs), default=0))
    return f"{fence} {text} {fence}" if runs else f"{fence}{text}{fence}"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    line = [*("---",) * words, *("---:",) * (len(header) - words)]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, row))} |" for row in (header, line, *rows))


def _markdown_cell(text: str) -> str:
    """Any text in a cell, of which nothing becomes markup; a line ends at <br>."""
    return "<br>".join(map(markdown, text.splitlines()))


def _page(result: SweepResult, headline: str, trials: Sequence[SweepTrial]) -> str:
    from plotly.offline import get_plotlyjs

    from pipelines.reporting.templates import templates

    plots = [*([search_figure(result.search)] if result.search and result.search.best else []), *figures_of(result)]
    figures = [asdict(figure) for figure in plots]
    return (
        templates(Path(__file__).parent)
        .get_template("sweep_page.html.j2")
        .render(
            headline=headline,
            lines=[*(result.search.told() if result.search else []), *_lines(result)],
            tables=[
                {"note": note.replace("*", ""), "header": header, "rows": rows, "words": words}
                for note, (header, rows, words) in _tables(result, trials)
            ],
            figures=figures,
            plotly_js=get_plotlyjs() if figures else "",
        )
    )
