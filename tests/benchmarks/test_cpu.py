"""benchmarks/cpu.py with times that are given: what it prints, what it measures again, and what it ends with."""

import json
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("openvino", reason="the extra openvino is not installed")

from benchmarks import cpu
from compressor import load
from compressor.anatomy import layers_of
from compressor.checkpoint import save_checkpoint
from compressor.pruning.surgery import Removal, remove
from export.latency import summarize
from tests.compressor.conftest import tiny

NAMES = [*(f"{plan} {kind}" for plan in cpu.PLANS for kind in cpu.KINDS), cpu.CONTROL]
MODELS = [tiny("bert"), cpu.halved(tiny("bert"))]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs main; `control` is what the second copy takes when the first takes 10 ms. Returns the code and the cells timed."""

    def run(*arguments, control=10.1):
        timed = []

        def time_shape(live, batch, length, rounds, shuffle, *, seconds):
            timed.append((batch, length))
            times = {cpu.CONTROL: control, "dense OpenVINO static int8": 2.5, "pruned OpenVINO static int8": 2.0}
            return [summarize(name, batch, length, [times.get(name, 10.0)] * rounds) for name in NAMES]

        monkeypatch.setattr(cpu, "time_shape", time_shape)
        monkeypatch.setattr(cpu, "plans_of", lambda reference: dict(zip(cpu.PLANS, MODELS, strict=True)))
        monkeypatch.setattr(cpu, "contenders", lambda models, scratch: [])
        monkeypatch.setattr(cpu, "workers", lambda variants, threads: nullcontext([]))
        return cpu.main(["--out", str(tmp_path), "--models", "minilm", "--rounds", "5", *arguments]), timed

    return run


def test_the_table_compares_with_eager_and_the_best_dense(bench, tmp_path, capsys):
    assert bench("--batches", "8", "--lengths", "32", "128") == (0, [(8, 32), (8, 128)])
    assert "| pruned OpenVINO static int8 | 2.00 | 0.00 | 5.00 | 5.00 | 1.25 |" in capsys.readouterr().out
    cells = json.loads((tmp_path / "cpu.json").read_text())["cells"]
    assert "pruned to 0.5" in (tmp_path / "cpu.md").read_text() and cells["minilm 8x32"]["flops_left"] < 0.6
    assert list(cells) == ["minilm 8x32", "minilm 8x128"] and not cells["minilm 8x32"]["void"]


def test_a_second_run_goes_on_and_measures_void_cells_again(bench, tmp_path):
    assert bench("--batches", "1", "--lengths", "32", control=10.4) == (3, [(1, 32)])
    assert "void" in (tmp_path / "cpu.md").read_text()
    assert bench("--batches", "1", "8", "--lengths", "32") == (0, [(1, 32), (8, 32)])
    assert bench("--batches", "1", "8", "--lengths", "32") == (0, [])


def test_no_time_left_measures_nothing(bench):
    assert bench("--time-limit", "0.001") == (0, [])


def test_a_shape_without_weights_becomes_a_checkpoint(tmp_path):
    """In the shape that its config has by default; halved, and loaded again by the worker that will time it."""
    save_checkpoint(cpu.plans_of("random:distilbert")["pruned"], tmp_path, tmp_path)
    assert [layer.heads for layer in layers_of(load(tmp_path))] == [6] * 6


def test_a_run_says_what_is_pruned(tmp_path):
    pruned = tiny("distilbert", torch.float32)
    remove(pruned, {1: Removal([0], [2])})
    save_checkpoint(pruned, tmp_path, tmp_path)
    models = cpu.plans_of(f"random:distilbert,{tmp_path}")
    assert [layer.heads for layer in layers_of(models["pruned"])] == [4, 3, 4]
    assert [layer.heads for layer in layers_of(models["dense"])] == [12] * 6
