"""Rewrites for ONNX Runtime's CPU: equal outputs, and the operators that they are for."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compressor.models.anatomy import layers_of
from compressor.processor import weight_bits
from compressor.tasks.features import torch_forward
from export.graph.rewrite import for_cpu, quantized_dynamic
from export.graph.rewrites import late_gathers
from export.graph.rewrites.joined_attention import joined_attention
from export.graph.rewrites.joined_gathers import joined_gathers
from export.graph.rewrites.joined_heads import joined_heads
from export.graph.rewrites.separate_residuals import separate_residuals
from export.graph.trace import OPSET, matrices
from export.runtimes.feeds import feeds_of
from export.runtimes.onnxruntime import plain_session, write_onnx
from tests.compressor.conftest import LAYERS, TRIED
from tests.export.conftest import INT8_APART, PLANS, check_wholly, encoding

JOINED = ("bert", "distilbert", "electra", "roberta", "xlm-roberta")
CASES = [("bert", plan) for plan in PLANS]
CASES += [pytest.param(name, "unequal", marks=() if name == "distilbert" else pytest.mark.slow) for name in JOINED[1:]]
APART = ("mpnet", "gpt2")


def batches():
    """Right-padded rows of several shapes; rows padded on the left, with holes, and without any token."""
    yield from (encoding(1, 1), encoding(1, 512), encoding(3, 9))
    batch = encoding(4, 12)
    mask = np.ones((4, 12), np.int64)
    mask[0], mask[1, :5], mask[2, 3:7] = 0, 0, 0
    yield batch | {"attention_mask": mask}


def operators(graph: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.node)


def check_equal(graph: onnx.ModelProto, model: torch.nn.Module) -> None:
    """What the graph computes without optimizations is what PyTorch does."""
    live, forward = plain_session(graph), torch_forward(model)
    for batch in batches():
        assert np.abs(live.run(None, feeds_of(live, batch))[0] - forward(batch)).max() < 1e-5


def check_joined(joined: onnx.ModelProto, operator: str, made: tuple[torch.nn.Module, onnx.ModelProto], plan: str) -> int:
    """A graph with its attentions joined is valid and computes the same; returns how many are."""
    model, graph = made
    # the last block's attention, whose queries are those of the first token, stays
    attentions = LAYERS - 1 - (plan == "emptied")
    assert (operators(joined)[operator], operators(joined)["Softmax"]) == (attentions, 1)
    onnx.checker.check_model(joined, full_check=True)
    check_equal(joined, model)
    assert operators(graph)["Softmax"] == attentions + 1 and not operators(graph)[operator]
    return attentions


@pytest.mark.parametrize(("architecture", "plan"), CASES)
def test_attention_is_joined_and_computes_the_same(architecture, plan, traced):
    made = traced(architecture, plan)
    check_joined(joined_attention(made[1]), "Attention", made, plan)


@pytest.mark.parametrize(("architecture", "plan"), CASES)
def test_heads_are_joined_and_compute_the_same(architecture, plan, traced):
    """Behind projections of any kind: those stay as they are, but for their constant biases."""
    made = _, graph = traced(architecture, plan)
    joined = joined_heads(graph)
    attentions = check_joined(joined, "MultiHeadAttention", made, plan)
    assert operators(joined)["MatMul"] == operators(graph)["MatMul"] - 2 * attentions


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in APART else pytest.mark.slow) for name in TRIED if name not in JOINED],
)
def test_other_attentions_stay(architecture, traced):
    _, graph = traced(architecture)
    assert joined_attention(graph) is graph


@pytest.mark.slow
def test_an_attention_with_an_excluded_matrix_stays_apart(tmp_path, traced):
    _, graph = traced("bert")
    excluded = "bert.encoder.layer.1.attention.self.key"
    assert excluded in matrices(graph)
    path = write_onnx(graph, tmp_path, precisions=["int8"], excluded=[excluded])["int8"]
    check_wholly(path)
    nodes = onnx.load(path).graph.node
    whole = operators(onnx.load(write_onnx(graph, tmp_path, precisions=["int8"])["int8"]))
    # the last block's attention stays apart: its two products of states have no weights
    assert whole["QAttention"] == whole["MatMul"] == 2
    assert sum(node.op_type == "QAttention" for node in nodes) == 1
    # its query and value are in int8 by themselves
    assert sum(node.op_type == "MatMulInteger" for node in nodes) == whole["MatMulInteger"] + 2
    assert [node.name for node in nodes if node.op_type == "MatMul" and node.name.endswith("key")] == [excluded]


@pytest.mark.parametrize("int8", [False, True])
def test_positions_are_projected_when_a_file_is_opened(tmp_path, int8, traced):
    """Of DeBERTa: two products a block."""
    model, graph = traced("deberta-v2")
    written = quantized_dynamic(for_cpu(graph), weight_bits=weight_bits()) if int8 else for_cpu(graph)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "opened.onnx")
    onnxruntime.InferenceSession(written.SerializeToString(), options, providers=["CPUExecutionProvider"])
    before, opened = (
        sum(any(word in node.op_type for word in ("MatMul", "Gemm")) for node in made.graph.node)
        for made in (written, onnx.load(tmp_path / "opened.onnx"))
    )
    assert opened == before - 2 * len(layers_of(model))


@pytest.mark.parametrize("plan", PLANS)
def test_attention_in_int8_has_a_scale_for_each_column(plan, traced):
    model, graph = traced("bert", plan)
    graph = quantized_dynamic(for_cpu(graph), weight_bits=weight_bits())
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
    widths = [layer.heads * 8 * 3 for layer in layers_of(model)[:-1] if layer.heads]
    attentions = [node for node in graph.graph.node if node.op_type == "QAttention"]
    assert [stored[node.input[4]].shape for node in attentions] == [(width,) for width in widths]
    live = plain_session(graph)
    for batch in batches():
        want = torch_forward(model)(batch)
        assert np.abs(live.run(None, feeds_of(live, batch))[0] - want).max() < INT8_APART * np.abs(want).max()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("architecture", ["bert", "mpnet", "gpt2"])
def test_no_session_joins_a_sum_with_its_norm(architecture, precision, tmp_path, traced):
    model, graph = traced(architecture)
    separate = separate_residuals(graph)
    check_equal(separate, model)
    onnx.checker.check_model(separate, full_check=True)
    found = []
    for number, proto in enumerate((graph, separate)):
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / f"{number}.onnx")
        made = proto if precision == "fp32" else quantized_dynamic(proto)
        onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found.append(operators(onnx.load(tmp_path / f"{number}.onnx")))
    # the first shows that it would
    assert found[0]["SkipLayerNormalization"] and not found[1]["SkipLayerNormalization"]
    assert found[1]["LayerNormalization"] == operators(graph)["LayerNormalization"]


def test_two_norms_of_one_sum_are_separated_once():
    """As in GPT-NeoX and Falcon, whose attention and FFN each have a norm of the same states."""
    states, first, second = (helper.make_tensor_value_info(name, 1, ["batch", "sequence", 4]) for name in ("x", "y", "z"))
    nodes = [helper.make_node("Add", ["x", "x"], ["sum"], "add")]
    nodes += [helper.make_node("LayerNormalization", ["sum", f"w{name}"], [name], f"norm_{name}") for name in "yz"]
    weights = [numpy_helper.from_array(np.full(4, scale, np.float32), f"w{name}") for name, scale in {"y": 1, "z": 2}.items()]
    total = helper.make_tensor_value_info("sum", 1, ["batch", "sequence", 4])
    graph = helper.make_graph(nodes, "parallel", [states], [first, second], weights, value_info=[total])
    made = separate_residuals(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    onnx.checker.check_model(made, full_check=True)
    assert operators(made) == {"Add": 1, "Reshape": 1, "LayerNormalization": 2}
    y, z = plain_session(made).run(None, {"x": np.arange(8, dtype=np.float32).reshape(1, 2, 4)})
    assert np.array_equal(2 * y, z) and np.abs(y).max() > 1


def test_a_graph_is_not_changed_and_equal_graphs_give_equal_bytes(traced):
    _, graph = traced("bert", "unequal")
    before = graph.SerializeToString(deterministic=True)
    first, again = (for_cpu(graph).SerializeToString(deterministic=True) for _ in range(2))
    assert first == again != before == graph.SerializeToString(deterministic=True)


def looked_up(tables: dict[str, np.ndarray], index: dict[str, str], product: bool = False) -> onnx.ModelProto:
    """x (batch, tokens, 4) through a sum or a product with an entry of each table, by its index (batch,), in order."""
    nodes, state = [], "x"
    for name in tables:
        nodes.append(helper.make_node("Gather", [f"{name}.table", index[name]], [f"{name}.entry"], name=name))
        nodes.append(
            helper.make_node("MatMul" if product else "Add", [state, f"{name}.entry"], [f"{name}.out"], name=f"{name}.use")
        )
        state = f"{name}.out"
    nodes.append(helper.make_node("Identity", [state], ["logits"]))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", 4])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch"]) for name in dict.fromkeys(index.values())]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 4])]
    weights = [numpy_helper.from_array(table, f"{name}.table") for name, table in tables.items()]
    opset = [helper.make_opsetid("", OPSET)]
    graph = helper.make_graph(nodes, "looked_up", inputs, outputs, weights)
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opset, ir_version=10))


def outputs_of(graph: onnx.ModelProto) -> list[np.ndarray]:
    """What a graph of `looked_up` computes from one row and from four, of several entries."""
    live, draw, found = plain_session(graph), np.random.default_rng(0), []
    for batch in (1, 4):
        x = draw.normal(size=(batch, 3, 4)).astype(np.float32)
        places = {given.name: draw.integers(0, 5, batch) for given in live.get_inputs() if given.name != "x"}
        found += live.run(None, {"x": x, **places})
    return found


def test_look_ups_of_vectors_by_one_index_are_joined_and_compute_the_same():
    draw = np.random.default_rng(1)
    sizes = {"a": 4, "b": 1, "c": 4, "alone": 4, "longer": 4}
    tables = {
        name: draw.normal(size=(6 if name == "longer" else 5, 1, size)).astype(np.float32) for name, size in sizes.items()
    }
    index = dict.fromkeys(sizes, "task") | {"alone": "other"}
    graph = looked_up(tables, index)
    joined = joined_gathers(graph)
    assert (operators(joined)["Gather"], operators(joined)["Split"]) == (3, 1), "another index or number of entries stays apart"
    assert sorted(tensor.name for tensor in joined.graph.initializer if tensor.name.endswith(".table")) == [
        "alone.table",
        "longer.table",
    ]
    onnx.checker.check_model(joined, full_check=True)
    for one, other in zip(outputs_of(graph), outputs_of(joined), strict=True):
        assert np.array_equal(one, other)
    few = looked_up({name: tables[name] for name in ("a", "b")}, index)
    assert operators(joined_gathers(few)) == operators(few), "two look-ups take no longer than one and a Split"


def test_look_ups_of_a_block_wait_for_its_states_and_compute_the_same(monkeypatch):
    monkeypatch.setattr(late_gathers, "LEAST", 16)
    draw = np.random.default_rng(1)
    tables = {f"layer.{block}.query": draw.normal(size=(5, 4, 4)).astype(np.float32) for block in range(3)}
    graph = looked_up(tables, dict.fromkeys(tables, "task"), product=True)
    # one entry is used twice, as DeBERTa's for tokens and distances
    last = graph.graph.node[-1]
    last.CopyFrom(helper.make_node("MatMul", [last.input[0], "layer.0.query.entry"], ["logits"], name="again"))
    late = late_gathers.late_gathers(graph)
    onnx.checker.check_model(late, full_check=True)
    for one, other in zip(outputs_of(graph), outputs_of(late), strict=True):
        assert np.array_equal(one, other)
    makers = {output: node for node in late.graph.node for output in node.output}
    waits = [makers[makers[makers[f"{name}.entry"].input[1]].input[1]].input[0] for name in tables]
    assert waits == ["x", "layer.0.query.out", "layer.1.query.out"]
    monkeypatch.setattr(late_gathers, "LEAST", 17)
    assert operators(late_gathers.late_gathers(graph)) == operators(graph), "small entries are looked up at once"
