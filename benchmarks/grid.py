"""What benchmarks that train share: GLUE's files as tasks, and ordinary pipelines on one store, made or only looked up."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Artifact
from pipelines.file.config import load_pipeline

Row = dict[str, str]
"""Columns of a row."""


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


def held_apart(rows: Sequence[Row], count: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(`count` rows to hold back, the others, both in random order) of rows that are sentences and phrases cut from them, as in
    SST-2: no other row stands word for word in the sentence of a row held back, nor does a row held back stand in another.

    Most rows drawn at random would stand in others. Raises ValueError for too few rows.
    """
    draw = random.Random(seed)
    owner = _sentence_of_phrases([row["text"] for row in rows])
    sentences = sorted({number for number in owner.values() if number >= 0})
    places: dict[int, list[Row]] = {}
    for row in rows:
        places.setdefault(owner[_words(row["text"])], []).append(row)
    drawn, held = set(), []
    for number in draw.sample(sentences, len(sentences)):
        if len(held) >= count:
            break
        drawn.add(number)
        held += places.get(number, [])
    if len(held) < count:
        raise ValueError(f"{len(held)} rows can be held apart, not {count}")
    inside = {part for row in held for part in _parts(_words(row["text"]))}
    others = [row for row in rows if owner[_words(row["text"])] not in drawn and _words(row["text"]) not in inside]
    return draw.sample(held, count), draw.sample(others, len(others))


def _sentence_of_phrases(texts: Iterable[str]) -> dict[str, int]:
    """Every run of words of the texts -> the number of the one sentence, a text that stands in no other, which holds it; -1
    where several do."""
    owner: dict[str, int] = {}
    for number, text in enumerate(sorted({_words(text) for text in texts}, key=lambda words: (-words.count(" "), words))):
        if text not in owner:
            for part in _parts(text):
                owner[part] = number if owner.get(part, number) == number else -1
    return owner


def _words(text: str) -> str:
    """The words of a text with one space between them."""
    return " ".join(text.split())


def _parts(words: str) -> set[str]:
    """Every run of successive words."""
    each = words.split(" ")
    return {" ".join(each[start:end]) for start in range(len(each)) for end in range(start + 1, len(each) + 1)}


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
