"""Exported graphs against PyTorch: every architecture, dense and unequally pruned, fused and not, over many shapes."""

import contextlib
import os
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import compressor
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.models.reference import Reference
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import torch_forward
from compressor.tasks.task_kind import kind_of
from export.graph.files import save
from export.graph.rewrite import can_fuse, fused
from export.graph.trace import AXES, OPSET, portable, stamp, trace, trace_named
from export.parity.compare import compare
from export.runtimes.feeds import feeds_of
from export.runtimes.onnxruntime import NO_KERNELS_BY_SHAPE, BoundBatch, write_onnx
from export.runtimes.sessions import run, session
from tests.compressor.conftest import CUTS, TRIED, tiny
from tests.compressor.conftest import encoding as rows_with_ends
from tests.export.conftest import INT8_APART, MODELS, check_wholly, encoding, model_of, notes

SHAPES = [(1, 1), (1, 7), (3, 33), (8, 511), (2, 2)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "mpnet-dense" else ()) for name in MODELS]
)
def test_exported_equals_pytorch(name, exported):
    made = exported(name)
    forward = torch_forward(made.model)
    for path in (made.fp32, made.fused):
        live = session(path)
        # MPNet's sample has token_type_ids, which its forward does not take
        assert [value.name for value in live.get_inputs()] == ["input_ids", "attention_mask"]
        assert [value.shape for value in live.get_inputs()] == [["batch", "sequence"]] * 2
        assert [(value.name, value.shape) for value in live.get_outputs()] == [("logits", ["batch", 3])]
        for shape in SHAPES:
            batch = encoding(*shape)
            reference = forward(batch)
            result = compare("export", "fp32", reference, run(live, batch), reference.argmax(axis=1))
            assert result.passed, result
    joined = [node for node in onnx.load(made.fused).graph.node if node.op_type == "Attention"]
    # the last block's has the first token's query alone
    assert len(joined) == (2 if name.startswith("bert") else 0)


@pytest.mark.parametrize("name", MODELS)
def test_int8_is_close_and_small(name, exported):
    made, batch = exported(name), encoding(64, 20)
    live, reference = session(made.int8), torch_forward(made.model)(batch)
    assert [value.shape for value in live.get_inputs()] == [["batch", "sequence"]] * 2
    assert [(value.name, value.shape) for value in live.get_outputs()] == [("logits", ["batch", 3])]
    result = compare("export", "int8 on random rows", reference, run(live, batch), reference.argmax(axis=1))
    assert result.passed and result.max_difference < INT8_APART * np.abs(reference).max(), result
    # a tiny graph is mostly nodes, so only the weights are compared: a quarter of the bytes, and their scales
    assert weight_bytes(made.int8) < 0.5 * weight_bytes(made.fp32)


def test_weights_of_seven_bits_are_half_as_large(exported, tmp_path):
    """What is written for a processor without VNNI: pairs of their products fit into 16 bits. And it says the same."""
    made, batch = exported("bert-unequal"), encoding(64, 20)
    path = write_onnx(made.graph, tmp_path, precisions=["int8"], weight_bits=7)["int8"]
    weights = [numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer if len(one.dims) == 2]
    products = [one for one in weights if one.dtype == np.int8]
    assert len(products) > 10 and all(np.abs(one.astype(int)).max() <= 64 for one in products)
    reference = torch_forward(made.model)(batch)
    result = compare("export", "int8 on random rows", reference, run(session(path), batch), reference.argmax(axis=1))
    assert result.passed and result.max_difference < 0.15 * np.abs(reference).max()


FAST = ("llama-cut",)
"""fp32 of BERT and MPNet, dense and cut, is tried above."""
MATRIX = [f"{name}-{kind}" for name in TRIED for kind in ("dense", "cut")]
MATRIX_SHAPES = [(1, 1), (1, 2), (3, 33), (5, 128), (2, 511), (8, 511)]


@pytest.mark.parametrize("name", MODELS)
def test_every_file_passes_the_full_check(name, exported, tmp_path):
    made = exported(name)
    for path in write_onnx(made.graph, tmp_path, precisions=["fp32", "int8", "fp16", "bf16"]).values():
        check_wholly(path)


def test_every_file_says_what_it_is(exported, tmp_path):
    made = exported("bert-dense")
    graph = onnx.ModelProto()
    graph.CopyFrom(made.graph)
    stamp(graph, made.model, Reference("./somewhere/base", tmp_path / "base", "5ec"))
    told = {"product": f"compress-pipeline {compressor.__version__}", "task": "sequence classification"}
    told |= {"labels": '["LABEL_0", "LABEL_1", "LABEL_2"]', "source": "base", "source_sha256": "5ec"}
    paths = write_onnx(graph, tmp_path / "out", precisions=["fp32", "int8", "fp16", "bf16"])
    for path in paths.values():
        assert told.items() <= notes(path).items()
    assert session(paths["fp32"]).get_modelmeta().custom_metadata_map == told


