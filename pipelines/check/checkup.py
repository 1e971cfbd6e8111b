"""The report of `compress check` beside faults: the rows as the model will see them, and warnings.

Findings here never stop a run: errors that do are raised by `pipelines.engine.preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.tasks import data_files, named_files
from compressor.tasks.data import task_tokenizer
from compressor.tasks.features import targets_of, tokens_of
from compressor.tasks.reading import read_task, read_tests
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import TaskKind, kind_of
from pipelines.engine.preflight import Ready
from pipelines.engine.stage import entries_after
from pipelines.file.yaml_source import dotted

if TYPE_CHECKING:
    from compressor.tasks import TaskConfig

SHOWN = 3
"""Largest number of lines of a file that a warning names."""
UNBALANCED = 0.9
"""Share of the largest class above which a constant prediction scores well."""


def account_of(ready: Ready) -> dict[str, Any]:
    """The rows of every task, and the warnings about them and about stages, as JSON data."""
    tasks, warnings = {}, [*ready.skipped]
    for path, task in ready.pipeline.all_tasks.items():
        data, kind = read_task(task), kind_of(task.kind)
        tests = read_tests(task, data.label_names)
        # the key of each file as in the pipeline: train, validation, test, or test.NAME
        splits = dict(zip(map(dotted, named_files(task)), (data.train, data.validation, *tests.values()), strict=True))
        tokenizer = task_tokenizer(ready.base.folder, kind)
        tasks[dotted(path)] = {
            key: {"file": str(file), **facts_of(split, kind, task, data.label_names, tokenizer)}
            for (key, split), file in zip(splits.items(), data_files(task), strict=True)
        }
        warnings += [f"{dotted(path)}: {text}" for text in warnings_of(splits, kind, task, tasks[dotted(path)])]
    for entry in (stages := ready.pipeline.stages):
        warnings += [f"{entry.id}: {text}" for text in entry.row.warns(entry.config, entries_after(entry, stages))]
    return {"tasks": tasks, "files": dict(_files(ready)), "warnings": warnings}


def _files(ready: Ready) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files and models that stages name, by stage and key."""
    for entry in ready.pipeline.stages:
        facts = entry.row.beside.facts(entry.config, ready.pipeline.task, ready.base.folder, ready.models_of(entry))
        yield from ((f"{entry.id}.{key}", of_key) for key, of_key in facts.items())


def facts_of(split: Split, kind: TaskKind, task: TaskConfig, names: list[str], tokenizer) -> dict[str, Any]:
    """Rows, labels and lengths in tokens of one split; `cut` counts rows that are truncated for the model."""
    lengths = np.array(tokens_of(tokenizer, split, kind.continues))
    return {
        "rows": len(split),
        "labels": kind.spread(split.labels, names),
        "constant": kind.constant(split.labels),
        "tokens": {
            "median": int(np.median(lengths)),
            "p95": int(np.percentile(lengths, 95)),
            "max": int(lengths.max()),
            # what the model sees of a row
            "mean": float(np.minimum(lengths, task.max_length).mean()),
        },
        "cut": int((lengths > task.max_length).sum()),
        **_cut_targets(split, task, tokenizer),
    }


def _cut_targets(split: Split, task: TaskConfig, tokenizer) -> dict[str, int]:
    """The number of targets that are cut, where the task has a limit."""
    if task.target_length is None:
        return {}
    return {"cut_targets": sum(len(ids) >= task.target_length for ids in targets_of(tokenizer, split))}


