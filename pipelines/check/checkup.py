"""The report of `compress check` beside faults: the rows as the model will see them, and warnings.

Findings here never stop a run: errors that do are raised by `pipelines.engine.preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.accelerator import gpu
from compressor.models.reference import Reference
from compressor.tasks import data_files, ending, named_files
from compressor.tasks.data import task_tokenizer
from compressor.tasks.decoding.generate_texts import prompts_of_a_batch
from compressor.tasks.decoding.prompt_items import items_of
from compressor.tasks.features import sequences_of, targets_of, tokens_of
from compressor.tasks.kinds.classification import INTEGER
from compressor.tasks.listing import NO_LABEL
from compressor.tasks.reading import read_task, read_tests
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import TaskKind, kind_for, kind_of
from pipelines.check.auto_tokenizer import texts_read_otherwise
from pipelines.engine.preflight import Ready
from pipelines.engine.stage import entries_after
from pipelines.file.yaml_source import dotted

if TYPE_CHECKING:
    from compressor.tasks import TaskConfig

SHOWN = 3
"""Largest number of lines of a file that a warning names."""
UNBALANCED = 0.9
"""Share of the largest class above which a constant prediction scores well."""
RARE = 0.01
"""Share of the rows below which labels that are words, where the others are numbers, are taken for slips."""


def account_of(ready: Ready) -> dict[str, Any]:
    """The rows of every task, and the warnings about them and about stages, as JSON data."""
    tasks, warnings = {}, [*ready.skipped, *_tokenizer_warnings(ready.base)]
    for path, task in ready.pipeline.all_tasks.items():
        data, kind = read_task(task), kind_of(task.kind)
        tests = read_tests(task, data.label_names)
        # the key of each file as in the pipeline: train, validation, test, or test.NAME
        splits = dict(zip(map(dotted, named_files(task)), (data.train, data.validation, *tests.values()), strict=True))
        tokenizer = task_tokenizer(ready.base.folder, kind)
        tasks[dotted(path)] = {
            key: {"file": str(file), **facts_of(split, kind, task, data.label_names, tokenizer), **_texts_of(key, split, task)}
            for (key, split), file in zip(splits.items(), data_files(task), strict=True)
        }
        warnings += [f"{dotted(path)}: {text}" for text in warnings_of(splits, kind, task, tasks[dotted(path)])]
    for entry in (stages := ready.pipeline.stages):
        warnings += [f"{entry.id}: {text}" for text in entry.row.warns(entry.config, entries_after(entry, stages))]
    return {"tasks": tasks, "files": dict(_files(ready)), "warnings": warnings}


def _tokenizer_warnings(base: Reference) -> Iterator[str]:
    if texts := texts_read_otherwise(base.folder, base.sha256):
        shown = " with ".join(map(repr, texts))
        what = f"transformers' AutoTokenizer gives {shown} other tokens than tokenizer.json, by which texts are read here"
        yield f"model: {what}; elsewhere load that file by PreTrainedTokenizerFast"


def _files(ready: Ready) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files and models that stages name, by stage and key."""
    for entry in ready.pipeline.stages:
        facts = entry.row.beside.facts(entry.config, ready.pipeline.task, ready.base.folder, ready.models_of(entry))
        yield from ((f"{entry.id}.{key}", of_key) for key, of_key in facts.items())


def facts_of(split: Split, kind: TaskKind, task: TaskConfig, names: list[str], tokenizer) -> dict[str, Any]:
    """Rows, labels and lengths in tokens of one split; `sequences` are the rows of the model that each row is, `cut` counts
    rows that are truncated for the model."""
    lengths = np.array(tokens_of(tokenizer, split, kind.continues))
    return {
        "rows": len(split),
        "sequences": sequences_of(split),
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


def _texts_of(key: str, split: Split, task: TaskConfig) -> dict[str, Any]:
    """What is generated each time a model is scored by texts for a file, where it is: those of validation wherever the task has
    `decode`, those of files that are only scored where the main metric is of texts (`decides`)."""
    decides, config = kind_for(task).metric.of_texts, task.decode
    if config is None or key == "train" or (key != "validation" and not decides):
        return {}
    import torch

    prompts, together = len(items_of(split, config)), prompts_of_a_batch(config, gpu() or torch.device("cpu"))
    steps = math.ceil(prompts / together) * config.max_new_tokens
    return {"generated": {"tokens": prompts * config.beams * config.max_new_tokens, "steps": steps, "decides": decides}}


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
        if kind.classes is not TaskKind.classes:  # else the figures of the labels are not by class
            yield from (f"{key}: {text}" for text in _odd_labels(split, kind))
    yield from _shared(splits, kind, task)
    for (key, split), file in zip(splits.items(), data_files(task), strict=True):
        yield from _contradictions(key, split, kind, file)
        if ending(file) == ".tsv":
            yield from _quoted(key, split, file)


def _unbalanced(kind: TaskKind, constant: float) -> str:
    """What one prediction for all rows reaches, by the kind's first metric."""
    if kind.metric.key == "accuracy":
        return f"{constant:.1%} of the rows have the same class: a constant prediction reaches that accuracy"
    return f"predicting the same labels for every row reaches a {kind.metric.name} of {constant:.1%}"


def _odd_labels(split: dict[str, Any], kind: TaskKind) -> Iterator[str]:
    """Warnings about classes that may be none: marks of missing labels, and a few words where the others are numbers."""
    counts = {name: count for name, count in split["labels"].items() if count}
    for mark in (mark for mark in NO_LABEL if mark in counts):
        what = f"{counted(counts[mark])} with the label '{mark}', read as a class"
        yield f"{what}; if it marks missing labels, delete them"
    words = [name for name in counts if not INTEGER.fullmatch(name) and name not in NO_LABEL]
    numbers = any(INTEGER.fullmatch(name) for name in counts)
    # one of several labels of a row may well be rare
    if kind.metric.key == "accuracy" and numbers and sum(counts[name] for name in words) < RARE * split["rows"]:
        for name in words:
            what = f"label '{name:.60}' ({counted(counts[name])}) is a word where the others are numbers"
            yield f"{what}: it is one more class, and all are in alphabetical order (10 before 2)"


def _quoted(name: str, split: Split, path: Path) -> Iterator[str]:
    """Warning about cells with quotes around them and doubled ones inside, as in a table that pandas wrote."""
    rows = [row for row, texts in enumerate(split.texts) if any(map(_looks_quoted, (*texts, split.labels[row])))]
    if rows:
        what = f"{counted(len(rows))} with quoted texts: .tsv has no quoting, the quotes are read as text"
        yield f"{name}: {what}; save the file as .csv ({path.name}: {_lines(split, rows)})"


def _looks_quoted(cell: Any) -> bool:
    """Whether a cell is a text in quotes, with all quotes inside it doubled."""
    if not isinstance(cell, str) or len(cell) < 2 or not cell[0] == cell[-1] == '"':
        return False
    return '""' in cell[1:-1] and '"' not in cell[1:-1].replace('""', "")


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
    lines = list(dict.fromkeys(split.lines[row] for row in rows))  # a line with several targets is as many rows
    more = ", ..." if len(lines) > SHOWN else ""
    return f"{'line' if len(lines) == 1 else 'lines'} {', '.join(map(str, lines[:SHOWN]))}{more}"


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
