"""One answer for every row is told: after the training, and at the top of the report."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from compressor.tasks import TaskConfig
from compressor.tasks.task_kind import kind_of
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.reporting.gather import unlearnt_notes
from pipelines.stages.training_verdicts import UNLEARNT, below_constant
from tests.tiny import LEFT_OUT, write_pipeline

STAGES = [
    {"tune": {"method": "full", "epochs": 1, "learning_rate": 1.0, "batch_size": 8}},
    {"merge": None},
    {"export": {"precision": "fp32"}},
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}},
    {"report": None},
]

LOGITS = np.array([[2.0, 1.0], [0.5, 0.1], [3.0, -1.0], [0.2, 0.1]])
NUMBERS = np.array([[0.5]] * 4)


@pytest.mark.parametrize(
    ("kind", "same", "other", "labels"),
    [
        ("classification", LOGITS, LOGITS * [[1], [-1], [1], [1]], np.array([0, 1, 0, 0])),
        ("regression", NUMBERS, NUMBERS * [[1], [2], [1], [1]], np.array([0.0, 1.0, 0.5, 0.2])),
        ("tokens", np.zeros((4, 3)), np.eye(3)[[0, 1, 2, 0]], np.array([[0, 1, 2, 0]])),
    ],
)
def test_one_answer_for_every_row_is_seen(kind, same, other, labels):
    """And a model that tells one row from the others is not called so."""
    one = kind_of(kind)
    assert one.unlearnt(one.quality(*one.metric_inputs(same, labels)))
    assert not one.unlearnt(one.quality(*one.metric_inputs(other, labels)))


def test_less_than_the_largest_class_is_told():
    """Even where the model tells rows apart."""
    kind = kind_of("classification")
    assert kind.constant([0, 1, 0, 0]) == 0.75
    quality = {"quality": {"accuracy": 0.7}, "constant": 0.75}
    assert below_constant(kind, quality) == "accuracy is 70.0 %, below the 75.0 % of a constant prediction"
    assert below_constant(kind, {**quality, "constant": 0.7}) is None
    assert below_constant(kind_of("regression"), {"quality": {"spearman": 0.1}}) is None


def test_it_is_told_while_it_runs_and_for_the_report(tmp_path):
    said = Console(file=io.StringIO(), width=200)
    path = write_pipeline(tmp_path, stages=STAGES, rows=40)
    tuned = run_pipeline(load_pipeline(path), tmp_path / "runs", console=said, until="tune").artifacts["tune"]
    assert tuned.metadata["quality"]["matthews"] == 0
    assert f"{UNLEARNT}: try a lower learning_rate" in said.file.getvalue()
    task = TaskConfig(train="train.tsv", validation="dev.tsv")
    assert f"After tune {UNLEARNT}." in unlearnt_notes(SimpleNamespace(artifacts=(tuned,), task=task))


@pytest.mark.slow
def test_it_is_in_the_report(tmp_path):
    path = write_pipeline(tmp_path, stages=STAGES, rows=40)
    run = run_pipeline(load_pipeline(path), tmp_path / "runs")
    report = (run.artifacts["report"].folder / "report.md").read_text()
    assert f"- After tune {UNLEARNT}.\n" in report
