"""ONNX in half precision, for CUDA and TensorRT: fp16 and bf16 graphs whose sums of squares, softmax and angles stay in fp32.

In a graph fused for CUDA, norms are single operators, as is attention of a supported form (not MPNet's or DeBERTa's, which add
position terms); these take fp16 and sum in fp32 internally.

ONNX Runtime's CPU computes in neither: it has no kernels for bf16, and runs an fp16 graph in fp32, with casts that it removes
between two operators, so that no result is rounded and none overflows. Such a graph is therefore checked by emulation: the same
operators in fp32 with every result rounded to the graph's type (`emulated`). The file itself is not run there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
KEPT_IN_FP32 = ("LayerNormalization", "Softmax", "ReduceMean", "Pow", "Sqrt", "Reciprocal")
"""Operators whose sums or squares exceed the range of fp16 (65504), and the roots of these; CUDA has no bf16 Reciprocal."""
ANGLES = ("Cos", "Sin")
"""Operators of rotary positions: fp16 has too few digits for large angles."""
WHOLE = (TensorProto.INT32, TensorProto.INT64)
"""Types to which logarithmic distances are rounded: in half precision a distance at the edge falls into another bucket."""
SMALL = 1024
"""Values of an initializer that may be a shape or axes, which the inference of shapes reads; it reads no larger one."""
LARGEST = 1e4
"""Constants without two axes are clamped to this magnitude: attention masks contain the lowest float, and a sum with -65504
would be infinite. Matrices are clamped to what their type holds."""


def half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The fp32 graph in fp16; inputs, outputs, KEPT_IN_FP32, the nodes between them, rotary angles and distances that become
    whole numbers stay in fp32."""
    # part of an optional extra
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)  # the converter works in place
    _replace(copy.graph.value_info, _value_types(proto))
    kept = set(_kept(copy))
    _own_weights(copy, kept)
    blocked = {"op_block_list": [*DEFAULT_OP_BLOCK_LIST, *KEPT_IN_FP32], "node_block_list": list(kept)}
    # its own inference fails from 2 GB on
    made = convert_float_to_float16(copy, keep_io_types=True, max_finite_val=LARGEST, disable_shape_infer=True, **blocked)
    _large_weights(made, proto)
    return _joined(made)


def _value_types(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Types and shapes of the values in a graph of any size: onnx infers them in messages below 2 GB alone, so large
    weights are inputs there."""
    bare = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import, functions=proto.functions)
    bare.graph.CopyFrom(onnx.GraphProto(name=proto.graph.name, node=proto.graph.node, output=proto.graph.output))
    bare.graph.input.extend(proto.graph.input)
    bare.graph.value_info.extend(proto.graph.value_info)
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= SMALL:
            bare.graph.initializer.add().CopyFrom(tensor)
        else:
            bare.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return list(onnx.shape_inference.infer_shapes(bare).graph.value_info)


def _replace(field: Any, values: Iterable[Any]) -> None:
    """Give a repeated field of a message other values."""
    del field[:]
    field.extend(values)


def _kept(proto: onnx.ModelProto) -> Iterator[str]:
    """Names of the nodes that stay in fp32: KEPT_IN_FP32, inputs of rotary angles and of what is rounded to whole numbers, and
    nodes between squares and their root."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    for node in proto.graph.node:
        if node.op_type in KEPT_IN_FP32:
            yield node.name
        if node.op_type in ANGLES or (node.op_type == "Cast" and node.attribute[0].i in WHOLE):
            yield from _ancestors(node, makers, lambda ancestor: ancestor.op_type != "Shape")
        if node.op_type == "Sqrt":
            yield from _ancestors(node, makers, lambda ancestor: ancestor.op_type in ("Add", "ReduceMean"))


def _ancestors(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto], through) -> Iterator[str]:
    """Names of a node and of all nodes that it is computed from, upwards through those that `through` accepts."""
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current.name not in seen:
            seen.add(current.name)
            yield current.name
            waiting += [makers[name] for name in current.input if name in makers and through(makers[name])]


