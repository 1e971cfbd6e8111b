"""Tokens that the head does not read are not computed in the last block, and the logits stay those of PyTorch."""

import copy
import math

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from compressor.cost import shape_of
from compressor.models.anatomy import layers_of
from compressor.models.first_token import reads_first_token
from compressor.processor import weight_bits
from compressor.tasks.features import torch_forward
from export.graph.rewrite import can_fuse, for_cpu, fused, quantized_dynamic
from export.graph.rewrites.read_tokens import read_tokens
from export.graph.trace import matrices, trace
from export.parity.suspects import AFTER, suspect_in_graph
from export.runtimes.feeds import feeds_of
from export.runtimes.onnxruntime import plain_session
from tests.compressor.conftest import TRIED, tiny
from tests.export.conftest import INT8_APART, encoding
from tests.export.test_rewrites import batches

FULL = ("gpt2", "llama", "qwen3", "t5", "t5-gated")
"""Architectures whose head reads another token."""
ALSO_WHOLE = {"modernbert": ("Wqkv",), "deberta-v2": ("query",)}
"""What is computed of all tokens besides keys and values: ModernBERT projects all three at once, and DeBERTa's attention has
rows and heads in one axis."""


def check_equal_where_read(graph: onnx.ModelProto, model: torch.nn.Module) -> None:
    """What the graph computes is what PyTorch does in rows whose first token is one (`PlainAttention`)."""
    live, forward = plain_session(graph), torch_forward(model)
    for batch in batches():
        first = batch["attention_mask"][:, 0] == 1
        assert np.abs(live.run(None, feeds_of(live, batch))[0] - forward(batch))[first].max() < 1e-5


def tokens_of(graph: onnx.ModelProto) -> dict[str, object]:
    """Name of each product with a weight -> its output's size on the axis of the tokens."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.graph.value_info, *graph.graph.output)}
    weights = set(matrices(graph))
    nodes = [node for node in graph.graph.node if node.op_type == "MatMul" and node.name in weights]
    return {node.name: shapes[node.output[0]][1].dim_value or shapes[node.output[0]][1].dim_param for node in nodes}


@pytest.mark.parametrize("architecture", TRIED)
def test_what_the_head_reads_is_found_alike_in_the_model_and_in_the_graph(architecture, traced):
    model, graph = traced(architecture)
    reads = reads_first_token(model)
    assert reads == (architecture not in FULL)
    assert reads == (1 in tokens_of(graph).values())


@pytest.mark.parametrize("architecture", [name for name in TRIED if name not in FULL])
def test_the_last_block_computes_keys_and_values_of_all_tokens_and_the_rest_of_one(architecture, traced):
    model, graph = traced(architecture)
    onnx.checker.check_model(graph, full_check=True)
    check_equal_where_read(graph, model)
    tokens = tokens_of(graph)
    last = [name for name in tokens if ".2." in name]
    whole = [name for name in last if tokens[name] != 1]
    assert len(last) > len(whole) > 0
    assert all(any(part in name for part in ("key", "value", ".k", ".v", *ALSO_WHOLE.get(architecture, ()))) for name in whole)
    assert not [name for name, size in tokens.items() if size == 1 and (".0." in name or ".1." in name)]


@pytest.mark.parametrize(
    ("architecture", "plan"), [("bert", "dense"), ("bert", "emptied"), ("bert", "without a last head"), ("mpnet", "dense")]
)
def test_the_flops_that_a_file_saves_are_those_of_its_products(architecture, plan, traced):
    model, graph = traced(architecture, plan)
    shape, rows, length = shape_of(model), 3, 7
    values = {value.name: value.type.tensor_type.shape.dim for value in (*graph.graph.value_info, *graph.graph.output)}
    sizes = {value.name: list(value.dims) for value in graph.graph.initializer}
    known = {"batch": rows, "sequence": length}
    sizes |= {name: [dim.dim_value or known.get(dim.dim_param) for dim in dims] for name, dims in values.items()}
    products = [node for node in graph.graph.node if node.op_type in ("MatMul", "Gemm")]
    macs = sum(math.prod(sizes[node.output[0]]) * sizes[node.input[0]][-1] for node in products)
    assert 2 * macs == shape.flops(length, rows) - rows * shape.unread_flops(length)


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "modernbert"])
def test_what_is_made_of_such_a_graph_computes_the_same(architecture, traced):
    """The forms for ONNX Runtime's CPU and, in fp32, for CUDA; and its int8 within the usual distance."""
    model, graph = traced(architecture)
    assert can_fuse(model)
    for made in (for_cpu(graph), fused(graph, "cuda")):
        check_equal_where_read(made, model)
    live, batch = plain_session(quantized_dynamic(for_cpu(graph), weight_bits=weight_bits())), encoding(3, 9)
    want = torch_forward(model)(batch)
    assert np.abs(live.run(None, feeds_of(live, batch))[0] - want).max() < INT8_APART * np.abs(want).max()


