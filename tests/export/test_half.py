"""fp16 and bf16 graphs: the same function, with sums of squares and angles in fp32; both are proven by an emulation."""

import copy
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from compressor.errors import UserError
from compressor.tasks.features import torch_forward
from export.graph.files import save
from export.graph.half import KEPT_IN_FP32, brain, emulated, half
from export.graph.rewrite import fused
from export.graph.trace import trace
from export.parity.bounds import BOUNDS
from export.parity.compare import compare
from export.runtimes.onnxruntime import RUNTIME, plain_session, write_onnx
from export.runtimes.sessions import run
from tests.compressor.conftest import TRIED, tiny
from tests.export.conftest import check_wholly, encoding

ROWS = encoding(4, 12)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (model, graph, paths by precision), made on first use."""
    found = {}

    def make(name):
        if name not in found:
            model = tiny(name, torch.float32)
            graph = trace(model, encoding(2, 9))
            folder = tmp_path_factory.mktemp(name)
            found[name] = model, graph, write_onnx(graph, folder, precisions=("fp16", "bf16"))
        return found[name]

    return make


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in TRIED if name[:2] != "t5" and name != "llama")]
)
def test_it_is_the_same_function_within_its_bound(name, precision, made):
    model, _, paths = made(name)
    want, got = torch_forward(model)(ROWS), run(RUNTIME.open_for_parity(paths[precision], precision, 1), ROWS)
    assert compare("half", precision, want, got, want.argmax(axis=1)).passed
    assert got.dtype == np.float32 and abs(got - want).max() > 1e-5


@pytest.mark.slow
def test_weights_are_half_as_large_and_the_file_is_valid(made):
    _, graph, paths = made("llama")
    for proto in (half(graph), onnx.load(paths["bf16"])):
        onnx.checker.check_model(proto, full_check=True)
    for path in paths.values():
        check_wholly(path)
        assert weights(onnx.load(path)) < 0.6 * weights(graph)


BF16_ON_CUDA = {
    *("Add", "Cast", "Concat", "Div", "Erf", "Exp", "Expand", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "MatMul"),
    *("Max", "Min", "Mul", "Neg", "Pow", "Relu", "Reshape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "Sub"),
    *("Tanh", "Tile", "Transpose", "Unsqueeze", "Where"),
}
"""Operators of which ONNX Runtime has a bf16 kernel for CUDA, by its docs/OperatorKernels.md. A file with another does not open
there, and nothing on a CPU shows it."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("llama", "mpnet") else pytest.mark.slow) for name in TRIED if name[:2] != "t5"],
)
def test_every_operator_of_bf16_has_a_kernel_on_cuda(made, name):
    """Logarithms of distances, which are rounded to whole numbers, and reciprocals have none; nor would they be exact."""
    _, _, paths = made(name)
    proto = onnx.shape_inference.infer_shapes(onnx.load(paths["bf16"]))
    types = {value.name: value.type.tensor_type.elem_type for value in (*proto.graph.value_info, *proto.graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    narrow = {node.op_type for node in proto.graph.node if TensorProto.BFLOAT16 in map(types.get, (*node.input, *node.output))}
    assert "MatMul" in narrow and narrow <= BF16_ON_CUDA


def weights(graph):
    """Bytes of the floats that a graph holds."""
    tensors = [onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer]
    return sum(values.nbytes for values in tensors if values.dtype != np.int64)


@pytest.mark.slow
def test_angles_are_fp32_from_the_positions_on(made):
    """A cast to fp16 and back between them would leave a rotary angle of 3,000 with steps of 2."""
    _, _, paths = made("llama")
    proto = onnx.shape_inference.infer_shapes(onnx.load(paths["fp16"]))
    types = {one.name: one.type.tensor_type.elem_type for one in (*proto.graph.value_info, *proto.graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    makers = {name: node for node in proto.graph.node for name in node.output}
    waiting = [node for node in proto.graph.node if node.op_type in ("Cos", "Sin")]
    seen = 0
    assert waiting
    while waiting:
        node = waiting.pop()
        if node.op_type != "Shape":
            seen += 1
            assert TensorProto.FLOAT16 not in [types.get(name) for name in (*node.input, *node.output)][: len(node.input)]
            waiting += [makers[name] for name in node.input if name in makers]
    assert seen > 4


def test_softmax_angles_and_distances_are_fp32_in_a_small_graph():
    """From the positions on; and what follows them is not."""
    floats, table = np.ones(4, np.float32), np.ones((64, 4), np.float32)
    nodes = [
        onnx.helper.make_node("Cast", ["positions"], ["p"], "position", to=TensorProto.FLOAT),
        onnx.helper.make_node("Mul", ["p", "floats"], ["a"], "angle"),
        onnx.helper.make_node("Cos", ["a"], ["c"], "cosine"),
        onnx.helper.make_node("Log", ["p"], ["l"], "logarithm"),
        onnx.helper.make_node("Mul", ["l", "floats"], ["m"], "distance"),
        onnx.helper.make_node("Cast", ["m"], ["d"], "whole", to=TensorProto.INT64),
        onnx.helper.make_node("Gather", ["table", "d"], ["g"], "look up"),
        onnx.helper.make_node("Add", ["c", "g"], ["s"], "sum"),
        onnx.helper.make_node("Softmax", ["s"], ["logits"], "softmax"),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "made",
        [onnx.helper.make_tensor_value_info("positions", TensorProto.INT64, ["sequence", 4])],
        [onnx.helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["sequence", 4, 4])],
        [onnx.numpy_helper.from_array(array, name) for name, array in (("floats", floats), ("table", table))],
    )
    opset = [onnx.helper.make_opsetid("", 20)]
    proto = onnx.shape_inference.infer_shapes(half(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)))
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.value_info}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    narrow = [node.name for node in proto.graph.node if TensorProto.FLOAT16 in map(types.get, node.input)]
    assert {name for name in narrow if "cast" not in name.lower()} == {"look up", "sum"}


@pytest.mark.slow
def test_fp16_is_fused_for_cuda_and_bf16_is_not(made):
    """Attention and norms are one operator each; no block is left with a cast in it."""
    _, _, paths = made("llama")
    fused, plain = (Counter(node.op_type for node in onnx.load(paths[one]).graph.node) for one in ("fp16", "bf16"))
    assert fused["MultiHeadAttention"] == 3 and fused["SkipSimplifiedLayerNormalization"] == 6 and not fused["Softmax"]
    assert fused["Cast"] < plain["Cast"] / 2 and not plain["MultiHeadAttention"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attentions"), [("bert", 3), ("mpnet", 0), ("deberta-v2", 0), ("modernbert", 3), ("gpt2", 3), ("distilbert", 3)]
)
def test_whose_attention_is_one_operator(made, name, attentions):
    """docs/export.md names those that are not."""
    operators = Counter(node.op_type for node in onnx.load(made(name)[2]["fp16"]).graph.node)
    assert operators["MultiHeadAttention"] == attentions
    assert operators["Softmax"] == (0 if attentions else 3)


@pytest.mark.slow
def test_without_fusions_it_is_the_graph_as_it_was_traced(made, tmp_path):
    _, graph, _ = made("llama")
    path = write_onnx(graph, tmp_path, precisions=["fp16"], fuse=False)["fp16"]
    assert path.read_bytes() == half(graph).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("prepare", "kept", "passes"),
    [
        pytest.param(lambda graph: graph, KEPT_IN_FP32, True, id="plain"),
        pytest.param(lambda graph: graph, (), False, id="nothing kept"),
        pytest.param(lambda graph: fused(graph, "cuda"), KEPT_IN_FP32, True, id="fused"),
    ],
)
def test_squares_that_overflow_fp16_do_not(made, tmp_path, monkeypatch, prepare, kept, passes):
    """Hidden states of 1,000: their squares are 15 times the largest number of fp16."""
    model, graph, _ = made("llama")
    model, large = copy.deepcopy(model), onnx.ModelProto()
    large.CopyFrom(graph)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1000 / model.model.embed_tokens.weight.abs().mean()
    stored = next(one for one in large.graph.initializer if one.name == "model.embed_tokens.weight")
    stored.CopyFrom(onnx.numpy_helper.from_array(model.model.embed_tokens.weight.detach().numpy(), stored.name))
    monkeypatch.setattr("export.graph.half.KEPT_IN_FP32", kept)
    save(half(prepare(large)), tmp_path / "fp16.onnx")
    want, got = torch_forward(model)(ROWS), run(RUNTIME.open_for_parity(tmp_path / "fp16.onnx", "fp16", 1), ROWS)
    assert compare("half", "fp16", want, got, want.argmax(axis=1)).passed == passes


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("precision", "infinite"), [("fp16", True), ("bf16", False)])
def test_what_overflows_between_two_operators_is_seen(tmp_path, precision, infinite, joined):
    """50 * 300 * 4 + 10,000 is beyond fp16, what is made of it is not. onnx infers no type of the joined operator."""
    operator, domain = ("FastGelu", "com.microsoft") if joined else ("Add", "")
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "large"], ["m"], "first"),
        onnx.helper.make_node(operator, ["m", "bias"], ["g"], "sum", domain=domain),
        onnx.helper.make_node("Reshape", ["g", "shape"], ["r"], "shaped"),
        onnx.helper.make_node("MatMul", ["r", "small"], ["logits"], "second"),
    ]
    sizes = {"large": ((4, 4), 300), "small": ((4, 4), 1e-4), "bias": ((4,), 1e4)}
    weights = {"shape": np.array([-1, 4])} | {name: np.full(size, value, np.float32) for name, (size, value) in sizes.items()}
    x, logits = (onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "logits"))
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph(nodes, "made", [x], [logits], stored)
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    save({"fp16": half, "bf16": brain}[precision](proto), tmp_path / "narrow.onnx")
    feeds = {"x": np.full((1, 4), 50, np.float32)}
    assert np.allclose(plain_session(proto).run(None, feeds)[0], 28)
    (found,) = RUNTIME.open_for_parity(tmp_path / "narrow.onnx", precision, 1).run(None, feeds)
    assert np.isinf(found).all() if infinite else np.allclose(found, 28, rtol=0.02)


