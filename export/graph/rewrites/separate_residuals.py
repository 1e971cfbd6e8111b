"""Keeps ONNX Runtime from fusing a residual sum with the LayerNormalization after it."""

from __future__ import annotations

import onnx
import onnx_ir
from onnx_ir import tensor

SAME_SHAPE = [0, 0, -1]


def separate_residuals(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with a Reshape to the same shape between each sum and its LayerNormalizations.

    Every session of ONNX Runtime fuses the two into SkipLayerNormalization, whose CPU kernel takes more than twice as long as
    they do apart. A session option could prevent it, but only in our sessions, not in a user's or Triton's.
    """
    program = onnx_ir.from_proto(proto)
    norms = [node for node in program.graph if node.op_type == "LayerNormalization" and _follows_sum(node)]
    if not norms:
        return proto
    shape = onnx_ir.Value(name="same_shape", const_value=tensor(SAME_SHAPE, onnx_ir.DataType.INT64, name="same_shape"))
    shape.dtype, shape.shape = onnx_ir.DataType.INT64, onnx_ir.Shape([len(SAME_SHAPE)])
    program.graph.register_initializer(shape)
    separated: dict[onnx_ir.Value, onnx_ir.Value] = {}
    for norm in norms:
        total = norm.inputs[0]
        # attention and FFN may each have a norm of the same sum
        if total not in separated:
            separate = onnx_ir.node("Reshape", [total, shape], name=f"{norm.name}/separate")
            separate.outputs[0].name = f"{total.name}/separate"
            separate.outputs[0].type, separate.outputs[0].shape = total.type, total.shape
            program.graph.insert_before(norm, separate)
            separated[total] = separate.outputs[0]
        norm.replace_input_with(0, separated[total])
    return onnx_ir.to_proto(program)


def _follows_sum(norm: onnx_ir.Node) -> bool:
    total = norm.inputs[0]
    maker = total.producer()
    return maker is not None and maker.op_type == "Add" and total.shape is not None and len(total.shape) == len(SAME_SHAPE)