@pytest.mark.parametrize(("architecture", "keys"), [("bert", {}), ("modernbert", {"classifier_pooling": "mean"})])
def test_where_every_token_is_read_all_are_computed(architecture, keys):
    """A head that tags every token, and one that reads their mean."""
    model = tiny(
        architecture,
        torch.float32,
        auto=AutoModelForSequenceClassification if keys else AutoModelForTokenClassification,
        **keys,
    )
    graph = trace(model, encoding(2, 9))
    assert read_tokens(graph) is graph and not reads_first_token(model)
    assert 1 not in tokens_of(graph).values()


def test_the_suspect_is_the_last_block_where_only_its_first_token_differs(tmp_path, traced):
    model, graph = traced("bert")
    onnx.save(graph, tmp_path / "model.onnx")
    assert suspect_in_graph(model, tmp_path / "model.onnx", encoding(2, 9)) == AFTER
    broken = copy.deepcopy(model)
    with torch.no_grad():
        layers_of(broken)[2].linear("ffn_in").weight.mul_(2)
    assert suspect_in_graph(broken, tmp_path / "model.onnx", encoding(2, 9)) == "block 2"


def graph_of(nodes: list, outputs: dict, constants: dict, values: dict) -> onnx.ModelProto:
    """A graph of x, (batch, sequence, 4); `outputs` and `values` give shapes."""
    made = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", 1, ["batch", "sequence", 4])],
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
        value_info=[helper.make_tensor_value_info(name, 1, shape) for name, shape in values.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


W = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
THREE = ["batch", "sequence", 4]


@pytest.mark.parametrize("also", ["output", "sum"])
def test_states_that_something_else_reads_in_full_are_computed_in_full(also):
    """x W is an output, or summed over all tokens; what follows its first token alone is computed for that."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["states"], "first_product"),
        helper.make_node("MatMul", ["states", "w"], ["more"], "second_product"),
        helper.make_node("Gather", ["more", "zero"], ["read"], "gather", axis=1),
        helper.make_node("ReduceSum", ["states", "axes"], ["total"], "sum", keepdims=0),
    ]
    outputs = {"read": ["batch", 4], **({"states": THREE} if also == "output" else {"total": ["batch", 4]})}
    constants = {"w": W, "zero": np.array(0), "axes": np.array([1])}
    graph = graph_of(nodes if also == "sum" else nodes[:3], outputs, constants, {"states": THREE, "more": THREE})
    made = read_tokens(graph)
    onnx.checker.check_model(made, full_check=True)
    assert tokens_of(made) == {"first_product": "sequence", "second_product": 1}
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    for want, got in zip(*(plain_session(each).run(None, {"x": x}) for each in (graph, made)), strict=True):
        assert np.allclose(want, got, atol=1e-6)


def test_operators_within_a_token_are_narrowed_and_those_across_tokens_are_not():
    """Split, Slice and Concat on the features; then a sum over the tokens, whose input is needed whole."""
    half = ["batch", "sequence", 2]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "early"),
        helper.make_node("CumSum", ["a", "axis"], ["b"], "across"),
        helper.make_node("Split", ["b"], ["c", "d"], "split", axis=-1, num_outputs=2),
        helper.make_node("Slice", ["x", "from", "to", "features"], ["e"], "slice"),
        helper.make_node("Mul", ["c", "e"], ["f"], "mul"),
        helper.make_node("Concat", ["f", "d"], ["g"], "concat", axis=2),
        helper.make_node("MatMul", ["g", "w"], ["h"], "late"),
        helper.make_node("Gather", ["h", "zero"], ["read"], "gather", axis=1),
    ]
    constants = {"w": W, "zero": np.array(0), "axis": np.array(1), "from": np.array([1]), "to": np.array([3])}
    constants["features"] = np.array([2])
    values = {**dict.fromkeys("abgh", THREE), **dict.fromkeys("cdef", half)}
    graph = graph_of(nodes, {"read": ["batch", 4]}, constants, values)
    made = read_tokens(graph)
    onnx.checker.check_model(made, full_check=True)
    assert tokens_of(made) == {"early": "sequence", "late": 1}
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    want, got = (plain_session(each).run(None, {"x": x})[0] for each in (graph, made))
    assert np.allclose(want, got, atol=1e-6)


@pytest.mark.parametrize(
    ("node", "shape", "axis"),
    [
        (helper.make_node("Softmax", ["a"], ["b"], axis=1), THREE, 1),
        (helper.make_node("Slice", ["a", "from", "to", "tokens"], ["b"]), ["batch", 2, 4], 1),
        (helper.make_node("Concat", ["a", "a"], ["b"], axis=1), ["batch", "twice", 4], 1),
        (helper.make_node("Split", ["a"], ["c", "b"], axis=1, num_outputs=2), ["batch", "rest", 4], 1),
        (helper.make_node("Reshape", ["a", "halves"], ["b"]), ["batch", "twice", 2], 1),
        (helper.make_node("Identity", ["a"], ["b"]), THREE, 2),
    ],
    ids=["softmax", "slice", "concat", "split", "reshape", "a product's features"],
)
def test_operators_across_the_axis_that_is_read_get_all_of_it(node, shape, axis):
    """Over tokens, by an axis counted from the end, too; and of a product every column, though the first alone is read."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "early"),
        node,
        helper.make_node("Gather", ["b", "zero"], ["read"], "gather", axis=axis),
    ]
    constants = {"w": W, "zero": np.array(0), "from": np.array([1]), "to": np.array([3]), "tokens": np.array([-2])}
    constants["halves"] = np.array([0, -1, 2])
    values = {"a": THREE, "b": shape, **({"c": ["batch", "first", 4]} if "c" in node.output else {})}
    graph = graph_of(nodes, {"read": [size for place, size in enumerate(shape) if place != axis]}, constants, values)
    made = read_tokens(graph)
    assert tokens_of(made) == {"early": "sequence"}
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    want, got = (plain_session(each).run(None, {"x": x})[0] for each in (graph, made))
    assert np.allclose(want, got, atol=1e-6)


def test_a_slice_that_names_no_axes_gets_all_tokens():
    """It may cut the tokens, too."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "early"),
        helper.make_node("Slice", ["a", "start", "end"], ["b"], "slice"),
        helper.make_node("MatMul", ["b", "w"], ["c"], "late"),
        helper.make_node("Gather", ["c", "zero"], ["read"], "gather", axis=1),
    ]
    constants = {"w": W, "zero": np.array(0), "start": np.array([0, 1, 0]), "end": np.array([9, 9, 4])}
    rest = ["batch", "rest", 4]
    made = read_tokens(graph_of(nodes, {"read": ["batch", 4]}, constants, {"a": THREE, "b": rest, "c": rest}))
    assert tokens_of(made) == {"early": "sequence", "late": 1}
    x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    assert np.allclose(plain_session(made).run(None, {"x": x})[0], x[:, 1] @ W @ W, atol=1e-5)
