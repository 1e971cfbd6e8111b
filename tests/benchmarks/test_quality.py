"""benchmarks/quality.py: what it makes of GLUE's files, and that every arm is a pipeline."""

import csv
import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import quality
from benchmarks.grid import held_apart
from benchmarks.quality_picture import COLOURS, HEIGHT, LETTER, WIDTH, picture, width_of
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_model

HEADERS = {
    "SST-2": ("sentence", "label"),
    "STS-B": ("index", "genre", "file", "year", "id", "a", "b", "sentence1", "sentence2", "score"),
    "RTE": ("index", "sentence1", "sentence2", "label"),
}
WORDS = ("good film", "bad film", "a bad one", "a good one")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tasks of a few rows."""
    tasks = {name: replace(row, rows=row.rows and 40, held=30) for name, row in quality.TASKS.items()}
    monkeypatch.setattr(quality, "TASKS", tasks)


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    """GLUE's files in small: 100 training rows and 40 of dev.tsv; RTE's test.tsv has no labels."""
    folder = tmp_path_factory.mktemp("glue")
    for name, header in HEADERS.items():
        (folder / name).mkdir()
        for file, count in (("train", 100), ("dev", 40), ("test", 30)):
            with (folder / name / f"{file}.tsv").open("w", newline="") as stream:
                writer = csv.writer(stream, delimiter="\t")
                columns = header[:-1] if file == "test" else header
                writer.writerow(columns)
                writer.writerows([_cell(column, number, file) for column in columns] for number in range(count))
    return folder


def _cell(column: str, number: int, file: str) -> str:
    return str(number % 2) if column in ("label", "score") else f"{WORDS[number % 4]} {number} of {file}"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", quality.TASKS)
def test_no_row_is_in_two_files(name, glue, tmp_path):
    row = quality.TASKS[name]
    quality.write_task(name, glue, tmp_path)
    train, validation = (rows(tmp_path / f"{file}.jsonl") for file in ("train", "validation"))
    assert len(train) == (row.rows or 70) and len(validation) == 70
    held = {one["text"] for one in validation[40:]}
    assert not held & {one["text"] for one in train}
    if row.texts:
        texts = rows(tmp_path / "texts.jsonl")
        assert not held & {one["text"] for one in texts} and all("label" not in one for one in texts)
        assert len(texts) == 70 + (30 if name == "rte" else 0)


def test_no_row_held_back_stands_in_another_one_or_another_in_it():
    sentences = [f"film {a} is a good {b} story" for a in "abcdef" for b in "xyz"]
    texts = [
        *sentences,
        *(text[: len("film a is")] for text in sentences),
        *(text[-len("good x story") :] for text in sentences),
    ]
    held, others = held_apart([{"text": text, "label": "0"} for text in dict.fromkeys(texts)], 4)
    assert len(held) == 4 and len(others) > 10
    padded = [[f" {row['text']} " for row in part] for part in (held, others)]
    assert not any(one in other or other in one for one, other in itertools.product(*padded))
    with pytest.raises(ValueError, match="rows can be held apart, not 1000"):
        held_apart([{"text": text} for text in texts], 1000)


@pytest.mark.parametrize("arm", quality.ARMS)
def test_every_arm_is_a_pipeline(arm, glue, tmp_path):
    model = write_model(tmp_path / "model", "bert", max_position_embeddings=128)
    names = {"id2label": {0: "0", 1: "1"}, "label2id": {"0": 0, "1": 1}}
    teacher = write_model(tmp_path / "teacher", "bert", auto="AutoModelForSequenceClassification", **names)
    task = quality.write_task("sst2", glue, tmp_path)
    stages = quality.Cell("sst2", 3.0, arm).stages(lambda: str(teacher))
    path = tmp_path / "pipeline.yaml"
    file = {"name": "arm", "model": str(model), "task": task, "stages": [{"tune": quality.LORA}, *stages]}
    path.write_text(yaml.safe_dump(json.loads(json.dumps(file))))
    run_pipeline(load_pipeline(path), tmp_path / "runs", dry_run=True)


def test_table_and_picture_are_of_what_is_recorded(tmp_path):
    """Nothing is trained: a cell without figures is left out, differences are to the control of the same seed."""
    runs = {f"sst2-control-{seed}": {"tuned": 85.0, "dense": 86.0, "control": 86.0 + seed} for seed in (0, 1)}
    for seed, measured in ((0, 2.0), (1, 2.1)):
        runs[f"sst2-2x-labels-{seed}"] = {"dense": 86.0, "quality": 85.5 + seed, "measured": measured, "seconds": 60.0}
    runs["sst2-3x-labels-0"] = {"dense": 86.0, "quality": 84.0, "measured": 3.0, "seconds": 60.0}
    (tmp_path / "record.json").write_text(json.dumps({"facts": {}, "runs": runs}))
    record = quality.Record(tmp_path / "record.json", {})
    grid = quality.Grid("sst2", {}, "MODEL", None, tmp_path, record, 2, train=False)
    cells = [quality.Cell("sst2", speedup, arm) for arm in ("labels", "texts") for speedup in (2.0, 3.0)]
    results = quality.Results.of(grid, cells, [0, 1, 2])
    lines = list(quality.table(results))
    assert lines[0].startswith("accuracy x 100: tuned 85.0 ± 0.0, dense 86.0 ± 0.0, control 86.5 ± 0.7")
    assert lines[4:6] == [
        "| 2x | 2.05x | labels | 86.0 ± 0.7 | -0.5 ± 0.0 | 2 | 1.0 |",
        "| 3x | 3.00x | labels | 84.0 | -2.0 | 1 | 1.0 |",
    ]
    assert results.lines() == {"labels": [(2.05, -0.5, 0.0), (3.0, -2.0, 0.0)]}
    assert not any("other work" in line for line in lines)
    for name in ("sst2-2x-labels-1", "sst2-3x-labels-0"):  # timed beside other work: a figure only where there is no other
        runs[name]["waited"] = 0.4
    disturbed = quality.Results(
        grid,
        results.controls,
        {cell: {n: runs[f"sst2-{cell.speedup:g}x-labels-{n}"] for n in made} for cell, made in results.cells.items()},
    )
    assert disturbed.lines() == {"labels": [(2.0, -0.5, 0.0), (3.0, -2.0, 0.0)]}
    uneven = {seed: {**found, "quality": found["quality"] + seed} for seed, found in disturbed.cells[cells[0]].items()}
    spread = replace(disturbed, cells={cells[0]: uneven}).lines()["labels"]
    assert spread == [(2.0, 0.0, pytest.approx(0.5**0.5))], "differences of -0.5 and 0.5"
    assert any(line.startswith("2 models were timed while") for line in quality.table(disturbed))
    drawn = list(ElementTree.fromstring(picture(results.lines(), "accuracy")).iter("{http://www.w3.org/2000/svg}text"))
    assert {"labels", "control", "2x", "3x"} <= {one.text for one in drawn}
    assert all(0 < float(one.get("y")) < HEIGHT and 0 < float(one.get("x")) < WIDTH for one in drawn)


def test_a_picture_tells_many_arms_apart_names_the_longest_and_shows_the_spread():
    """Each has a colour and a shape of its own; a line or two of a dashed circle had been all there was of the later ones."""
    arms = {name: [(3.0, -1.0, 0.0)] for name in quality.ARMS} | {"labels": [(2.0, -0.5, 0.4), (3.0, -2.0, 0.7)]}
    drawn = ElementTree.fromstring(picture(arms, "accuracy"))
    space = "{http://www.w3.org/2000/svg}"
    marks = [
        (one.get("fill"), one.get("d").partition("m")[2]) for one in drawn.iter(f"{space}path") if one.get("fill") in COLOURS
    ]
    assert len(set(marks)) == len(arms) and len(marks) == 2 * len(arms) + 1, "filled, in the plot and in the legend"
    assert [one.get("stroke-dasharray") for one in drawn.iter() if one.get("stroke") in COLOURS] == [None] * (
        len(arms) + len(arms) + 2
    )
    whiskers = [one.get("d") for one in drawn.iter(f"{space}path") if one.get("opacity")]
    assert len(whiskers) == 2, "of the points with a spread"
    texts = {one.text: float(one.get("x")) for one in drawn.iter(f"{space}text")}
    longest = max(quality.ARMS, key=len)
    width = float(drawn.get("viewBox").split()[2])
    assert width == width_of(arms) > WIDTH and texts[longest] + LETTER * len(longest) < width


def test_a_control_below_the_dense_model_is_told_and_rows_are_compared_with_both(tmp_path):
    controls = {seed: {"tuned": 85.0, "dense": 86.0, "control": 85.0 + seed} for seed in (0, 1)}
    cell = quality.Cell("sst2", 2.0, "labels")
    made = {cell: {seed: {"quality": 85.5, "measured": 2.0, "seconds": 60.0} for seed in controls}}
    grid = quality.Grid("sst2", {}, "MODEL", None, tmp_path, None, 2, train=False)
    lines = list(quality.table(quality.Results(grid, controls, made)))
    assert lines[1] == "The control is 0.5 below dense: more training lost quality, so compare with both."
    head, ruler, row = lines[3:6]
    assert row == "| 2x | 2.00x | labels | 85.5 ± 0.0 | +0.0 ± 0.7 | -0.5 ± 0.0 | 2 | 1.0 |"
    assert "| against the control | against dense | seeds |" in head and head.count("|") == ruler.count("|") == row.count("|")