def test_bf16_is_rounded_at_every_step_in_the_emulation(made):
    """It differs from the fp32 graph by bf16's steps, and by more than a graph whose weights alone are rounded."""
    model, _, paths = made("llama")
    proto = onnx.load(paths["bf16"])
    rounded = emulated(proto)
    casts = sum(node.op_type == "Cast" and node.attribute[0].i == TensorProto.BFLOAT16 for node in rounded.graph.node)
    assert casts > 20 and not any(one.data_type == TensorProto.BFLOAT16 for one in rounded.graph.initializer)
    want = torch_forward(model)(ROWS)
    error = abs(run(plain_session(rounded), ROWS) - want).max()
    finer = abs(run(RUNTIME.open_for_parity(paths["fp16"], "fp16", 1), ROWS) - want).max()
    assert 4 * finer < error < BOUNDS["bf16"].difference


@pytest.mark.parametrize("convert", [half, brain, lambda graph: emulated(brain(graph))])
def test_types_are_inferred_without_the_weights(convert, made, monkeypatch):
    """Of weights of 2 GB onnx infers nothing: no message of it may be of their size."""
    _, graph, _ = made("llama")
    infer, largest = onnx.shape_inference.infer_shapes, max(len(one.raw_data) for one in graph.graph.initializer)

    def small(proto, *arguments, **options):
        assert max(len(one.raw_data) for one in proto.graph.initializer) < largest
        return infer(proto, *arguments, **options)

    monkeypatch.setattr("onnx.shape_inference.infer_shapes", small)
    with pytest.raises(AssertionError):
        onnx.shape_inference.infer_shapes(graph)
    assert convert(graph).graph.node


