"""The products of two activations in a traced graph, as attention has them, and the products that their inputs come from."""

from __future__ import annotations

import onnx

from export.graph.trace import matrices


def attention_products(graph: onnx.ModelProto) -> dict[str, frozenset[str]]:
    """Names of the products of two activations in a graph of `trace`, in order -> names of the products that their inputs come
    from, with no other product between: of attention's scores those of query and key, of its states the scores and the values.
    """
    weighted, behind, found = set(matrices(graph)), {}, {}
    for node in graph.graph.node:
        inputs = [behind.get(name, frozenset()) for name in node.input]
        made = frozenset().union(*inputs)
        if node.op_type in ("MatMul", "Gemm") or node.name in weighted:
            if node.name not in weighted and all(inputs):
                found[node.name] = made
            made = frozenset([node.name])
        elif node.op_type == "Shape":  # sizes are no activations
            made = frozenset()
        behind.update(dict.fromkeys(node.output, made))
    return found


def queries_and_keys(graph: onnx.ModelProto) -> set[str]:
    """Names of the products that attention's scores are made of; where query, key and value are one product, that one."""
    found = attention_products(graph)
    return {name for sources in found.values() for scores in sources & found.keys() for name in found[scores]}