def _own_weights(proto: onnx.ModelProto, kept: set[str]) -> None:
    """Give every node that stays in fp32 separate weights: the converter makes one cast per use, all with the same name."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.name not in kept:
            continue
        for place, name in enumerate(node.input):
            if name in weights:
                node.input[place] = f"{node.name}_{name}_{place}"
                copy = proto.graph.initializer.add()
                copy.CopyFrom(weights[name])
                copy.name = node.input[place]


def _large_weights(made: onnx.ModelProto, proto: onnx.ModelProto) -> None:
    """Give the matrices of an fp16 graph those weights of its fp32 graph beyond LARGEST that fp16 holds."""
    exact, most = {tensor.name: tensor for tensor in proto.graph.initializer}, np.finfo(np.float16).max
    for tensor in made.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16 and len(tensor.dims) > 1:
            values = numpy_helper.to_array(exact[tensor.name])
            large = abs(values) > LARGEST
            if large.any():
                narrow = np.where(large, values.clip(-most, most), numpy_helper.to_array(tensor)).astype(np.float16)
                tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))


def _joined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the converter's casts to fp16 and back between two fp32 nodes (a square would overflow in between), remove unused
    casts, and sort the nodes."""

    def source(name: str, to: int) -> str | None:
        node = makers.get(name)
        return node.input[0] if node is not None and node.op_type == "Cast" and node.attribute[0].i == to else None

    # if several fp32 nodes read one value, the converter adds a cast for each, all with the same name
    makers = {name: node for node in proto.graph.node for name in node.output}
    nodes = list({node.output[0]: node for node in proto.graph.node}.values())
    for node in nodes:
        for place, name in enumerate(node.input):
            narrow = source(name, TensorProto.FLOAT)
            wide = source(narrow, TensorProto.FLOAT16) if narrow else None
            if wide and node.op_type != "Cast":
                node.input[place] = wide
    _replace(proto.graph.node, nodes)
    model = onnx_ir.from_proto(proto)
    model.graph.sort()
    return onnx_ir.to_proto(RemoveUnusedNodesPass()(model).model)


def brain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The unfused fp32 graph in bf16, where `half` would use fp16. Weights are rounded once, from fp32."""

    def rounded(tensor: onnx.TensorProto) -> onnx.TensorProto:
        values = numpy_helper.to_array(exact.get(tensor.name, tensor)).astype(np.float32)
        held = values if values.ndim > 1 else values.clip(-LARGEST, LARGEST)
        return numpy_helper.from_array(held.astype(ml_dtypes.bfloat16), tensor.name)

    made, exact = half(proto), {tensor.name: tensor for tensor in proto.graph.initializer}
    for tensor in made.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(rounded(tensor))
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT16:
                attribute.t.CopyFrom(rounded(attribute.t))
    for value in made.graph.value_info:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    return made


def emulated(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A graph in half precision for a runtime without its kernels: each operator in fp32, its result rounded by a cast to the
    type that it has in the graph, where what exceeds the range of fp16 becomes infinite. What an operator that joins several
    computes inside is not rounded. A graph without weights in half precision is returned as it is."""

    def wide(tensor: onnx.TensorProto) -> onnx.TensorProto:
        return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)

    if all(tensor.data_type not in HALF for tensor in proto.graph.initializer):
        return proto
    narrow, made = _narrow(proto), onnx.ModelProto()
    made.CopyFrom(proto)
    for tensor in made.graph.initializer:
        if tensor.data_type in HALF:
            tensor.CopyFrom(wide(tensor))
    nodes = []
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in HALF:
                attribute.i = TensorProto.FLOAT
            if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in HALF:
                attribute.t.CopyFrom(wide(attribute.t))
        casts = []
        for place, name in enumerate(node.output):
            if name in narrow:
                node.output[place] = f"{name}/exact"
                casts.append(helper.make_node("Cast", [f"{name}/exact"], [f"{name}/rounded"], to=narrow[name]))
                casts.append(helper.make_node("Cast", [f"{name}/rounded"], [name], to=TensorProto.FLOAT))
        nodes += [node, *casts]
    _replace(made.graph.value_info, ())
    _replace(made.graph.node, nodes)
    return made


def _narrow(proto: onnx.ModelProto) -> dict[str, int]:
    """The type of every value in half precision that an operator reads. onnx infers none for ONNX Runtime's
    own operators and those right behind them: a result of theirs has that of their inputs."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*_value_types(proto), *proto.graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        inherited = next((types[name] for name in node.input if types.get(name) in HALF), TensorProto.UNDEFINED)
        types |= {name: inherited for name in node.output if not types.get(name)}
    read = {name for node in proto.graph.node for name in node.input}
    return {name: types[name] for name in read if types.get(name) in HALF}