def warnings_of(splits: dict[str, Split], kind: TaskKind, task: TaskConfig, facts: dict[str, Any]) -> Iterator[str]:
    """Warnings about these rows that matter before training on them."""
    for key, split in facts.items():
        if split["cut"]:
            what = f"{split['cut']:,} of {counted(split['rows'])} longer than max_length {task.max_length}, cut there"
            yield f"{key}: {what}: the longest has {split['tokens']['max']:,} tokens"
        if split.get("cut_targets"):
            yield f"{key}: {split['cut_targets']:,} of {split['rows']:,} targets longer than target_length, cut there"
        if split["constant"] is not None and split["constant"] >= UNBALANCED:
            yield f"{key}: {_unbalanced(kind, split['constant'])}"
    yield from _shared(splits, kind, task)
    for (key, split), file in zip(splits.items(), data_files(task), strict=True):
        yield from _contradictions(key, split, kind, file)


def _unbalanced(kind: TaskKind, constant: float) -> str:
    """What one prediction for all rows reaches, by the kind's first metric."""
    if kind.metric.key == "accuracy":
        return f"{constant:.1%} of the rows have the same class: a constant prediction reaches that accuracy"
    return f"predicting the same labels for every row reaches a {kind.metric.name} of {constant:.1%}"


def _key(split: Split, row: int, kind: TaskKind) -> Any:
    """Key by which two rows are equal: their texts; for generation also the target, as a prompt may have several."""
    return (split.texts[row], split.labels[row]) if kind.generates else split.texts[row]


def _shared(splits: dict[str, Split], kind: TaskKind, task: TaskConfig) -> Iterator[str]:
    training = {_key(splits["train"], row, kind) for row in range(len(splits["train"]))}
    for (name, split), file in [*zip(splits.items(), data_files(task), strict=True)][1:]:
        if both := [row for row in range(len(split)) if _key(split, row, kind) in training]:
            what = f"{len(both):,} of {len(split):,} {name} rows are in the training file, too"
            yield f"{what}: quality looks better than it is ({file.name}: {_lines(split, both)})"


def _contradictions(name: str, split: Split, kind: TaskKind, path: Path) -> Iterator[str]:
    """Warning about equal texts with different labels."""
    if kind.generates:
        return
    first: dict[Any, Any] = {}
    odd = [row for row, text in enumerate(split.texts) if first.setdefault(text, split.labels[row]) != split.labels[row]]
    if odd:
        what = f"{counted(len(odd))} repeat the text of an earlier row with another label"
        yield f"{name}: {what} ({path.name}: {_lines(split, odd)})"


def counted(rows: int) -> str:
    """Format a number of rows: '1 row', '2,000 rows'."""
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _lines(split: Split, rows: Sequence[int]) -> str:
    more = ", ..." if len(rows) > SHOWN else ""
    return f"{'line' if len(rows) == 1 else 'lines'} {', '.join(f'{split.lines[row]}' for row in rows[:SHOWN])}{more}"


def lines_of(account: dict[str, Any]) -> Iterator[str]:
    """The lines of the report that the terminal shows."""
    for task, splits in account["tasks"].items():
        for key, split in splits.items():
            yield f"{task + '.' + key:<16} {counted(split['rows'])}; {labels_text(split)}"
            tokens = "tokens a row: median {median:,}, 95 % at most {p95:,}, longest {max:,}".format(**split["tokens"])
            yield f"{'':<16} {tokens}; {counted(split['cut'])} cut"
    yield from (f"{name:<16} {facts['told']}" for name, facts in account["files"].items())
    yield from (f"{name:<16} {text}" for name, text in account["needs"]["told"].items())
    yield from (f"warning: {text}" for text in account["warnings"])


def labels_text(split: dict[str, Any]) -> str:
    """'2 classes: 0 48 %, 1 52 %; a constant prediction gets 52.0 %', or the spread of numbers, or entities."""
    spread, constant = split["labels"], split["constant"]
    if constant is not None:
        parts = [f"{name:.20} ({count / split['rows']:.1%})" for name, count in list(spread.items())[:6]]
        classes = f"{len(spread)} classes: {', '.join(parts)}{', ...' if len(spread) > 6 else ''}"
        return f"{classes}; a constant prediction gets {constant:.1%}"
    return ", ".join(f"{name} {value:,.4g}" for name, value in list(spread.items())[:8])
