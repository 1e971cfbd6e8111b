"""benchmarks/gpu.py on a CPU: its FLOPs, its surgery, and one whole run of a tiny shape."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu

TINY = gpu.SHAPES["tiny"]


@pytest.fixture(scope="module")
def dense():
    return gpu.build(TINY, "cpu", 16)


@pytest.mark.parametrize("model", ["base", "large"])
def test_flops_ratios_with_a_quarter_half_and_three_quarters_of_the_heads_removed(model):
    """Heads hold (4 h + 2 L) of a layer's 12 h + 2 L multiply-adds per token and feature; the rest of the model is small."""
    shape = gpu.SHAPES[model]
    ratios = [shape.without(heads, 0).flops(128) / shape.flops(128) for heads in (1 / 4, 1 / 2, 3 / 4)]
    expected = {"base": [0.912, 0.824, 0.737], "large": [0.913, 0.827, 0.74]}
    assert [round(ratio, 3) for ratio in ratios] == expected[model]


def test_variants_of_bert_base():
    left = [(name, shape.heads, shape.neurons) for name, shape in gpu.variants(gpu.SHAPES["base"]).items()]
    assert left == [
        ("dense", 12, 3072),
        ("dense again", 12, 3072),
        ("3 of 12 heads removed", 9, 3072),
        ("6 of 12 heads removed", 6, 3072),
        ("9 of 12 heads removed", 3, 3072),
        ("half FFN removed", 12, 1536),
        ("6 of 12 heads + half FFN removed", 6, 1536),
    ]


@pytest.mark.parametrize("shape", gpu.variants(TINY).values(), ids=list(gpu.variants(TINY)))
def test_flops_and_logits_of_a_pruned_model(dense, shape):
    """The closed form equals PyTorch's counter under eager attention, and removed equals masked."""
    ids = torch.randint(TINY.vocabulary, (3, 16), generator=torch.Generator().manual_seed(0))
    model = gpu.pruned(dense, shape)
    assert (gpu.logits(model, ids) - gpu.logits(gpu.masked(dense, shape), ids)).abs().max() < 1e-5
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        gpu.logits(model, ids)
    assert counter.get_total_flops() == shape.flops(16, batch=3)


def test_the_check_sees_a_wrong_removal_and_a_nan(dense):
    ids, shape = torch.arange(16).view(1, 16), TINY.without(1 / 2, 0)
    wrong = gpu.pruned(dense, shape)
    wrong.bert.encoder.layer[0].attention.output.dense.weight.neg_()
    with pytest.raises(gpu.CheckFailed, match="wrong: logits differ"):
        gpu.agree("wrong", gpu.logits(wrong, ids), gpu.logits(gpu.masked(dense, shape), ids), 1e-4)
    with pytest.raises(gpu.CheckFailed, match="differ by nan"):
        gpu.agree("wrong", torch.tensor([math.nan]), torch.zeros(1), 1e-4)


def test_a_whole_run(tmp_path):
    arguments = ["--device", "cpu", "--models", "tiny", "--batches", "8", "1", "--length", "16", "--rounds", "6"]
    assert gpu.main([*arguments, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu-on-cpu.json").read_text())
    assert [(row["batch"], row["variant"]) for row in result["rows"]] == [(b, v) for b in (1, 8) for v in gpu.variants(TINY)]
    assert {row["rounds"] for row in result["rows"]} == {6} and result["left_out"] == []
    assert all(row["p25_ms"] <= row["p50_ms"] <= row["p75_ms"] for row in result["rows"])
    assert all(row["latency_ratio"] == 1 for row in result["rows"] if row["variant"] == "dense")
    assert result["machine"]["torch"] == torch.__version__ and set(result["peaks"]["matmul_tflops"]) == {"fp32"}
    tables = (tmp_path / "gpu-on-cpu.md").read_text()
    assert tables.count("\n| 1 | ") == tables.count("\n| 8 | ") == 7 and "## BERT-tiny, fp32, length 16" in tables


def test_what_the_time_limit_leaves_out_is_said(tmp_path):
    """A limit that had passed before the first model."""
    assert gpu.main(["--device", "cpu", "--small", "--time-limit", "0.001", "--out", str(tmp_path)]) == 0
    assert "- BERT-base fp32 batch 1: no time left" in (tmp_path / "gpu-on-cpu.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--modes", "graphs"], "CUDA graphs need a GPU"),
        (["--rounds", "2"], "at least 5"),
        (["--batches", "0"], "0 is not above 0"),
        (["--time-limit", "-1"], "-1 is not above 0"),
        (["--models", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_wrong_arguments(arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.parse([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2 and said in capsys.readouterr().err
