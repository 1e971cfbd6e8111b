"""Attention as it is traced: softmax(Q K^T * scale + mask) V, also where prefixes or a bias of fewer heads belong to it."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch

from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.features import torch_forward
from export.graph.decoder import trace_generator
from export.graph.trace import trace
from export.runtimes.onnxruntime import plain_session
from export.runtimes.sessions import run
from tests.compressor.conftest import TRIED, applies, encoding, tiny, tuned
from tests.compressor.test_heads import GENERATES

WITH_PREFIXES = [name for name in TRIED if applies("prefix", name)]


def scaled_apart(graph: onnx.ModelProto) -> list[str]:
    """The products of keys and queries that are scaled apart, as torch's own attention is decomposed."""
    scalars = {tensor.name for tensor in graph.graph.initializer if not tensor.dims or list(tensor.dims) == [1]}
    constants = {node.output[0] for node in graph.graph.node if node.op_type in ("Constant", "Sqrt")}
    scaled = {node.output[0] for node in graph.graph.node if node.op_type == "Mul" and (scalars | constants) & set(node.input)}
    return [node.name for node in graph.graph.node if node.op_type == "MatMul" and set(node.input) <= scaled]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bert" else pytest.mark.slow) for name in WITH_PREFIXES]
)
def test_prefixes_are_traced_in_the_plain_form(name):
    """A row without any token attends to the prefixes alone, as in PyTorch."""
    model = tuned(tiny(name, torch.float32), "prefix").eval()
    batch = {key: values.numpy() for key, values in encoding(3, 9).items()}
    batch["attention_mask"][1, 4:] = batch["attention_mask"][2] = 0
    graph = trace(model, batch)
    assert scaled_apart(graph) == []
    assert sum(node.op_type == "Softmax" for node in graph.graph.node) == len(layers_of(model))
    assert np.abs(run(plain_session(graph), batch) - torch_forward(model)(batch)).max() < 1e-5


@pytest.mark.slow
def test_a_bias_of_fewer_heads_takes_one_operator_more():
    graphs = []
    for plan in ({}, {0: Removal([0])}):
        model = tiny("t5", torch.float32, auto=GENERATES["t5"])
        remove(model, plan)
        graphs.append([Counter(node.op_type for node in graph.graph.node) for graph in trace_generator(model).values()])
    (encoder, decoder), (cut_encoder, cut_decoder) = graphs
    assert cut_encoder == encoder + Counter(Gather=1) and cut_decoder == decoder
