"""A base that is a classifier already: whose head is trained, and that the user is told."""

import json

import pytest
from transformers import AutoModelForSequenceClassification

from compressor.models.build import HEAD_ORIGINS
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import write_pipeline


@pytest.mark.parametrize("labels", [["a", "b", "c"], ["good", "bad"], ["class0", "class1"]], ids=len)
def test_the_terminal_says_which_head_is_trained(labels, tmp_path, compress):
    """Three classes for a task of two, two others, and its own: never a fault of ours, never in silence."""
    stages = [{"select": {"count": 2}}, {"tune": {"method": "dsee", "rank": 2, "epochs": 0.1}}]
    path = write_pipeline(tmp_path, stages=stages, rows=16)
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=len(labels))
    base.config.id2label = dict(enumerate(labels))
    base.save_pretrained(tmp_path / "model")
    code, printed, faults = compress("run", path, "--out", tmp_path / "runs")
    assert code == 0, faults
    said = [line for line in printed.splitlines() if "task head" in line]
    origin = "kept" if labels == ["class0", "class1"] else "replaced"
    assert said == [f"[2/2] tune    {HEAD_ORIGINS[origin]}"]
    tuned = run_pipeline(load_pipeline(path), tmp_path / "runs").artifacts["tune"]
    assert tuned.metadata["head"] == origin
    state = json.loads((tuned.folder / "state.json").read_text())
    assert state["labels"] == ["class0", "class1"]


def test_a_base_without_a_head_is_nothing_to_speak_of(tmp_path, compress):
    path = write_pipeline(tmp_path, stages=[{"tune": {"method": "lora", "rank": 2, "epochs": 0.1}}], rows=16)
    code, printed, _ = compress("run", path, "--out", tmp_path / "runs")
    assert code == 0 and "task head" not in printed
