"""benchmarks/latency.py with times that are given: when it calls a run void, and what it then ends with."""

import json

import pytest

from benchmarks import latency
from compressor.models.anatomy import layers_of
from export.latency.measure import summarize
from tests.pipelines.toys import write_project
from tests.tiny import write_model

PLANS = ("dense", "3 heads")
NAMES = (*(f"{plan} {kind}" for plan in PLANS for kind in ("fp32 fused", "int8")), "dense fp32 unfused", latency.CONTROL)


@pytest.mark.parametrize(
    ("control", "waited", "code"), [(10.2, 0.0, 0), (9.8, 0.0, 0), (10.4, 0.0, 3), (9.6, 0.0, 3), (10.2, 0.5, 3)]
)
def test_a_run_whose_control_is_off_or_that_was_disturbed_is_void_and_ends_in_3(
    tmp_path, monkeypatch, capsys, control, waited, code
):
    model, result = write_project(tmp_path / "project").parent / "model", tmp_path / "out.json"
    # batch 1 is always right: one void shape makes the run void
    times = {1: 10.0, 8: control}
    monkeypatch.setattr(latency, "variants", lambda folder, scratch, length: ([], {"dense": 100, "3 heads": 90}))
    monkeypatch.setattr(
        latency,
        "measure",
        lambda graphs, shapes, rounds: [
            summarize(name, *shape, [times[shape[0]] if name == latency.CONTROL else 10.0] * rounds, waited * (shape[0] == 8))
            for shape in shapes
            for name in NAMES
        ],
    )
    monkeypatch.setattr("sys.argv", ["latency.py", "--model", str(model), "--json", str(result)])
    assert latency.main() == code
    assert ("VOID" in capsys.readouterr().out) == (code == 3)
    tables = json.loads(result.read_text())["tables"]
    assert [one["valid"] for one in tables.values()] == [True, code == 0]


def test_heads_that_share_keys_and_values_go_together(tmp_path):
    """Of a decoder's four heads in two groups: half is one of them, a quarter is none."""
    folder = write_model(tmp_path, "llama", num_key_value_heads=2)
    layers = layers_of(latency.pruned(folder, 0.5, 0.5))
    assert {(layer.heads, layer.units("heads"), layer.neurons) for layer in layers} == {(2, 1, 12)}
    with pytest.raises(SystemExit, match=r"0\.25 of 2 heads .* is no whole number"):
        latency.pruned(folder, 0.25, 0.0)
