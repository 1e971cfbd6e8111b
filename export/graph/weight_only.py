"""Weight-only quantization of decoders to 8 or 4 bits: each token reads every weight once, so bytes cost time."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

BLOCK = 32
"""Number of consecutive weights of a row that share a scale."""
LEVEL = 4
"""ONNX Runtime's accuracy level: activations are quantized to int8 in blocks of 32. Without it, 8-bit weights have no fast
kernel on a CPU: SmolLM2-135M then takes 216 ms of CPU time a token, against 17, and 32 in fp32; 4 bits take 22 against 18."""


def quantized_weights(proto: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """The graph with every constant matrix that activations are multiplied with in `bits` (8 or 4): MatMulNBits operators.

    A scale a block of BLOCK inputs, symmetric, rounded to nearest; norms, biases, sums and embeddings stay in fp32. An
    embedding tied to the head is then stored twice, once in `bits`.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    _as_products(copy.graph)
    quantizer = _quantizer()(copy, bits=bits, block_size=BLOCK, is_symmetric=True, accuracy_level=LEVEL)
    quantizer.process()
    return quantizer.model.model


def _quantizer() -> type:
    """ONNX Runtime's quantizer, imported without its logging setup for the whole process and its line per node."""
    root, held = logging.getLogger(), logging.NullHandler()
    root.addHandler(held)
    try:
        from onnxruntime.quantization import matmul_nbits_quantizer
    finally:
        root.removeHandler(held)
    matmul_nbits_quantizer.logger.setLevel(logging.WARNING)
    return matmul_nbits_quantizer.MatMulNBitsQuantizer


def _as_products(graph: onnx.GraphProto) -> None:
    """Rewrite what the quantizer skips as products with constants: a Gemm (GPT-2), a transposed embedding (a tied head)."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights}
    nodes = []
    for node in graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "MatMul" and node.input[1] in turned:
            node.input[1] = _turned(graph, weights[turned[node.input[1]]])
        elif node.op_type == "Gemm" and node.input[1] in weights and _plain(attributes):
            name = _turned(graph, weights[node.input[1]]) if attributes.get("transB") else node.input[1]
            product, biases = f"{node.output[0]}_product", [bias for bias in node.input[2:] if bias]
            nodes.append(helper.make_node("MatMul", [node.input[0], name], [product], node.name))
            # an Identity if it has no bias: it costs nothing, and preserves the name of the output
            node = helper.make_node("Add" if biases else "Identity", [product, *biases], list(node.output), f"{node.name}_sum")
        nodes.append(node)
    used = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(node for node in nodes if node.output[0] not in turned or node.output[0] in used)


def _plain(attributes: dict[str, Any]) -> bool:
    """Whether a Gemm is a plain product and sum, as torch's layers are."""
    return attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0 and not attributes.get("transA")


def _turned(graph: onnx.GraphProto, tensor: onnx.TensorProto) -> str:
    """Add the transposed matrix to the graph and return its name."""
    name = f"{tensor.name}_turned"
    if all(other.name != name for other in graph.initializer):  # one that several products share is there already
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(numpy_helper.to_array(tensor).T), name))
    return name
