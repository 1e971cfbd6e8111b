"""Which file `precision: auto` keeps, which matrices it finds sensitive, and that those stay fp32 in both runtimes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper, numpy_helper
from transformers import AutoModelForTokenClassification
from transformers.pytorch_utils import Conv1D

from compressor.tasks.features import predict, torch_forward
from compressor.tasks.predictions import IGNORED
from export.auto.choose import Candidate, choose_candidate, counts, is_in_vain, with_verdict
from export.auto.sensitivity import quantized, rank
from export.graph.attention_products import queries_and_keys
from export.graph.trace import matrices, trace
from export.graph.weight_only import quantized_weights
from export.parity.compare import compare
from export.runtimes.onnxruntime import write_onnx
from export.runtimes.openvino import export_openvino
from export.runtimes.openvino_attention import attention_left
from export.runtimes.sessions import run, session
from pipelines.stages.export.config import ExportConfig
from tests.compressor.conftest import tiny
from tests.export.conftest import encoding
from tests.loud import LOUD, loud_graph, loud_model

FP32 = {"within": True, "verdict": "the same function as PyTorch"}
SOUND = compare("quantize", "int8", np.eye(3), np.eye(3), np.arange(3))


def result(loss, passed=True):
    failed = {"passed": passed, "failed": ("rounding",) * (not passed), "distance": 0.2, "rounding": 0.1}
    return replace(SOUND, metric_reference=0.9, metric_candidate=0.9 - loss, agreement=0.9, **failed)


def search(*args, **options):
    """What `choose` keeps and tries, in short."""
    kept, tried = searched(*args, **options)
    return (kept.runtime, kept.precision, len(kept.excluded)), [
        (one.runtime, one.precision, len(one.excluded), one.within) for one in tried
    ]


def searched(speeds, losses, budget=0.005, unlike=()):
    """(the trial that is kept, all trials): `speeds` and `losses` by (runtime, matrices left in fp32)."""

    def trial(runtime, spared=0):
        return Candidate(runtime, "int8", Path(runtime, str(spared)), tuple(str(number) for number in range(spared)))

    def clock(trials):
        ms = [speeds["fp32"] if one.precision == "fp32" else speeds[one.runtime, len(one.excluded)] for one in trials]
        return [replace(one, ms=time) for one, time in zip(trials, ms, strict=True)]

    def judge(one):
        key = (one.runtime, len(one.excluded))
        return with_verdict(one, result(losses[key], key not in unlike), budget)

    def spared(one):
        return (trial(one.runtime, count) for count in counts(9))

    plain = Candidate("a", "fp32", Path("fp32"), **FP32)
    runtimes = sorted({runtime for runtime, count in losses if not count})
    return choose_candidate([plain, *map(trial, runtimes)], clock=clock, judge=judge, spared=spared)


def test_the_fastest_within_the_budget_is_kept():
    speeds = {"fp32": 3, ("a", 0): 2, ("b", 0): 1}
    kept, tried = search(speeds, {("a", 0): 0.0, ("b", 0): 0.005})
    assert kept == ("b", "int8", 0)
    assert tried == [("b", "int8", 0, True), ("a", "fp32", 0, True), ("a", "int8", 0, False)]


def test_fp32_is_kept_where_it_is_the_fastest():
    kept, _ = searched({"fp32": 1, ("a", 0): 2}, {("a", 0): 0.0})
    assert (kept.runtime, kept.precision, kept.verdict) == ("a", "fp32", "the same function as PyTorch")


def test_fp32_is_no_last_resort_where_a_slower_file_with_spared_matrices_is_within():
    kept, _ = searched({"fp32": 4, ("a", 0): 1, ("a", 1): 9}, {("a", 0): 0.02, ("a", 1): 0.0})
    assert (kept.precision, kept.verdict) == ("fp32", "the same function as PyTorch")


def test_matrices_are_spared_before_a_precision_is_given_up():
    speeds = {"fp32": 9, ("a", 0): 1, ("a", 4): 5}
    kept, tried = search(speeds, {("a", 0): 0.02, ("a", 1): 0.02, ("a", 2): 0.006, ("a", 4): 0.005})
    assert kept == ("a", "int8", 4)
    assert [one[2] for one in tried] == [0, 1, 2, 4, 0]


def test_a_file_with_spared_matrices_takes_its_place_in_the_queue():
    speeds = {"fp32": 9, ("a", 0): 1, ("b", 0): 4, ("a", 1): 5}
    kept, tried = searched(speeds, {("a", 0): 0.02, ("a", 1): 0.0, ("b", 0): 0.0})
    assert (kept.runtime, kept.precision, len(kept.excluded)) == ("b", "int8", 0)
    assert [(one.runtime, len(one.excluded), one.verdict) for one in tried] == [
        ("a", 0, "loses 2.00 points, 0.5 allowed"),
        ("a", 1, "within the budget, slower than what is kept"),
        ("b", 0, "within the budget"),
        ("a", 0, "slower than what is kept"),
    ]
    assert search(speeds | {("b", 0): 6}, {("a", 0): 0.02, ("a", 1): 0.0, ("b", 0): 0.0})[0] == ("a", "int8", 1)


def test_fp32_is_the_last_resort_and_a_failed_bound_is_no_file_to_keep():
    losses = {("a", count): 0.02 for count in (0, 1, 2, 4)}
    speeds = {"fp32": 9, ("a", 0): 1, ("a", 1): 2}
    kept, _ = searched(speeds, losses)
    assert (kept.runtime, kept.precision, kept.verdict) == ("a", "fp32", "the last resort: the same function as PyTorch")
    kept, (refused, *_) = searched(speeds, {("a", 0): 0.0, ("a", 1): 0.0}, unlike={("a", 0)})
    assert (kept.runtime, kept.precision, len(kept.excluded)) == ("a", "int8", 1)
    assert refused.verdict == "not the same function (outputs move 2.0 times as far as rounding moves them)"


def test_a_file_without_numbers_has_no_loss():
    broken = np.eye(3)
    broken[1, 2] = np.nan
    trial = with_verdict(Candidate("a", "int8", Path("a")), compare("quantize", "int8", np.eye(3), broken, np.arange(3)), 0.005)
    assert trial.verdict == "not the same function (outputs that are not finite, first in row 1 of 3)"
    assert not {"loss", "agreement"} & trial.to_json().keys()


@pytest.mark.parametrize(("distance", "rounding", "vain"), [(0.5, 0.05, True), (0.13, 0.05, False), (0.05, 0.05, False)])
def test_matrices_in_fp32_are_in_vain_where_half_of_them_leave_more_than_rounding_explains(distance, rounding, vain):
    """Than the rounding of all matrices: fewer in fp32 may move outputs so far, 1.35 times .1."""
    failed = "rounding" if distance > 2 * rounding else "metric"
    most = replace(SOUND, passed=False, failed=(failed,), distance=distance, rounding=rounding)
    assert is_in_vain(result(0.0, passed=False), most) == vain


@pytest.mark.parametrize(
    ("bf16_ms", "bf16_loss", "kept"), [(1, 0.0, "bf16"), (1, 0.02, "int8"), (3, 0.0, "int8")], ids=["fast", "worse", "slow"]
)
def test_bf16_is_one_candidate_more(bf16_ms, bf16_loss, kept):
    """On a CPU that computes it: kept where it is the fastest within the budget, and no matrix of it is left in fp32."""
    ms, losses = {"fp32": 4, "int8": 2, "bf16": bf16_ms}, {"int8": 0.0, "bf16": bf16_loss}
    trials = [Candidate("a", precision, Path(precision), **(FP32 if precision == "fp32" else {})) for precision in ms]
    asked = []
    found, _ = choose_candidate(
        trials,
        clock=lambda waiting: [replace(one, ms=ms[one.precision]) for one in waiting],
        judge=lambda one: with_verdict(one, result(losses[one.precision]), 0.005),
        spared=lambda one: iter(asked.append(one.precision) or ()),
    )
    assert found.precision == kept and asked == (["bf16"] if bf16_loss else [])


@pytest.mark.parametrize(
    ("instructions", "precisions"), [(["amx_bf16"], ["bf16"]), (["avx512_bf16"], ["bf16"]), (["avx2"], [])]
)
def test_auto_tries_bf16_where_the_cpu_computes_it(monkeypatch, instructions, precisions):
    monkeypatch.setattr("export.runtimes.runtime.processor", lambda: {"cpu": "x", "instructions": instructions, "cores": 2})
    config = ExportConfig(precision=["auto"], runtime=["onnxruntime", "openvino"])
    written = {name: config.precisions_of(name) for name in config.runtime}
    assert written == {"onnxruntime": ["fp32", "int8"], "openvino": ["fp32", "int8", *precisions]}


def test_half_of_the_matrices_may_be_spared():
    assert list(counts(41)) == [1, 2, 4, 8, 16, 20]
    assert list(counts(3)) == [1]
    assert list(counts(1)) == []


@pytest.fixture(scope="module")
def outlier(tmp_path_factory):
    """A tiny BERT whose second ffn_out multiplies with one giant input, and its graph."""
    return loud_model(), loud_graph(tmp_path_factory.getbasetemp())


def asking(batches):
    """All answers to some batches."""
    return lambda forward: np.concatenate([forward(batch) for batch in batches])


@pytest.mark.parametrize("static", [False, True])
def test_the_matrix_behind_an_outlier_is_the_most_sensitive(outlier, static):
    model, graph = outlier
    batches, names = [encoding(4, 9), encoding(2, 20)], matrices(graph)
    before = [torch_forward(model)(batch) for batch in batches]
    steps = []
    found = rank(model, [*names, "no such module"], asking(batches), static=static, on_step=lambda: steps.append(1))
    assert {one.name for one in found} == set(names) and len(steps) == len(names)
    assert found[0].name == LOUD and found[0].difference > 5 * found[1].difference > 0
    assert all(np.array_equal(torch_forward(model)(batch), old) for batch, old in zip(batches, before, strict=True))


@pytest.mark.parametrize("static", [False, True])
def test_a_difference_is_the_mean_over_the_rows_of_all_batches(static):
    """By hand, of one matrix: its inputs have one scale of all batches where it is static, else that of each call."""
    model, batches = tiny("bert", torch.float32), [encoding(2, 9), encoding(4, 20)]
    name, seen = "bert.encoder.layer.1.output.dense", []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    reference = asking(batches)(torch_forward(model))
    hook.remove()
    largest = [float(inputs.max()) for inputs in seen]
    limits = (min(float(inputs.min()) for inputs in seen), max(largest))
    with quantized(model.get_submodule(name), limits if static else None):
        changes = np.abs(asking(batches)(torch_forward(model)) - reference)
    (found,) = rank(model, [name], asking(batches), static=static)
    assert found.difference == pytest.approx(changes.mean()) and largest[0] > largest[1]


def test_words_of_unequal_sentences_are_what_a_ranking_asks():
    """The answers at labels alone, whatever the lengths of a batch."""
    model = tiny("bert", torch.float32, auto=AutoModelForTokenClassification)
    rows = [{"input_ids": [5] * length, "attention_mask": [1] * length} for length in (3, 9, 6)]
    labels = np.array([[IGNORED, 1, *[IGNORED] * 7], [0] * 9, [IGNORED] * 5 + [2] + [IGNORED] * 3])
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ask = partial(predict, rows=rows, pad_id=0, labels=labels, batch_size=2)
    assert ask(torch_forward(model)).shape == (11, 3)
    found = rank(model, names, ask, static=True)
    assert {one.name for one in found} == set(names) and found[-1].difference > 0


def test_a_tied_weight_is_rounded_in_one_place_only():
    """GPT-2's score reads what wte's weight made: rounding one embedding must leave the other users of its tensor."""
    model = tiny("gpt2", torch.float32)
    model.transformer.wpe.weight = model.transformer.wte.weight
    batch = encoding(2, 9)
    both = rank(model, ["transformer.wte", "transformer.wpe"], asking([batch]), static=False)
    assert len({one.difference for one in both}) == 2


def test_a_weight_is_rounded_by_output_whichever_way_it_is_stored():
    """To 7 bits, from -63 to 63, where the processor multiplies so."""
    turned, linear = Conv1D(3, 500), torch.nn.Linear(500, 3)
    linear.weight = torch.nn.Parameter(turned.weight.detach().T * torch.tensor([[1.0], [9.0], [99.0]]))
    turned.weight = torch.nn.Parameter(linear.weight.detach().T.clone())
    for bits, levels in ((8, 255), (7, 127)):
        with quantized(turned, None, bits), quantized(linear, None, bits):
            assert torch.equal(turned.weight.T, linear.weight)
            assert levels / 2 < max(len(row.unique()) for row in linear.weight) <= levels


def test_products_that_share_a_turned_weight_share_what_is_stored(tmp_path):
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32), "weight")
    sizes = (("x", 64), ("y", 64), ("a", 32), ("b", 32))
    values = {name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", size]) for name, size in sizes}
    nodes = [
        helper.make_node("Transpose", ["weight"], ["turned"], perm=[1, 0]),
        *(helper.make_node("MatMul", [one, "turned"], [other], name=other) for one, other in (("x", "a"), ("y", "b"))),
    ]
    graph = helper.make_graph(nodes, "two", [values["x"], values["y"]], [values["a"], values["b"]], [weight])
    proto = quantized_weights(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), 8)
    names = [tensor.name for tensor in proto.graph.initializer]
    assert len(names) == len(set(names)) and [node.op_type for node in proto.graph.node] == ["MatMulNBits"] * 2
    live, x = ort.InferenceSession(proto.SerializeToString()), np.ones((2, 64), np.float32)
    for found in live.run(None, {"x": x, "y": x}):
        np.testing.assert_allclose(found, x @ numpy_helper.to_array(weight).T, atol=0.5)


def test_products_are_called_after_their_modules(outlier):
    model, graph = outlier
    names = matrices(graph)
    assert {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Embedding)} == set(
        names
    )
    assert len(names) == len(set(names))


def integers(path):
    """The names of what a file multiplies in int8, by their weights' types."""
    graph = onnx.load(path).graph
    return sum(node.op_type == "MatMulInteger" for node in graph.node)


