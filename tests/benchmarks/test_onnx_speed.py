"""benchmarks/onnx_speed.py with times that are given: its factors, and when it calls a column void."""

import json

import pytest

from benchmarks import onnx_speed
from tests.pipelines.toys import write_project

FILES = ("ours fp32", "ours int8", "ours bf16", "peer fp32", "peer int8")
NAMES = [f"{plan} {file}" for plan in onnx_speed.PLANS for file in FILES]


@pytest.mark.parametrize(("again", "code"), [(10.2, 0), (10.4, 3)])
def test_factors_are_over_the_peer_of_the_same_plan_and_precision(tmp_path, monkeypatch, again, code):
    walls = {name: 10.0 if "ours" in name else 15.0 if "int8" in name else 12.0 for name in NAMES} | {onnx_speed.AGAIN: again}
    times = {name: [(wall, 2 * wall)] * 4 for name, wall in walls.items()}
    monkeypatch.setattr(onnx_speed, "files", lambda folder, scratch: {})
    monkeypatch.setattr(onnx_speed, "measure", lambda paths, threads, rounds, opened: {"8 x 128": times})
    model = write_project(tmp_path / "project").parent / "model"
    monkeypatch.setattr("sys.argv", ["onnx_speed.py", str(model), "--out", str(tmp_path / "out")])
    assert onnx_speed.main() == code
    cell = json.loads((tmp_path / "out" / "onnx_speed.json").read_text())["models"]["model"]["8 x 128"]
    assert cell["void"] == (code == 3)
    assert cell["rows"]["pruned ours int8"]["over_peer"] == 1.5 and cell["rows"]["dense ours fp32"]["over_peer"] == 1.2
    assert cell["rows"]["dense ours bf16"]["over_peer"] is None, "the peer has no such file"
    table = (tmp_path / "out" / "onnx_speed.md").read_text()
    assert "| dense ours bf16 | 10.00 ± 0.00 (-) |" in table
    assert "| dense ours int8 | 10.00 ± 0.00 (1.50×) |" in table and ("(void)" in table) == (code == 3)
