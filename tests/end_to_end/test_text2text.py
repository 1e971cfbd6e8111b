"""A tiny T5 from its data to a report: tuned, pruned in both stacks, recovered, merged and scored by what it generates."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import compressor.models.auto  # noqa: F401 (the pruned type)
from compressor import load
from compressor.errors import UserErrors
from compressor.models.anatomy import matrices_of
from compressor.models.modules import EVERYTHING
from compressor.tasks.reading import read_task
from pipelines.engine.preflight import check_inputs, make_plan
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import BaseModelReference, Inputs
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from pipelines.stages.select.run import untuned_model
from pipelines.stages.trainings import starting_model
from tests.tiny import write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
TUNE = {"tune": {"method": "lora", "rank": 4, "modules": "all", "epochs": 12, "label_smoothing": 0.05, **FAST}}
STAGES = [
    TUNE,
    {"prune": [
        {"structure": "heads", "criterion": "taylor", "remove": 1},
        {"structure": "cross_heads", "criterion": "delta", "remove": 1},
        {"structure": "neurons", "criterion": "weight", "remove": 0.25},
    ]},
    {"recover": {"method": "same", "epochs": 5, "distill": "both", "control": False, **FAST}},
    {"merge": None},
    {"report": None},
]  # fmt: skip


@pytest.mark.slow
def test_from_data_to_a_report(tmp_path):
    path = write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=STAGES, rows=96)
    run = run_pipeline(load_pipeline(path), tmp_path / "runs")
    quality = run.artifacts["merge"].metadata["quality"]
    assert quality["accuracy"] > 0.9 and quality["exact_match"] > 0.7 and quality["rouge_2"] > 0.7
    assert all(hop["passed"] for made in run.artifacts.values() for hop in made.metadata.get("parity", []))
    folder = run.artifacts["merge"].folder
    ids = {"input_ids": torch.tensor([[5, 9, 3]]), "decoder_input_ids": torch.tensor([[0, 4]])}
    with torch.no_grad():
        stock, ours = (model(**ids).logits for model in (AutoModelForSeq2SeqLM.from_pretrained(folder), load(folder)))
    assert torch.equal(stock, ours)
    report = json.loads((run.folder / "report.json").read_text())
    assert "of a token" in report["headline"] and report["measured"] is None and len(report["generated"]["scores"]) == 9
    assert [row["metric"] for row in report["summary"]][-3:] == [
        *("parameters", "non-zeros of the merged weights", "FLOPs of a row of 32 tokens")
    ]
    page = (run.folder / "report.html").read_text()
    assert 'id="kept-plot"' in page and 'id="tradeoff-plot"' not in page
    assert [check.fault for check in verify(run.folder, serve=False) if not check.passed] == []


SPEEDUP = {"prune": {"target": {"speedup": 1.2, "length": 16}}}


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ([TUNE, {"merge": None}, {"export": None}, {"deploy": {"name": "x"}}], "E242 .*stages.2.*not exported, deployed"),
        ([TUNE, SPEEDUP], "E242 .*target of speedup times an exported file"),
    ],
)
def test_what_cannot_be_is_told_before_training(stages, code, tmp_path):
    path = write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=stages, rows=8)
    with pytest.raises(UserErrors, match=code):
        make_plan(check_inputs(load_pipeline(path)))


def test_positions_are_chosen_in_the_model_that_is_tuned(tmp_path):
    """By the weights alone, too: a T5 that classifies has other paths, and nothing there would be trained."""
    task = load_pipeline(write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=[TUNE], rows=8)).task
    found = Inputs(BaseModelReference("./model", tmp_path / "model", ""), task, 0)
    models = untuned_model(found), starting_model(found, read_task(task))
    seen, tuned = ([matrix.path for matrix in matrices_of(model, EVERYTHING)] for model in models)
    assert seen == tuned