def test_what_is_spared_stays_fp32_in_onnx_runtime(outlier, tmp_path):
    model, graph = outlier
    batch, names = encoding(4, 12), matrices(graph)
    want = torch_forward(model)(batch)
    errors, products = [], []
    for number, excluded in enumerate(((), (LOUD,), names)):
        path = write_onnx(graph, tmp_path / str(number), precisions=["int8"], excluded=excluded)["int8"]
        errors.append(np.abs(run(session(path), batch) - want).mean())
        products.append(integers(path))
    assert products[0] - products[1] == 1 and products[2] == 0
    assert errors[1] < 0.2 * errors[0] and errors[2] < 1e-4


@pytest.mark.slow
def test_a_module_that_multiplies_twice_is_spared_in_both_products(tmp_path):
    """DeBERTa's queries and keys: of the tokens, and of the distances between them."""
    graph = trace(tiny("deberta-v2", torch.float32), encoding(2, 9))
    query = next(name for name in matrices(graph) if name.endswith("query_proj"))
    assert {query, f"{query}#2"} <= set(matrices(graph))
    quantized = [write_onnx(graph, tmp_path / str(len(ex)), precisions=["int8"], excluded=ex)["int8"] for ex in ((), (query,))]
    assert integers(quantized[0]) - integers(quantized[1]) == 2


