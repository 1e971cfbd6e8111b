"""What several benchmarks refuse before they measure anything."""

import importlib

import pytest

from benchmarks.arguments import round_count


@pytest.mark.parametrize("script", ["generation", "latency", "lengths", "onnx_speed", "rpca", "switch", "tiles", "train_step"])
def test_one_round_is_too_few_for_quartiles(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--rounds", "1"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{script}").main()
    assert "--rounds: 1 is too few for quartiles" in capsys.readouterr().err
    assert round_count("2") == 2
