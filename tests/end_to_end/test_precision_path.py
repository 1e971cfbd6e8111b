"""Tiny models all the way: one whose export chooses its precision, one whose deltas stay apart, with files for CUDA."""

import json
import shutil

import pytest

from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from tests.end_to_end.test_faults import (
    Run,
    first_failed,
    half_precision_overflow,
    transposed_weight_in_the_graph,
    wrong_padding_side,
)
from tests.tiny import LEFT_OUT, write_pipeline

pytestmark = pytest.mark.slow

TUNE = {"tune": {"method": "lora", "rank": 4, "epochs": 4, "learning_rate": 0.02, "batch_size": 8}}
AFTER = [
    {"deploy": {"name": "tiny"}},
    {"benchmark": {"batch": [2], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}},
    {"report": None},
]


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
    written = [(row["model"], row["precision"]) for row in account["variants"][1:]]
    assert written == [
        (name, precision) for name in ("dense", "compressed") for precision in dict.fromkeys(("fp32", kept["precision"]))
    ]
    assert all(check.passed for check in verify(run, serve=False))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A run whose deltas stay apart, with a file in every precision, for CUDA, too."""
    precisions = ["fp32", "int8", "fp16", "bf16"]
    return finished(tmp_path_factory.mktemp("apart"), {"export": {"merge": False, "precision": precisions}})


def test_deltas_stay_apart_and_files_for_cuda_are_proven_but_not_measured(apart):
    account, _, run, made = apart
    assert [row["kind"] for row in made["export"].metadata["parity"]] == ["fp32", "int8", "fp16", "bf16"] * 2
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
    # rounded as in the export, with the deltas apart: else no name in `excluded` would be one of the model's
    expected = [row["rounding"] for row in made["export"].metadata["parity"] if row["rounding"]]
    found = [check.parity["rounding"] for check in checks if check.parity and check.parity["rounding"]]
    assert len(found) == 2 and sorted(found) == pytest.approx(sorted(expected), rel=1e-6)


@pytest.mark.parametrize("fault", [transposed_weight_in_the_graph, wrong_padding_side, half_precision_overflow])
def test_a_fault_in_the_fp16_file_is_seen_at_its_hop(apart, tmp_path, fault):
    """fp16 may differ by 2e-2, and not by a fault of test_faults.py."""
    _, _, folder, _ = apart
    shutil.copytree(folder.parent, tmp_path / "runs")
    run = Run(tmp_path / "runs", "model_fp16.onnx")
    fault(run)
    run.seal()
    first = first_failed(run, "export")
    assert (first.stage, first.hop, first.code) == ("export", "compressed -> fp16", "E610"), first.fault