def test_what_is_spared_stays_fp32_in_openvino(outlier, tmp_path):
    pytest.importorskip("nncf", reason="the extra openvino is not installed")
    _, graph = outlier
    names = matrices(graph)
    rows = [encoding(4, length) for length in (9, 20)]
    kinds, rounded = [], []
    for number, excluded in enumerate(([LOUD, "classifier"], names)):
        path = export_openvino(graph, tmp_path / str(number), precisions=["int8"], rows=rows, excluded=excluded)["int8"]
        ops = {op.get_friendly_name().removesuffix("/WithoutBiases"): op for op in nodes_of(path) if is_product(op)}
        kinds.append({name: stored(op) for name, op in ops.items() if name in names})
        rounded.append(sum(op.get_type_name() == "FakeQuantize" for op in nodes_of(path)))
    assert rounded[0] > 6 and rounded[1] == 0, "queries and keys, too, are rounded only where their matrices are"
    assert kinds[0][LOUD] == kinds[0]["classifier"] == "f32" and list(kinds[0].values()).count("f32") == 2
    assert set(kinds[0].values()) == {"f32", "i8"} and set(kinds[1].values()) == {"f32"}
    assert set(kinds[0]) == set(kinds[1]) == set(names)


@pytest.mark.parametrize(
    ("excluded", "left"),
    [("query", ["self", "self#2/attention"]), ("key", ["self", "self#2/attention"]), ("value", ["self#2"]), ("dense", [])],
)
def test_an_attention_stays_fp32_with_its_query_or_key(outlier, excluded, left):
    """Joined as one operator, which reads values in fp32 anyway, or as two products. Other blocks are not touched."""
    _, graph = outlier
    block = "bert.encoder.layer.1.attention"
    name = f"{block}.output.dense" if excluded == "dense" else f"{block}.self.{excluded}"
    assert attention_left(graph, [name]) == [f"{block}.{one}" for one in left]


