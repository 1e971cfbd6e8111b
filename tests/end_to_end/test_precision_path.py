"""Tiny models all the way: one whose export chooses its precision, one whose deltas stay apart, with files for CUDA."""

import json

import pytest

from pipelines.config import load_pipeline
from pipelines.runner import run_pipeline
from pipelines.verify import verify
from tests.tiny import write_pipeline

pytestmark = pytest.mark.slow

TUNE = {"tune": {"method": "lora", "rank": 4, "epochs": 4, "learning_rate": 0.02, "batch_size": 8}}
AFTER = [{"deploy": {"name": "tiny"}}, {"benchmark": {"batch": [2], "length": [16], "rounds": 3}}, {"report": None}]


def finished(folder, *stages):
    """(report.json, report.md, folder of the run, artifacts)."""
    made = run_pipeline(load_pipeline(write_pipeline(folder, stages=[TUNE, *stages, *AFTER])), folder / "runs").artifacts
    run = folder / "runs" / "tiny"
    return json.loads((run / "report.json").read_text()), (run / "report.md").read_text(), run, made


def test_what_is_chosen_is_deployed_and_told(tmp_path):
    pytest.importorskip("nncf", reason="the extra openvino is not installed")
    chosen = {"precision": "auto", "runtime": ["onnxruntime", "openvino"], "batch": 2, "length": 16}
    account, page, run, made = finished(tmp_path, {"merge": None}, {"export": chosen})
    kept = made["export"].metadata["auto"]["kept"]
    assert {key: made["deploy"].metadata[key] for key in ("runtime", "precision")} == {
        key: kept[key] for key in ("runtime", "precision")
    }
    assert [row["kept"] for row in account["precision"]["tried"]].count(True) == 1 and len(account["precision"]["tried"]) >= 4
    assert "## Which precision is kept, and why" in page and "a little optimistic" in page
    assert {row["runtime"] for row in account["variants"]} == {"pytorch", kept["runtime"]}
    assert all(check.passed for check in verify(run, serve=False))


def test_deltas_stay_apart_and_files_for_cuda_are_proven_but_not_measured(tmp_path):
    precisions = ["fp32", "int8", "fp16", "bf16"]
    account, _, run, made = finished(tmp_path, {"export": {"merge": False, "precision": precisions}})
    assert [row["kind"] for row in made["export"].metadata["parity"]] == ["onnx", "int8", "fp16", "bf16"] * 2
    size = made["tune"].metadata["trainable"]["body"]
    assert made["export"].metadata["apart"] == {"parameters": size, "macs": size}
    rows = {row["name"]: row for row in account["variants"]}
    assert sorted(rows) == [
        "compressed ONNX fp32",
        "compressed ONNX int8",
        "dense ONNX fp32",
        "dense ONNX int8",
        "dense PyTorch fp32",
    ]
    dense, apart = (rows[f"{name} ONNX fp32"] for name in ("dense", "compressed"))
    assert apart["parameters"] - dense["parameters"] == size
    assert apart["flops"]["16"] - dense["flops"]["16"] == 2 * 16 * size
    assert any(note.startswith("Not measured on this device: dense ONNX bf16, dense ONNX fp16, ") for note in account["notes"])
    assert any(note.startswith("The deltas are kept apart") for note in account["notes"])
    checks = verify(run, serve=False)
    assert all(check.passed for check in checks) and any("bf16" in check.hop for check in checks)
