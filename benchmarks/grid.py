"""What benchmarks that train share: GLUE's files as tasks, and ordinary pipelines on one store, made or only looked up."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import yaml
from rich.console import Console

from pipelines.config import load_pipeline
from pipelines.runner import run_pipeline
from pipelines.stage import Artifact


def rows_of(path: Path, task: str) -> Iterator[tuple[str, str]]:
    """(sentence, label) of one of GLUE's files; quotes in them are literal."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE)
        if task == "sst2":
            next(reader)
            yield from ((row[0].strip(), row[1]) for row in reader)
        else:
            yield from ((row[3], row[1]) for row in reader)


def write_task(task: str, source: Path, folder: Path, count: int) -> dict:
    """train.jsonl (`count` rows drawn with a fixed seed) and dev.jsonl; returns the `task:` block."""
    train = next(path for path in (source / "train.tsv", source / "train.tsv.gz") if path.is_file())
    drawn = random.Random(0).sample(list(rows_of(train, task)), count)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", drawn), ("dev", list(rows_of(source / "dev.tsv", task)))):
        lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"train": "train.jsonl", "validation": "dev.jsonl", "text": "text", "label": "label", "max_length": 64}


def run_file(file: dict, path: Path, work: Path, *, train: bool) -> dict[str, Artifact]:
    """Write a pipeline file and run it on the store below `work`: artifacts by stage; without `train`, those that are there."""
    path.write_text(yaml.safe_dump(file, sort_keys=False))
    return run_pipeline(load_pipeline(path), work, dry_run=not train, console=Console(quiet=True)).artifacts
