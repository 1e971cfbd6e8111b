"""Removes the computation of tokens that nothing reads.

A head that classifies a row reads the first token's states alone. The last block then needs only that token's query, residual
and FFN; its keys and values still come from every token. PyTorch computes all of it and then drops the rest.
"""

from __future__ import annotations

import onnx
import onnx_ir
from onnx_ir import DataType, Node, Value, tensor
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graph.rewrites.joined_attention import constant_of

ACTIVATIONS = {"Erf", "Exp", "Gelu", "Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"}
ARITHMETIC = {"Add", "Cast", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Not", "Pow", "Reciprocal", "Sub", "Where"}
ELEMENTWISE = frozenset(ACTIVATIONS | ARITHMETIC)
ALONG_LAST_AXES = frozenset({"LayerNormalization", "LogSoftmax", "RMSNormalization", "Softmax"})
"""Operators on all entries from their attribute `axis` on, one position of the other axes at a time."""
WITHIN = frozenset({"Concat", "GatherElements", "Split"})
"""Operators along their attribute `axis`, alike at every position of the other axes."""

Narrowed = dict[Node, tuple[int, list[int | None]]]
"""Node -> the axis of its outputs of which it computes the first position alone, and the axis of each input of which it then
needs the first position; None for an input that it needs whole."""


def read_tokens(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in which states of which only the first position of an axis is read are computed at that position alone;
    `proto` itself where no matrix product gets smaller.

    States that something else reads in full are computed in full, and a Slice takes the first position.
    """
    program = onnx_ir.from_proto(proto)
    narrowed = _narrowed(program.graph)
    if not any(node.op_type == "MatMul" for node in narrowed):
        return proto
    slices: dict[tuple[Value, int], Value] = {}
    for node in filter(narrowed.get, list(program.graph)):
        _narrow(node, narrowed, slices)
    RemoveUnusedNodesPass()(program)  # what computed the shapes before
    return onnx_ir.to_proto(program)


def _narrowed(graph: onnx_ir.Graph) -> Narrowed:
    """The nodes of whose outputs only the first position of one axis is read, and that can compute it alone."""
    wanted: dict[Value, int | None] = dict.fromkeys(graph.outputs)  # None: all of a value is read
    narrowed: Narrowed = {}
    for node in reversed(graph):
        read = {wanted[value] for value in node.outputs if value in wanted}
        axis = read.pop() if len(read) == 1 else None
        axes = _axes(node, axis) if axis is not None else None
        if axes is None:
            axes = _first_read(node)
        else:
            narrowed[node] = axis, axes
        for value, own in zip(node.inputs, axes, strict=True):
            if value is not None:
                wanted[value] = own if wanted.get(value, own) == own else None
    return narrowed


def _first_read(node: Node) -> list[int | None]:
    """For each input of a node that is computed in full the axis of which it reads only the first position."""
    axes: list[int | None] = [None] * len(node.inputs)
    index = constant_of(node.inputs[1]) if node.op_type == "Gather" else None
    if index is not None and not index.any() and node.inputs[0].shape is not None:
        axes[0] = node.attributes.get_int("axis", 0) % len(node.inputs[0].shape)
    return axes


def _axes(node: Node, axis: int) -> list[int | None] | None:
    """For each input the axis whose first position is enough for the first position of `axis` of the outputs, None for an
    input that is read in full; None where the node must be computed in full."""
    shapes = [value.shape for value in (*node.inputs, *node.outputs) if value is not None]
    if any(shape is None for shape in shapes):
        return None
    rank = len(node.outputs[0].shape)
    of_first = [axis, *[None] * (len(node.inputs) - 1)]
    along = node.attributes.get_int("axis", -1) % rank
    if node.op_type in ELEMENTWISE:
        return [_aligned(value, axis, rank) for value in node.inputs]
    if node.op_type in ALONG_LAST_AXES and axis < along:
        return of_first
    if node.op_type == "MatMul" and axis == rank - 2 and len(node.inputs[0].shape) == rank:
        return of_first
    if node.op_type == "Transpose":
        return [node.attributes["perm"].as_ints()[axis]]
    if node.op_type == "Reshape" and node.inputs[0].shape[: axis + 1] == node.outputs[0].shape[: axis + 1]:
        return of_first if _sizes(node.outputs[0], axis).count(-1) <= 1 else None
    if node.op_type in WITHIN and axis != along:
        return of_first if node.op_type == "Split" else [axis] * len(node.inputs)
    if node.op_type == "Slice" and len(node.inputs) > 3:  # without axes it slices all of them
        sliced = constant_of(node.inputs[3])
        return of_first if sliced is not None and axis not in sliced % rank else None
    return None


def _aligned(value: Value, axis: int, rank: int) -> int | None:
    """The axis of an elementwise operator's input that meets `axis` of the output; None where the input is broadcast there."""
    own = axis - (rank - len(value.shape))
    return None if own < 0 or value.shape[own] == 1 else own


def _first_of(value: Value, axis: int) -> onnx_ir.Shape:
    """The shape of the first position of `axis`."""
    return onnx_ir.Shape([1 if place == axis else size for place, size in enumerate(value.shape)])


def _sizes(value: Value, axis: int) -> list[int]:
    """The sizes of the first position of `axis`, -1 for one that is not known."""
    return [size if isinstance(size, int) else -1 for size in _first_of(value, axis)]


def _narrow(node: Node, narrowed: Narrowed, slices: dict[tuple[Value, int], Value]) -> None:
    """Let a node compute the first position alone."""
    axis, axes = narrowed[node]
    for place, own in enumerate(axes):
        value = node.inputs[place]
        if own is not None and value.producer() not in narrowed:
            node.replace_input_with(place, _sliced(node, value, own, slices))
    if node.op_type == "Reshape":
        node.replace_input_with(1, _integers(node.graph, _sizes(node.outputs[0], axis)))
    for value in node.outputs:
        value.shape = _first_of(value, axis)


def _sliced(node: Node, value: Value, axis: int, slices: dict[tuple[Value, int], Value]) -> Value:
    """The first position of an axis of a value that is computed in full."""
    if (value, axis) not in slices:
        ends = [_integers(node.graph, [number]) for number in (0, 1, axis)]
        first = onnx_ir.node("Slice", [value, *ends], name=f"{value.name}/first")
        first.outputs[0].name, first.outputs[0].dtype = f"{value.name}/first", value.dtype
        first.outputs[0].shape = _first_of(value, axis)
        node.graph.insert_before(node, first)
        slices[value, axis] = first.outputs[0]
    return slices[value, axis]


def _integers(graph: onnx_ir.Graph, numbers: list[int]) -> Value:
    """An initializer with these numbers; equal ones are shared."""
    name = "first/" + ",".join(map(str, numbers))
    if name not in graph.initializers:
        value = Value(name=name, const_value=tensor(numbers, DataType.INT64, name=name))
        value.dtype, value.shape = DataType.INT64, onnx_ir.Shape([len(numbers)])
        graph.register_initializer(value)
    return graph.initializers[name]
