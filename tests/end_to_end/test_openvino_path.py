"""A tiny model through both runtimes: exported, proven, OpenVINO's int8 on a live Triton, all measured and reported."""

import json
import shutil

import numpy as np
import pytest

from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.end_to_end.test_faults import Run, first_failed
from tests.tiny import write_pipeline

pytestmark = pytest.mark.slow
pytest.importorskip("openvino", reason="the extra openvino is not installed")

STAGES = [
    # every weight, until int8 moves the outputs little: of a hardly tuned model it is refused, on some processors rightly
    {"tune": {"method": "full", "epochs": 6, "learning_rate": 0.002, "batch_size": 8}},
    {"prune": [{"structure": "neurons", "criterion": "weight", "remove": 4}]},
    {"merge": None},
    {"export": {"runtime": ["onnxruntime", "openvino"], "calibration_rows": 24}},
    {"deploy": {"name": "tiny", "runtime": "openvino", "precision": "int8"}},
    {"benchmark": {"batch": [2], "length": [16], "rounds": 6, "machine_limits": False}},
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
    hops = [hop["hop"] for hop in account["parity"]]
    for model in ("dense", "compressed"):
        for words in ("ONNX fp32", "ONNX int8", "OpenVINO fp32", "OpenVINO int8"):
            assert f"{model}: PyTorch -> {words}" in hops
    assert hops[-2:] == ["local session -> Triton", "local session -> Triton, texts"]
    beyond = {hop["hop"] for hop in account["parity"] if not hop["passed"]}
    assert beyond <= {"dense: PyTorch -> ONNX int8"}, "which is only compared with: of a tiny model it may be"


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
    assert "against the fastest dense file, " in account["headline"]
    assert any(line.startswith("Against the fastest dense file, ") for line in account["notes"])
    assert "openvino" in account["machine"]["packages"]
    text = (folder / "report.md").read_text()
    assert "dense OpenVINO fp32" in text and "against OpenVINO fp32" in text


def transposed_weight(path):
    """The pooler's matrix in the file is square: nothing but its values tells."""
    import openvino

    model = openvino.Core().read_model(path)
    (node,) = [one for one in model.get_ordered_ops() if one.get_friendly_name() == "bert.pooler.dense.weight"]
    turned = np.ascontiguousarray(node.get_data().T)
    node.output(0).replace(openvino.opset13.constant(turned).output(0))
    openvino.save_model(model, path.with_name("turned.xml"), compress_to_fp16=False)
    del model, node  # which map the file
    for suffix in (".xml", ".bin"):
        path.with_name("turned.xml").with_suffix(suffix).rename(path.with_suffix(suffix))


def stale_file(path):
    """The dense model's file lies in the place of the compressed one's."""
    for suffix in (".xml", ".bin"):
        shutil.copyfile((path.parents[1] / "dense" / path.name).with_suffix(suffix), path.with_suffix(suffix))


def truncated_weights(path):
    weights = path.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


@pytest.mark.parametrize(
    "fault, file, hop, code",
    [
        (transposed_weight, "model.xml", "compressed -> openvino fp32", "E610"),
        (stale_file, "model.xml", "compressed -> openvino fp32", "E610"),
        (truncated_weights, "model_int8.xml", "compressed -> openvino int8", "E602"),
    ],
)
def test_a_fault_in_a_file_is_seen_at_its_hop(report, tmp_path, fault, file, hop, code):
    """As in test_faults.py, sealed."""
    _, folder, _ = report
    shutil.copytree(folder.parent, tmp_path / "runs")
    run = Run(tmp_path / "runs", file)
    fault(next(run.artifact("export").rglob(f"compressed/**/{file}")))
    run.seal()
    first = first_failed(run, "export")
    assert (first.stage, first.hop, first.code) == ("export", hop, code), first.fault
