"""What benchmarks that train share: GLUE's files as tasks, and ordinary pipelines on one store, made or only looked up."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from rich.console import Console

from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Artifact
from pipelines.file.config import load_pipeline


def rows_of(path: Path, task: str) -> Iterator[dict[str, str]]:
    """`text`, for pairs also `second`, and `label` of every row of one of GLUE's files; quotes in them are literal."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        if task == "cola":
            yield from ({"text": row[3], "label": row[1]} for row in reader)
            return
        next(reader)
        if task == "sst2":
            yield from ({"text": row[0].strip(), "label": row[1]} for row in reader)
        elif task == "rte":
            yield from ({"text": row[1].strip(), "second": row[2].strip(), "label": row[3]} for row in reader)
        else:
            yield from ({"text": row[7].strip(), "second": row[8].strip(), "label": row[9]} for row in reader)


def train_file(source: Path) -> Path:
    """The training file in one of GLUE's folders."""
    return next(path for path in (source / "train.tsv", source / "train.tsv.gz") if path.is_file())


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_task(task: str, source: Path, folder: Path, count: int) -> dict:
    """train.jsonl (`count` rows, or all, drawn with a fixed seed) and dev.jsonl; returns the `task:` block."""
    every = list(rows_of(train_file(source), task))
    drawn = random.Random(0).sample(every, min(count, len(every)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", drawn), ("dev", list(rows_of(source / "dev.tsv", task)))):
        write_rows(folder / f"{name}.jsonl", rows)
    files = {"train": "train.jsonl", "validation": "dev.jsonl", "label": "label"}
    if task == "stsb":
        return {"kind": "regression", **files, "text": ["text", "second"], "max_length": 128}
    return {**files, "text": "text", "max_length": 64}


def run_file(file: dict, path: Path, work: Path, *, train: bool) -> dict[str, Artifact]:
    """Write a pipeline file and run it on the store below `work`: artifacts by stage; without `train`, those that are there."""
    path.write_text(yaml.safe_dump(file, sort_keys=False))
    return run_pipeline(load_pipeline(path), work, dry_run=not train, console=Console(quiet=True)).artifacts
