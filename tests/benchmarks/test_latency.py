"""benchmarks/latency.py with times that are given: when it calls a run void, and what it then ends with."""

import json

import pytest

from benchmarks import latency
from export.latency.measure import summarize
from tests.pipelines.toys import write_project

PLANS = ("dense", "3 heads")
NAMES = (*(f"{plan} {kind}" for plan in PLANS for kind in ("fp32 fused", "int8")), "dense fp32 unfused", latency.CONTROL)


@pytest.mark.parametrize(("control", "code"), [(10.2, 0), (9.8, 0), (10.4, 3), (9.6, 3)])
def test_a_run_whose_control_is_off_is_void_and_ends_in_3(tmp_path, monkeypatch, capsys, control, code):
    model, result = write_project(tmp_path / "project").parent / "model", tmp_path / "out.json"
    # batch 1 is always right: one void shape makes the run void
    times = {1: 10.0, 8: control}
    monkeypatch.setattr(latency, "variants", lambda folder, scratch, length: ([], {"dense": 100, "3 heads": 90}))
    monkeypatch.setattr(
        latency,
        "measure",
        lambda graphs, shapes, rounds: [
            summarize(name, *shape, [times[shape[0]] if name == latency.CONTROL else 10.0] * rounds)
            for shape in shapes
            for name in NAMES
        ],
    )
    monkeypatch.setattr("sys.argv", ["latency.py", "--model", str(model), "--json", str(result)])
    assert latency.main() == code
    assert ("VOID" in capsys.readouterr().out) == (code == 3)
    tables = json.loads(result.read_text())["tables"]
    assert [one["valid"] for one in tables.values()] == [True, code == 0]
