"""A tiny model through both runtimes: exported, proven, OpenVINO's int8 on a live Triton, all measured and reported."""

import json

import pytest

from pipelines.config import load_pipeline
from pipelines.runner import run_pipeline
from tests.tiny import write_pipeline

pytestmark = pytest.mark.slow
pytest.importorskip("openvino", reason="the extra openvino is not installed")

STAGES = [
    {"tune": {"method": "lora", "rank": 4, "epochs": 4, "learning_rate": 0.02, "batch_size": 8}},
    {"prune": [{"structure": "neurons", "criterion": "weight", "remove": 4}]},
    {"merge": None},
    {"export": {"runtime": ["onnxruntime", "openvino"], "calibration_rows": 24}},
    {"deploy": {"name": "tiny", "runtime": "openvino", "precision": "int8"}},
    {"benchmark": {"batch": [2], "length": [16], "rounds": 3}},
    {"report": None},
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The account of one run, and its folder."""
    folder = tmp_path_factory.mktemp("project")
    path = write_pipeline(folder, stages=STAGES)
    made = run_pipeline(load_pipeline(path), folder / "runs").artifacts
    return json.loads((folder / "runs" / "tiny" / "report.json").read_text()), folder / "runs" / "tiny", made


def test_every_hop_of_both_runtimes_is_proven(report):
    account, _, _ = report
    hops = [hop["hop"] for hop in account["parity"] if hop["passed"]]
    for model in ("dense", "compressed"):
        for words in ("ONNX fp32", "ONNX int8", "OpenVINO fp32", "OpenVINO int8"):
            assert f"{model}: PyTorch -> {words}" in hops
    assert hops[-1] == "local session -> Triton"


def test_what_is_deployed_is_openvinos_int8(report):
    account, _, made = report
    deployed = made["deploy"]
    assert (deployed.metadata["runtime"], deployed.metadata["precision"]) == ("openvino", "int8")
    served = deployed.folder / "repository" / "tiny" / "1"
    exported = made["export"]
    path = exported.folder / exported.metadata["files"]["compressed"]["openvino"]["int8"]["path"]
    assert (served / "model.xml").read_bytes() == path.read_bytes()
    assert account["deployed"] == "compressed OpenVINO int8"


def test_the_report_shows_every_runtime_and_compares_within_the_deployed_one(report):
    account, folder, _ = report
    names = [f"{model} {words}" for model in ("dense", "compressed") for words in ("ONNX fp32", "ONNX int8")]
    names += [name.replace("ONNX", "OpenVINO") for name in names]
    assert {row["name"] for row in account["variants"]} == {"dense PyTorch fp32", *names}
    assert [step["variant"] for step in account["steps"]] == [
        "dense PyTorch fp32",
        "dense OpenVINO fp32",
        "compressed OpenVINO fp32",
        "compressed OpenVINO int8",
    ]
    assert "against dense OpenVINO)" in account["headline"]
    assert any(line.startswith("Against the fastest dense variant of any runtime") for line in account["notes"])
    assert "openvino" in account["machine"]["packages"]
    text = (folder / "report.md").read_text()
    assert "dense OpenVINO fp32" in text and "against OpenVINO fp32" in text
