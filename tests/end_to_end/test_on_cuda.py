"""The whole path on a GPU: files in half precision, served there and timed there. Without one, what of it the CPU can run."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from export.runtimes.onnxruntime import RUNTIME
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from serving.layout.knobs import TOKENS_ON_A_GPU
from serving.repository import read_config
from tests.tiny import LEFT_OUT, write_pipeline

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and RUNTIME.offers("cuda") and importlib.util.find_spec("pytriton")),
    reason="needs a GPU, PyTorch and ONNX Runtime for CUDA, and Triton",
)
TUNE = {"tune": {"method": "lora", "rank": 4, "epochs": 2, "learning_rate": 0.02, "batch_size": 8}}
DEPLOY = {"deploy": {"name": "tiny", "device": "cuda"}}
TIMED = {"batch": [2], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"], "device": "cuda"}


@needs_gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_file_is_served_and_timed_on_the_gpu(tmp_path, precision):
    stages = [
        TUNE,
        {"merge": None},
        {"export": {"precision": [precision]}},
        DEPLOY,
        {"benchmark": TIMED},
        {"report": None},
    ]
    made = run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=stages)), tmp_path / "runs").artifacts
    assert made["deploy"].metadata["precision"] == precision
    assert [hop["passed"] for hop in made["deploy"].metadata["parity"]] == [True, True]
    rows = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())["variants"]
    assert {row["runtime"] for row in rows} == {"pytorch", "onnxruntime"}
    assert all(check.passed for check in verify(tmp_path / "runs" / "tiny"))


@pytest.mark.skipif(importlib.util.find_spec("pytriton") is None, reason="needs Triton")
@pytest.mark.slow
def test_a_stage_that_serves_on_a_gpu_does_its_work(tmp_path, monkeypatch):
    """Where CUDA is said to be there and the CPU's kernels stand for it: everything but placing the model on a card."""
    monkeypatch.setattr("pipelines.engine.preflight.accelerator", lambda: "a card")
    monkeypatch.setitem(RUNTIME.providers, "cuda", "CPUExecutionProvider")
    kinds = SimpleNamespace(KIND_CPU=ModelInstanceGroup.KIND_CPU, KIND_GPU=ModelInstanceGroup.KIND_AUTO)
    monkeypatch.setattr("serving.layout.model_config.ModelInstanceGroup", kinds)
    path = write_pipeline(tmp_path, stages=[TUNE, {"merge": None}, {"export": {"precision": ["fp32", "int8"]}}, DEPLOY])
    made = run_pipeline(load_pipeline(path), tmp_path / "runs").artifacts["deploy"]
    assert (made.metadata["precision"], [hop["passed"] for hop in made.metadata["parity"]]) == ("fp32", [True, True])
    text = read_config(made.folder / "repository" / "tiny-text")
    assert text.parameters["max_batch_tokens"].string_value == str(TOKENS_ON_A_GPU)
