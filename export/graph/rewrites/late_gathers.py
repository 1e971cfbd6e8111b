"""Delays the look-ups of a block's large constants until the block is computed."""

from __future__ import annotations

import re

import onnx
import onnx_ir
from onnx_ir import Node, Value

LEAST = 1024
"""Numbers of one looked-up entry from which it counts."""
_BLOCK = re.compile(r"(.*?\.\d+)\.")


def late_gathers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in which a Gather for a product, named after a module of a block, depends on the block's input, too.

    Runtimes compute what depends on the graph's inputs alone first: the entries of all blocks would be in memory at once, and
    out of the cache when they are used.
    """
    program = onnx_ir.from_proto(proto)
    states: dict[str, Value] = {}
    delayed: set[Node] = set()  # DeBERTa multiplies tokens and distances by one entry
    for product in list(program.graph):
        gather = product.inputs[1].producer() if product.op_type == "MatMul" else None
        block = _BLOCK.match(gather.name or "") if gather is not None and _is_large(gather) else None
        if block and gather not in delayed:
            delayed.add(gather)
            # the first product of a block has the block's states
            _delay(gather, states.setdefault(block[1], product.inputs[0]))
    program.graph.sort()
    return onnx_ir.to_proto(program)


def _is_large(gather: Node) -> bool:
    table = gather.inputs[0] if gather.op_type == "Gather" else None
    return (
        table is not None
        and table.is_initializer()
        and len(table.shape) == 3
        and table.shape[1] * table.shape[2] >= LEAST
        and not gather.attributes.get_int("axis", 0)
    )


def _delay(gather: Node, states: Value) -> None:
    """Let the index (batch,) of a Gather pass a Reshape to the batch's size, which is read off `states` (batch, tokens, in)."""
    index, name = gather.inputs[1], gather.name
    size = onnx_ir.node("Shape", [states], attributes={"start": 0, "end": 1}, name=f"{name}/batch")
    late = onnx_ir.node("Reshape", [index, size.outputs[0]], name=f"{name}/late")
    size.outputs[0].name, late.outputs[0].name = f"{name}/batch", f"{name}/late"
    late.outputs[0].dtype, late.outputs[0].shape = index.dtype, index.shape
    gather.graph.insert_before(gather, [size, late])
    gather.replace_input_with(1, late.outputs[0])
