"""A tiny T5 from its data to a report: tuned, pruned in both stacks, recovered, merged, scored by what it generates, served."""

import json

import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import AutoModelForSeq2SeqLM

import compressor.models.auto  # noqa: F401 (the pruned type)
from compressor import load
from compressor.errors import UserErrors
from compressor.models.anatomy import matrices_of
from compressor.models.modules import EVERYTHING
from compressor.models.reference import Reference
from compressor.tasks.reading import read_task
from pipelines.engine.preflight import check_inputs, make_plan
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Inputs
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
    {"export": None},
    {"deploy": {"name": "writer"}},
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6}},
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
    assert "for each further token" in report["headline"] and len(report["generated"]["scores"]) == 9
    assert any("the encoder over a whole source" in note for note in report["notes"])
    assert [row["metric"] for row in report["summary"]][-1] == "p50 of a further token, batch 1 behind 16"
    page = (run.folder / "report.html").read_text()
    assert 'id="kept-plot"' in page and 'id="tradeoff-plot"' in page
    checks = verify(run.folder)
    assert [check.fault for check in checks if not check.passed] == []
    assert {"served, generated texts", "compressed -> int8, generating"} <= {check.hop for check in checks}


@pytest.mark.slow
def test_both_files_are_exported_and_damage_of_either_is_found(tmp_path):
    """Fewer stages than above; the encoder's file counts where the decoder's does."""
    stages = [{"tune": {"method": "lora", "rank": 2, "epochs": 1, **FAST}}, {"merge": None}, {"export": {"precision": "fp32"}}]
    path = write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=stages)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    # training begins a target as config.json says, and so do the files
    other = {"decoder_start_token_id": 5, "eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(other))
    run = run_pipeline(load_pipeline(path), tmp_path / "runs")
    made = run.artifacts["export"]
    start = config.get("decoder_start_token_id") or config["pad_token_id"]
    assert json.loads((made.folder / "compressed" / "export.json").read_text())["generation"]["start"] == start != 5
    file = made.metadata["files"]["compressed"]["onnxruntime"]["fp32"]
    parts = [made.folder / "compressed" / f"{name}_model.onnx" for name in ("encoder", "decoder")]
    assert made.folder / file["path"] == parts[1] and file["bytes"] == sum(part.stat().st_size for part in parts)
    assert file["quality"]["likelihood"] == pytest.approx(run.artifacts["merge"].metadata["quality"]["likelihood"], abs=1e-5)
    (hop,) = [row for row in made.metadata["parity"] if row["hop"].startswith("compressed")]
    assert hop["generated_agreement"] == 1.0 and "generating, padded on the left" in hop["batches"]
    graph = onnx.load(parts[0])
    weight = next(one for one in graph.graph.initializer if len(one.dims) == 2)
    weight.CopyFrom(numpy_helper.from_array(3 * numpy_helper.to_array(weight), weight.name))
    onnx.save(graph, parts[0])
    faults = {check.hop: check.fault for check in verify(run.folder) if not check.passed}
    assert "compressed -> onnx" in faults


SPEEDUP = {"prune": {"target": {"speedup": 1.2, "length": 16}}}
EXPORTED = [TUNE, {"merge": None}, {"export": {"precision": "fp32"}}]


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        ([*EXPORTED, {"benchmark": {"profile": True}}], "E242 .*stages.3.*profile.*two files"),
        ([*EXPORTED, {"benchmark": {"device": "cuda"}}], "E242 .*stages.3.*device.*on the CPU only"),
        ([TUNE, SPEEDUP], "E242 .*target of speedup times one exported file"),
        ([TUNE, {"merge": None}, {"export": {"runtime": "openvino"}}], "E646 .*a model that generates"),
    ],
)
def test_what_cannot_be_is_told_before_training(stages, code, tmp_path):
    path = write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=stages, rows=8)
    with pytest.raises(UserErrors, match=code):
        make_plan(check_inputs(load_pipeline(path)))


def test_positions_are_chosen_in_the_model_that_is_tuned(tmp_path):
    """By the weights alone, too: a T5 that classifies has other paths, and nothing there would be trained."""
    task = load_pipeline(write_pipeline(tmp_path, kind="text2text", model_type="t5", stages=[TUNE], rows=8)).task
    found = Inputs(Reference("./model", tmp_path / "model", ""), task, 0)
    models = untuned_model(found), starting_model(found, read_task(task))
    seen, tuned = ([matrix.path for matrix in matrices_of(model, EVERYTHING)] for model in models)
    assert seen == tuned
