"""benchmarks/runtimes.py with times that are given: what it prints, what it measures again, and what it ends with."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

pytest.importorskip("openvino", reason="the extra openvino is not installed")

from benchmarks import runtimes
from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import Removal, remove
from export.latency.measure import LEAST_ROUNDS, Unmeasurable, summarize
from tests.compressor.conftest import tiny

MODELS = {"dense": tiny("bert"), "pruned": runtimes.narrowed(tiny("bert"), 1 / 2)}


def names(bench, kinds):
    return [*(f"{plan} {kind}" for plan in bench.plans for kind in kinds), runtimes.control_of(bench)[1]]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs main; `times` are those that are not 10 ms, 10.1 of the second copy. Returns the code and the cells timed."""

    def run(*arguments, device="cpu", dies="", exporting=0, measuring=0, **times):
        one, timed, clock = runtimes.BENCHES[device], [], [runtimes.STARTED]
        times = {runtimes.control_of(one)[1]: 10.1, **times}

        def time_shape(live, batch, length, rounds, shuffle, *, seconds):
            if dies in live:
                raise Unmeasurable(dies, "out of memory")
            timed.append((batch, length))
            clock[0] += measuring
            return [summarize(name, batch, length, [times.get(name, 10.0)] * rounds) for name in live]

        def contenders(models, scratch, bench, kinds, device):
            clock[0] += exporting
            return [SimpleNamespace(name=name) for name in names(bench, kinds)]

        if exporting:
            monkeypatch.setattr(runtimes.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(runtimes, "time_shape", time_shape)
        monkeypatch.setattr(
            runtimes, "plans_of", lambda reference, shares: {n: MODELS.get(n, MODELS["pruned"]) for n in shares}
        )
        monkeypatch.setattr(runtimes, "contenders", contenders)
        monkeypatch.setattr(runtimes, "workers", lambda variants, threads: nullcontext([each.name for each in variants]))
        rounds = ["--rounds", str(LEAST_ROUNDS)]
        options = ["--out", str(tmp_path), "--device", device, "--models", *one.models, *rounds, *arguments]
        return runtimes.main(options), timed

    return run


OFF = {"dense ONNX fp32 fused, again": 10.4}
FAST = {"dense OpenVINO static int8": 2.5, "pruned OpenVINO static int8": 2.0}
ONE = ("--models", "minilm", "--lengths", "32")


def test_the_table_compares_with_eager_and_the_best_dense(bench, tmp_path, capsys):
    assert bench("--models", "minilm", "--batches", "8", **FAST) == (0, [(8, 32), (8, 128)])
    assert "| pruned OpenVINO static int8 | 2.00 | 0.00 | 5.00 | 5.00 | 1.25 |" in capsys.readouterr().out
    cells = json.loads((tmp_path / "cpu.json").read_text())["cells"]
    assert "FLOPs: pruned to 0.5" in (tmp_path / "cpu.md").read_text()
    assert cells["minilm 8x32"]["flops_left"]["pruned"] < 0.6
    assert list(cells) == ["minilm 8x32", "minilm 8x128"] and not cells["minilm 8x32"]["void"]


def test_the_page_has_the_command_that_was_run(bench, tmp_path):
    """Also of what an earlier run left in the record; a folder is no model that has a name by default."""

    def told():
        return (tmp_path / "cpu.md").read_text().splitlines()[2]

    part = ("--batches", "8", "--kinds", "ONNX fp32,ONNX fp32 fused", "--time-limit", "6000", "--threads", "1")
    bench("--models", "minilm", "mpnet=/a/folder", "two=random:bert,/a/merged", "--lengths", "32", *part)
    models = "--models minilm mpnet=FOLDER two=random:bert,MERGED"
    assert told() == (
        f"Command: `python benchmarks/runtimes.py --out DIR --device cpu {models} --batches 8 --lengths 32 "
        f"--rounds {LEAST_ROUNDS} --kinds 'ONNX fp32,ONNX fp32 fused' --threads 1 --time-limit 6000`"
    )
    bench("--models", "bert-base", "--lengths", "128", "--batches", "1", "--threads", "1")
    assert told() == (
        f"Command: `python benchmarks/runtimes.py --out DIR --device cpu {models} bert-base --batches 8 1 --lengths 32 128 "
        f"--rounds {LEAST_ROUNDS} --threads 1`"
    )


def test_the_best_dense_is_of_any_runtime_that_answers_alike(bench, capsys):
    times = {"dense PyTorch eager": 5.0, "dense ONNX static int8": 1.0}
    assert bench("--models", "minilm", "--batches", "8", "--lengths", "32", **times)[0] == 0
    assert "| dense PyTorch eager | 5.00 | 0.00 | 1.00 | 1.00 | 1.00 |" in capsys.readouterr().out


def test_exporting_does_not_count_to_the_time_limit_and_what_is_left_out_is_told(bench, capsys):
    both = ("--models", "minilm", "mpnet", "--lengths", "32", "--batches", "1", "--time-limit", "60")
    assert bench(*both, exporting=1000, measuring=70) == (3, [(1, 32)])
    assert "No time left for: mpnet 1x32. The same command goes on." in capsys.readouterr().err
    assert bench(*both, exporting=1000, measuring=70) == (0, [(1, 32)])


def test_a_second_run_goes_on_and_measures_void_cells_again(bench, tmp_path):
    assert bench(*ONE, "--batches", "1", **OFF) == (3, [(1, 32)])
    assert "void" in (tmp_path / "cpu.md").read_text()
    assert bench(*ONE, "--batches", "1", "8") == (0, [(1, 32), (8, 32)])
    assert bench(*ONE, "--batches", "1", "8") == (0, [])


@pytest.mark.parametrize(("waited", "void"), [(0.0, False), (0.06, False), (0.5, True)])
def test_a_cell_that_was_timed_beside_other_work_is_void(waited, void):
    """Which hits both copies of the control alike, and lengthens two models differently."""
    rows = [summarize(name, 1, 32, [10.0] * LEAST_ROUNDS, waited) for name in names(runtimes.CPU, runtimes.CPU_KINDS)]
    assert runtimes.cell_of(rows, {}, runtimes.CPU)["void"] == void


def test_cells_with_fewer_runtimes_or_of_another_model_are_measured_again(bench, tmp_path):
    cell = (*ONE, "--batches", "1")
    assert bench(*cell, "--kinds", "ONNX fp32 fused") == (0, [(1, 32)])
    assert bench(*cell) == (0, [(1, 32)])
    assert bench(*cell, "--kinds", "ONNX fp32 fused") == (0, [])
    assert bench(*cell, "--models", "minilm=/some/where/else") == (0, [(1, 32)])
    stored = json.loads((tmp_path / "cpu.json").read_text())["cells"]["minilm 1x32"]
    assert stored["model"] == "else" and len(stored["kinds"]) == len(runtimes.CPU.kinds)


def test_some_plans_are_measured_and_the_others_later(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runtimes, "accelerator", lambda: "a card")
    monkeypatch.setattr(runtimes, "machine", lambda *known: {"cpu": "c", "cores": 2, "accelerator": "a card", "packages": {}})
    part, half = ("--models", "mpnet", "--batches", "1"), ("--plans", "pruned to 0.50")
    assert bench(*part, *half, device="cuda") == (0, [(1, 128)])
    stored = json.loads((tmp_path / "cuda.json").read_text())["cells"]["mpnet 1x128"]
    assert list(stored["flops_left"]) == ["dense", "pruned to 0.50"]
    assert " --plans 'pruned to 0.50'`" in (tmp_path / "cuda.md").read_text()
    assert bench(*part, *half, device="cuda") == (0, [])
    assert bench(*part, device="cuda") == (0, [(1, 128)])
    with pytest.raises(SystemExit):
        bench(*part, "--plans", "pruned to 0.1", device="cuda")
    assert "--plans pruned to 0.1: the device cuda has dense, pruned to 0.75" in capsys.readouterr().err


def test_what_cannot_be_measured_is_left_out_and_told(bench, tmp_path, capsys):
    assert bench(*ONE, "--batches", "1", dies="pruned torch.compile") == (3, [(1, 32)])
    told = (tmp_path / "cpu.md").read_text()
    assert "- pruned torch.compile: out of memory" in told and "| pruned torch.compile |" not in told
    assert "| pruned PyTorch eager |" in told
    assert "E603 'pruned torch.compile' cannot be measured: out of memory" in capsys.readouterr().out


def test_without_its_control_a_model_is_not_measured(bench, tmp_path):
    assert bench(*ONE, "--batches", "1", dies="dense ONNX fp32 fused") == (3, [])
    assert "- dense ONNX fp32 fused: out of memory" in (tmp_path / "cpu.md").read_text()


def test_no_time_left_measures_nothing(bench):
    assert bench("--time-limit", "0.001") == (3, [])


def test_cells_of_another_machine_are_not_mixed_in(bench, tmp_path, capsys):
    bench(*ONE, "--batches", "1")
    before = json.loads((tmp_path / "cpu.json").read_text())
    before["machine"]["packages"]["torch"] = "torch 1.0"
    (tmp_path / "cpu.json").write_text(json.dumps(before))
    with pytest.raises(SystemExit) as stopped:
        bench(*ONE, "--batches", "8")
    assert stopped.value.code == 2 and "is of another 'packages'" in capsys.readouterr().err
    assert json.loads((tmp_path / "cpu.json").read_text()) == before


def test_on_a_gpu_it_says_where_narrowing_gives_nothing(bench, tmp_path, monkeypatch):
    """As benchmark of a card that is not there: its table, and the runtimes whose narrower models are within the noise."""
    monkeypatch.setattr(runtimes, "accelerator", lambda: "a card")
    monkeypatch.setattr(runtimes, "machine", lambda *known: {"cpu": "c", "cores": 2, "accelerator": "a card", "packages": {}})
    faster = {f"{plan} {kind}": 5.0 for plan in ("pruned to 0.50", "pruned to 0.33") for kind in runtimes.CUDA.kinds}
    faster["pruned to 0.75 ONNX Runtime fp16"] = 9.0
    code, timed = bench("--models", "mpnet", device="cuda", **faster)
    assert code == 0 and timed == [(1, 128), (8, 128), (32, 128), (128, 128)]
    told = (tmp_path / "cuda.md").read_text()
    assert "| pruned to 0.33 CUDA graphs fp16 | 5.00 | 0.00 | 2.00 | 2.00 |" in told and "a card, beside it c" in told
    slow = ", ".join(f"pruned to 0.75 {kind}" for kind in runtimes.CUDA.kinds if "ONNX" not in kind)
    assert told.count(f"Narrowing gives nothing here (3 % or less) to: {slow}.") == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "huge"], "--models huge"),
        (["--kinds", "ONNX fp64"], "--kinds ONNX fp64"),
        (["--kinds", "ONNX fp32"], "is the control"),
        (["--rounds", "2"], "at least"),
        (["--device", "cuda"], "no GPU"),
    ],
)
def test_wrong_arguments(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtimes, "accelerator", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        runtimes.main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_a_shape_without_weights_becomes_a_checkpoint(tmp_path):
    """In the shape that its config has by default; halved, and loaded again by the worker that will time it."""
    save_checkpoint(runtimes.plans_of("random:distilbert", runtimes.CPU.plans)["pruned"], tmp_path, tmp_path)
    assert [layer.heads for layer in layers_of(load(tmp_path))] == [6] * 6


@pytest.mark.parametrize("share", [3 / 4, 1 / 2, 1 / 3])
def test_a_share_is_kept_of_heads_and_of_whole_kernels_of_neurons(share):
    """Of BERT-base's 3,072 neurons and of a tiny model's heads."""
    assert runtimes.kept_neurons(3072, share) in (2304, 1536, 1024) and runtimes.kept_neurons(3072, share) / 3072 == share
    assert {layer.heads for layer in layers_of(runtimes.narrowed(tiny("bert"), share))} == {round(4 * share)}


def test_a_share_of_heads_is_one_of_groups_that_share_keys_and_values():
    assert {layer.units("heads") for layer in layers_of(runtimes.narrowed(tiny("llama"), 1 / 2))} == {1}
    with pytest.raises(SystemExit, match=r"0\.75 of 2 heads"):
        runtimes.narrowed(tiny("llama"), 3 / 4)


def test_bert_large_has_its_parameters():
    """336 M: Devlin et al. 2019, table of sizes (340 M there, rounded), less the heads of pretraining."""
    from transformers import AutoConfig

    one = AutoConfig.for_model(**runtimes.SHAPES["random:bert-large"])
    width, block = one.hidden_size, 4 * one.hidden_size**2 + 2 * one.hidden_size * one.intermediate_size
    whole = one.num_hidden_layers * block + (one.vocab_size + 512) * width
    assert 333e6 < whole < 336e6 and width == 64 * one.num_attention_heads


def test_a_run_says_what_is_pruned(tmp_path):
    pruned = tiny("distilbert", torch.float32)
    remove(pruned, {1: Removal([0], [2])})
    save_checkpoint(pruned, tmp_path, tmp_path)
    models = runtimes.plans_of(f"random:distilbert,{tmp_path}", runtimes.CPU.plans)
    assert [layer.heads for layer in layers_of(models["pruned"])] == [4, 3, 4]
    assert [layer.heads for layer in layers_of(models["dense"])] == [12] * 6


@pytest.mark.slow
def test_a_folder_holds_what_the_kinds_load(tmp_path, monkeypatch):
    """Of a tiny model, for both devices; calibrated on rows that it has positions for."""
    monkeypatch.setattr(runtimes, "CALIBRATION", (2, (4, 8)))
    for device, one in runtimes.BENCHES.items():
        (tmp_path / device).mkdir()
        made = runtimes.contenders({"dense": tiny("bert", torch.float32)}, tmp_path / device, one, one.kinds, device)
        assert all(each.path.exists() for each in made) and len(made) == len(one.kinds) + 1
        assert {each.half for each in made if each.runtime == "pytorch"} == {device == "cuda"}


@pytest.mark.slow
def test_static_int8_of_onnx_runtime_multiplies_no_matrix_in_fp32(tmp_path):
    """Its optimizer joins a product with the rounding around it, or leaves it in fp32, which would be compared as int8."""
    model = tiny("bert").float()
    rows = [runtimes.encoding(2, 8, model.config.vocab_size)]
    runtimes.save_graph(runtimes.quantized_static(runtimes.trace(model, rows[0]), rows), tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options)
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert "QLinearMatMul" in operators and not {"MatMul", "FusedMatMul", "Gemm"} & set(operators)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (7, 64)])
def test_weights_of_static_int8_take_half_of_the_range_without_vnni(monkeypatch, bits, largest):
    """Else pairs of products overflow there, and the file that is compared computes something else."""
    monkeypatch.setattr(runtimes, "weight_bits", lambda: bits)
    model = tiny("bert").float()
    rows = [runtimes.encoding(2, 8, model.config.vocab_size)]
    graph = runtimes.quantized_static(runtimes.trace(model, rows[0]), rows)
    weights = [
        onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer if tensor.data_type == onnx.TensorProto.INT8
    ]
    assert max(np.abs(values.astype(int)).max() for values in weights if values.ndim == 2) == largest