@pytest.mark.parametrize(
    ("reference", "folder", "told"),
    [
        ("package:base_package/model", "/lib/base_package/model", "package:base_package/model"),
        ("owner/base", "/cache/models--owner--base/snapshots/c0ffee", "owner/base"),
        ("models/base", "/home/someone/models/base", "base"),
        ("/home/someone/models/base", "/home/someone/models/base", "base"),
    ],
)
def test_a_source_names_no_folder_of_a_machine(reference, folder, told):
    assert portable(Reference(reference, Path(folder), "")) == told


@pytest.mark.slow
def test_inputs_have_one_order():
    sample = encoding(2, 9)
    reordered = {"token_type_ids": np.zeros_like(sample["input_ids"])}
    reordered |= {name: sample[name] for name in ("attention_mask", "input_ids")}
    graph = trace(model_of("bert-dense"), reordered).graph
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", "token_type_ids"]


def random_plan(model: torch.nn.Module, seed: int = 0) -> dict[int, Removal]:
    """Some heads and neurons of every block, never all of a sublayer."""
    draw, plan = np.random.default_rng(seed), {}
    for number, layer in enumerate(layers_of(model)):
        counts = {name: layer.units(name) for name in layer.structures}
        gone = {name: draw.permutation(count)[: draw.integers(1, count)].tolist() for name, count in counts.items()}
        plan[number] = Removal(**gone)
    return plan


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in MATRIX])
def test_the_matrix(name, tmp_path):
    """Every architecture, dense and randomly cut, fp32 and int8, on rows that end in padding, of shapes not seen in tracing."""
    architecture, _, kind = name.rpartition("-")
    model = tiny(architecture, torch.float32, max_position_embeddings=520)
    if kind == "cut":
        remove(model, random_plan(model))
    paths = write_onnx(trace(model, numpy_rows(2, 7)), tmp_path, fuse=can_fuse(model))
    forward, sessions = torch_forward(model), {precision: session(path) for precision, path in paths.items()}
    assert [value.shape for value in sessions["fp32"].get_inputs()] == [["batch", "sequence"]] * 2
    for path in paths.values():
        check_wholly(path)
    assert {one.domain: one.version for path in paths.values() for one in onnx.load(path).opset_import}[""] == OPSET
    for live in sessions.values():  # of a decoder, too, whose forward returns its keys and values
        assert [value.name for value in live.get_outputs()] == ["logits"]
    batches = [numpy_rows(*shape) for shape in MATRIX_SHAPES]
    references = [forward(batch) for batch in batches]
    for batch, reference in zip(batches, references, strict=True):
        assert compare("export", "fp32", reference, run(sessions["fp32"], batch), reference.argmax(axis=1)).passed
    # one row alone agrees wholly or not at all, so the rows of all shapes are judged together
    pooled = np.concatenate(references)
    int8 = np.concatenate([run(sessions["int8"], batch) for batch in batches])
    result = compare("export", "int8 on random rows", pooled, int8, pooled.argmax(axis=1))
    assert result.passed, result
    assert np.abs(int8 - pooled).max() < 0.3 * np.abs(pooled).max()


@pytest.mark.slow
@pytest.mark.parametrize("plan", CUTS)
@pytest.mark.parametrize("architecture", TRIED)
def test_a_cut_that_empties_sublayers_and_drops_blocks(architecture, plan, tmp_path):
    model = tiny(architecture, torch.float32)
    remove(model, CUTS[plan](architecture))
    path = write_onnx(trace(model, numpy_rows(2, 7)), tmp_path, precisions=["fp32"], fuse=can_fuse(model))["fp32"]
    live, forward = session(path), torch_forward(model)
    for shape in ((1, 5), (3, 12), (4, 7)):
        batch = numpy_rows(*shape)
        assert np.abs(run(live, batch) - forward(batch)).max() < 1e-4


def numpy_rows(rows: int, length: int) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in rows_with_ends(rows, length).items()}


@pytest.mark.slow
def test_t5_must_not_be_fused(tmp_path):
    """With torch's own attention, as a generating T5 is traced. When this fails, take it out of WRONG_WHEN_FUSED."""
    model, batch = tiny("t5", torch.float32), numpy_rows(2, 7)
    remove(model, {number: Removal(whole=True) for number in (1, 2, 5)})
    inputs = {name: torch.from_numpy(values) for name, values in batch.items()}
    graph, reference = trace_named(model, inputs, dict.fromkeys(inputs, AXES)), torch_forward(model)(batch)
    found = []
    for name, proto in (("traced", graph), ("fused", fused(graph))):
        save(proto, tmp_path / name)
        found.append(np.abs(run(session(tmp_path / name), batch) - reference).max())
    assert found[0] < 1e-4 < 1e-3 < found[1]


