"""Joins the look-ups of many short vectors by one index into one look-up."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType, Graph, Node, Value

LEAST = 3
"""Look-ups from which joining them saves time: one look-up and one Split remain."""


def joined_gathers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with one Gather and one Split in place of the Gathers of constants (slots, 1, size) by the same index.

    A Gather of a few numbers takes as long as one of thousands: it is the number of operators that counts.
    """
    program = onnx_ir.from_proto(proto)
    groups: dict[tuple[str, DataType, int], list[Node]] = defaultdict(list)
    for node in program.graph:
        if node.op_type == "Gather" and _is_vectors(node.inputs[0]) and not node.attributes.get_int("axis", 0):
            table = node.inputs[0]
            groups[node.inputs[1].name, table.dtype, table.shape[0]].append(node)
    for nodes in groups.values():
        if len(nodes) >= LEAST:
            _join(program.graph, nodes)
    return onnx_ir.to_proto(program)


def _is_vectors(table: Value) -> bool:
    return table.is_initializer() and table.const_value is not None and len(table.shape) == 3 and table.shape[1] == 1


def _join(graph: Graph, nodes: list[Node]) -> None:
    """Replace Gathers of one index; the new nodes stand where the first of them stood."""
    first, tables = nodes[0], [node.inputs[0] for node in nodes]
    joined = np.concatenate([table.const_value.numpy() for table in tables], axis=2)
    sizes = np.array([table.shape[2] for table in tables])
    table, lengths = (
        onnx_ir.Value(name=f"{tables[0].name}/{name}", const_value=onnx_ir.tensor(array, name=f"{tables[0].name}/{name}"))
        for name, array in (("joined", joined), ("sizes", sizes))
    )
    for value in (table, lengths):
        value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
        graph.register_initializer(value)
    gather = onnx_ir.node("Gather", [table, first.inputs[1]], attributes={"axis": 0}, name=f"{first.name}/joined")
    split = onnx_ir.node("Split", [gather.outputs[0], lengths], attributes={"axis": 2}, num_outputs=len(nodes))
    gather.outputs[0].name, split.name = f"{first.outputs[0].name}/joined", f"{first.name}/split"
    graph.insert_before(first, [gather, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        old = node.outputs[0]
        part.name, part.dtype, part.shape = f"{old.name}/part", old.dtype, old.shape
        old.replace_all_uses_with(part)
    graph.remove(nodes, safe=True)
    for table in {value.name: value for value in tables}.values():
        if not table.uses():
            del graph.initializers[table.name]