def test_a_key_that_attention_cannot_round_is_the_most_sensitive(outlier):
    """One channel of it is large, and meets a 0 in every query: static int8 has one scale for the whole key."""
    model, (_, graph) = tiny("bert", torch.float32), outlier
    attention = model.bert.encoder.layer[1].attention.self
    with torch.no_grad():
        attention.key.bias[0] = 300.0
        attention.query.weight[0] = attention.query.bias[0] = 0.0
    ask, names = asking([encoding(4, 9)]), matrices(graph)
    plain, known = (rank(model, names, ask, static=True, scored=scored) for scored in ((), queries_and_keys(graph)))
    key = "bert.encoder.layer.1.attention.self.key"
    assert known[0].name == key != plain[0].name and known[0].difference > 5 * known[1].difference
    assert rank(model, names, ask, static=False, scored=queries_and_keys(graph)) == rank(model, names, ask, static=False)


def nodes_of(path):
    import openvino

    return openvino.Core().read_model(path).get_ordered_ops()


def is_product(op):
    return op.get_type_name() in ("MatMul", "Gather")


def stored(op):
    """The type in which the weights behind a product are stored; that of a product without weights is what it computes in."""
    types = []
    for place in range(len(op.inputs())):
        source = op.input_value(place).get_node()
        while source.get_type_name() in ("Convert", "Multiply", "Subtract", "Transpose", "FakeQuantize", "Reshape"):
            source = source.input_value(0).get_node()
        types.append(source.get_output_element_type(0).get_type_name())
    return "i8" if {"i8", "u8"} & set(types) else "f32"