def test_bf16_weights_are_rounded_once_from_fp32(made):
    _, graph, paths = made("llama")
    exact = {tensor.name: tensor for tensor in graph.graph.initializer}
    stored = [one for one in onnx.load(paths["bf16"]).graph.initializer if one.data_type == TensorProto.BFLOAT16]
    assert len(stored) > 20
    for tensor in stored:
        values = onnx.numpy_helper.to_array(exact[tensor.name])
        want = torch.tensor(values if values.ndim > 1 else values.clip(-1e4, 1e4)).bfloat16().float().numpy()
        assert np.array_equal(onnx.numpy_helper.to_array(tensor).astype(np.float32), want)


@pytest.mark.parametrize(("convert", "held"), [(half, [20000, 65504]), (brain, [19968, 299008])])
def test_weights_are_cut_where_their_type_ends_and_masks_before(convert, held):
    """A sum of any score with the mask must be finite."""
    lowest = np.finfo(np.float32).min
    weights = {"matrix": np.array([[20000, 3e5], [0, 0]], np.float32), "mask": np.array([lowest, 0], np.float32)}
    nodes = [onnx.helper.make_node("MatMul", ["x", "matrix"], ["m"], "product")]
    nodes.append(onnx.helper.make_node("Add", ["m", "mask"], ["logits"], "masked"))
    x, logits = (onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "logits"))
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = onnx.helper.make_graph(nodes, "made", [x], [logits], stored)
    proto = convert(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10))
    matrix, mask = (onnx.numpy_helper.to_array(tensor).astype(np.float32) for tensor in proto.graph.initializer)
    assert matrix[0].tolist() == held and mask[0] == pytest.approx(-1e4, rel=2e-3)


def test_a_graph_comes_out_as_it_went_in_and_equal_graphs_give_equal_files(made):
    _, graph, paths = made("llama")
    before = graph.SerializeToString()
    again = {"fp16": half(fused(graph, "cuda")), "bf16": brain(graph)}
    assert graph.SerializeToString() == before
    for name, proto in again.items():
        assert proto.SerializeToString(deterministic=True) == paths[name].read_bytes()


def test_a_damaged_file_is_told(tmp_path):
    (tmp_path / "model_bf16.onnx").write_bytes(b"nothing")
    for path in (tmp_path / "model_bf16.onnx", Path("missing.onnx")):
        with pytest.raises(UserError, match="E602"):
            RUNTIME.open_for_parity(path, "bf16", 1)