def weight_bytes(path) -> int:
    return sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer)


@pytest.mark.slow
def test_a_second_export_is_equal_byte_for_byte_holds_no_paths_and_prints_nothing(tmp_path, exported, capfd):
    """The model comes out as it went in, too: in train mode, with its attention implementation."""
    made, model = exported("bert-unequal"), model_of("bert-unequal").train()
    attention = model.config._attn_implementation
    paths = write_onnx(trace(model, encoding(2, 9)), tmp_path, fuse=can_fuse(model))
    assert capfd.readouterr().out == ""
    assert model.training and model.config._attn_implementation == attention
    for path, first in ((paths["fp32"], made.fused), (paths["int8"], made.int8)):
        content = path.read_bytes()
        assert content == first.read_bytes()
        assert b"site-packages" not in content and b"/" + b"tmp" not in content


def test_a_sample_of_one_row_is_refused():
    with pytest.raises(UserError, match="E601"):
        trace(model_of("bert-dense"), encoding(1, 9))


def test_the_only_row_of_a_file_is_traced_twice():
    """E601 would come after the training, and name no file."""
    rows = TokenRows([{"input_ids": [2, 5, 3]}], np.array([0]), kind_of("classification"))
    assert Data(rows, rows, ["a", "b"], 1).traced["input_ids"].tolist() == [[2, 5, 3], [2, 5, 3]]


def test_rows_of_one_token_are_traced_with_two():
    """Single words of a decoder, whose tokenizer adds none: E601 after the training, too."""
    rows = TokenRows(
        [{"input_ids": [word], "attention_mask": [1]} for word in (7, 8)], np.array([0, 1]), kind_of("classification")
    )
    traced = Data(rows, rows, ["a", "b"], 1).traced
    assert {name: values.tolist() for name, values in traced.items()} == {
        "input_ids": [[7, 7], [8, 8]],
        "attention_mask": [[1, 1], [1, 1]],
    }
    assert trace(model_of("bert-dense"), traced).graph.output


def test_large_models_get_their_weights_beside_the_graph(tmp_path, exported):
    made, path = exported("bert-dense"), tmp_path / "model.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(made.graph)
    save(copy, path, limit=1000)
    size = (tmp_path / "model.onnx.data").stat().st_size
    assert size > path.stat().st_size
    # nothing is taken out of the graph, and a second save replaces the data instead of growing them
    assert copy == made.graph
    save(copy, path, limit=1000)
    assert (tmp_path / "model.onnx.data").stat().st_size == size
    batch = encoding(3, 5)
    assert np.allclose(run(session(path), batch), torch_forward(made.model)(batch), atol=1e-5)


def test_session_errors(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"E602 .*broken.onnx: .*\(Protobuf parsing failed\)"):
        session(broken)
    for path in (tmp_path, tmp_path / "missing.onnx"):
        with pytest.raises(UserError, match=r"E602 .*no such model file"):
            session(path)


def test_an_op_that_the_runtime_lacks_is_named(tmp_path, exported):
    graph, path = onnx.load(exported("bert-dense").fp32), tmp_path / "strange.onnx"
    graph.graph.node[5].op_type = "Nonsense"
    onnx.save(graph, path)
    with pytest.raises(UserError, match=r"E602 .*Nonsense"):
        session(path)


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_cuda_that_is_not_there_is_an_error_not_the_cpu(exported):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine has CUDA")
    with pytest.raises(UserError, match="E904"):
        session(exported("bert-dense").fp32, device="cuda")


@pytest.mark.parametrize("wanted", [None, "1"])
def test_fp32_is_not_multiplied_in_tf32_on_cuda_nor_attention_built_for_each_shape(exported, monkeypatch, wanted):
    import onnxruntime

    asked = []
    monkeypatch.setenv(NO_KERNELS_BY_SHAPE[0], wanted or "")
    if wanted is None:
        monkeypatch.delenv(NO_KERNELS_BY_SHAPE[0])
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda path, options, providers: asked.extend(providers) or MagicMock()
    )
    for device in ("cpu", "cuda"):
        with contextlib.suppress(UserError):  # there may be no GPU
            session(exported("bert-dense").fp32, device=device)
    assert asked == [("CPUExecutionProvider", {}), ("CUDAExecutionProvider", {"use_tf32": "0"})]
    assert os.environ[NO_KERNELS_BY_SHAPE[0]] == (wanted or "0")


@pytest.mark.slow
def test_a_batch_that_is_bound_computes_what_a_run_does(exported):
    """What times a GPU, on the CPU; the second call writes over the first one's answers."""
    live, batch = session(exported("mpnet-unequal").fused), encoding(3, 33)
    bound = BoundBatch(live, feeds_of(live, batch), "cpu")
    for _ in range(2):
        bound()
        assert np.array_equal(bound.logits(), run(live, batch))
