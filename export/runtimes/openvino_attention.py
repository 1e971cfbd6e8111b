"""Attention in an OpenVINO graph: of known heads, one operator a block, and the guard against empty rows where it is cheap."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import openvino

JOINED = "/attention"
"""End of the name of a joined attention, behind that of the product that gave its states."""

STATES_ONLY = ("Transpose", "Reshape", "Multiply", "FakeQuantize")
"""Operators between an attention and the projection of its states that give 0 for 0."""


def keep_axes(model: openvino.Model) -> int:
    """Let every reshape to (batch, length, sizes) copy the first two axes of its input, in place; returns how many do.

    The traced graph computes both from the shape of a graph input, so that the number of heads is unknown, and OpenVINO then
    takes 2 to 7 % longer wherever the shape is not that of the call before.
    """
    from openvino import opset13 as ops

    number = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Reshape" or (sizes := _sizes_behind_rows(node)) is None:
            continue
        reshape = ops.reshape(node.input_value(0), ops.constant([0, 0, *sizes]), special_zero=True)
        reshape.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(reshape.output(0))
        number += 1
    model.validate_nodes_and_infer_types()
    return number


def _sizes_behind_rows(reshape: openvino.Node) -> list[int] | None:
    """What a reshape makes of the axes behind batch and length; None where those two are not kept."""
    target, shape = reshape.input_value(1).get_node(), reshape.get_input_partial_shape(0)
    if (
        target.get_type_name() != "Concat"
        or shape.rank.is_dynamic
        or len(shape) < 3
        or shape[0].is_static
        or shape[1].is_static
    ):
        return None
    first, second, *rest = (port.get_node() for port in target.input_values())
    if not (_is_axis_of_input(first, 0) and _is_axis_of_input(second, 1)):
        return None
    if not all(node.get_type_name() == "Constant" for node in rest):
        return None
    return [int(size) for node in rest for size in node.get_data().reshape(-1)]


def _is_axis_of_input(node: openvino.Node, axis: int) -> bool:
    """Whether a value is the size of an axis of a graph input (batch, length)."""
    if node.get_type_name() != "Slice":
        return False
    shape, start, stop, *_ = (port.get_node() for port in node.input_values())
    if shape.get_type_name() != "ShapeOf" or start.get_type_name() != "Constant" or stop.get_type_name() != "Constant":
        return False
    source = shape.input_value(0)
    is_input = source.get_node().get_type_name() == "Parameter" and len(source.get_partial_shape()) == 2
    return is_input and start.get_data().item() == axis and stop.get_data().item() == axis + 1


def join_attention(model: openvino.Model) -> int:
    """Replace softmax(Q K^T * scale + mask) V by one ScaledDotProductAttention wherever it stands in a graph, in place;
    returns how often. NNCF then quantizes queries and keys alone, and OpenVINO computes the rest by its kernel for attention.

    Queries, keys and values are (batch, heads, length, size). An attention whose scores are changed in another way than by a
    scale and sums (DeBERTa replaces the masked ones) stays as it is.
    """
    joined: dict[tuple, openvino.Node] = {}
    sites = [site for node in model.get_ordered_ops() if (site := _attention_at(node)) is not None]
    for site in sites:
        site.states.output(0).replace(site.join(joined).output(0))
    model.validate_nodes_and_infer_types()
    return len(sites)


def attentions_apart(model: openvino.Model) -> int:
    """How many attentions of a graph are not one operator: its softmaxes over keys, (batch, heads, queries, keys)."""
    softmaxes = (node for node in model.get_ops() if node.get_type_name() == "Softmax")
    return sum(len(node.get_output_partial_shape(0)) == 4 for node in softmaxes)


def attention_left(graph: onnx.ModelProto, excluded: Collection[str]) -> list[str]:
    """Names of what must not be quantized for the outputs of the modules `excluded` to stay fp32: the products of two
    activations that read them, and the joined attentions whose queries or keys they are. Both forms of an attention are named;
    a model has one of them."""
    from export.graph.attention_products import attention_products
    from export.graph.trace import products_of

    found = attention_products(graph)
    left = [name for name, sources in found.items() if products_of(excluded, sources)]
    return left + [f"{name}{JOINED}" for name, sources in found.items() if not sources.isdisjoint(left)]


@dataclass(frozen=True)
class AttentionSite:
    """The parts of one attention in a graph: the output ports of its inputs, and the product that gives its states."""

    query: openvino.Output
    key: openvino.Output
    """Keys, transposed: (batch, heads, size, length), unless `key_as_rows`."""
    key_as_rows: bool
    value: openvino.Output
    scale: openvino.Output | None
    divided: bool
    addends: tuple[openvino.Output, ...]
    states: openvino.Node

    def join(self, sums: dict[tuple, openvino.Node]) -> openvino.Node:
        """The operator. Blocks that add the same masks and biases share their sum through `sums`."""
        from openvino import opset13 as ops

        key = self.key if self.key_as_rows else ops.transpose(self.key, ops.constant([0, 1, 3, 2]))
        scale = _scalar(self.scale) if self.scale is not None else 1.0
        names = tuple((port.get_node().get_friendly_name(), port.get_index()) for port in self.addends)
        if names not in sums:
            sums[names] = functools.reduce(ops.add, self.addends)
        scale = ops.constant(1.0 / scale if self.divided else scale, dtype="float32")
        node = ops.scaled_dot_product_attention(self.query, key, self.value, sums[names], scale)
        node.set_friendly_name(f"{self.states.get_friendly_name()}{JOINED}")
        return node


def _scalar(port: openvino.Output) -> float:
    return float(port.get_node().get_data().reshape(()))


def _is_scalar(port: openvino.Output) -> bool:
    node = port.get_node()
    return node.get_type_name() == "Constant" and node.get_data().size == 1


def _attention_at(softmax: openvino.Node) -> AttentionSite | None:
    """The attention that a softmax belongs to; None for any other node."""
    users = [target.get_node() for output in softmax.outputs() for target in output.get_target_inputs()]
    if softmax.get_type_name() != "Softmax" or len(users) != 1 or not _is_product(users[0]):
        return None
    value = users[0].input_value(1)
    port, addends = softmax.input_value(0), []
    while port.get_node().get_type_name() == "Add":
        left, right = port.get_node().input_values()
        port, addend = (left, right) if _scores(left) else (right, left)
        addends.append(addend)
    scores = _scores(port)
    if scores is None or not addends or value.get_partial_shape().rank.get_length() != 4:
        return None
    product, scale, divided = scores
    as_rows = product.get_attributes()["transpose_b"]
    query, key = product.input_values()
    return AttentionSite(query, key, as_rows, value, scale, divided, tuple(addends), users[0])


def _scores(port: openvino.Output) -> tuple[openvino.Node, openvino.Output | None, bool] | None:
    """(product, scale, whether it divides) of attention scores, looking through sums; None for anything else."""
    node = port.get_node()
    while node.get_type_name() == "Add":
        inner = [part.get_node() for part in node.input_values()]
        node = next((part for part in inner if _scores(part.output(0))), None)
        if node is None:
            return None
    if node.get_type_name() == "MatMul" and not node.get_attributes()["transpose_a"]:
        return node, None, False
    if node.get_type_name() in ("Multiply", "Divide") and _is_scalar(node.input_value(1)):
        inner = node.input_value(0).get_node()
        if inner.get_type_name() == "MatMul" and not inner.get_attributes()["transpose_a"]:
            return inner, node.input_value(1), node.get_type_name() == "Divide"
    return None


def _is_product(node: openvino.Node) -> bool:
    return node.get_type_name() == "MatMul" and not any(node.get_attributes()[name] for name in ("transpose_a", "transpose_b"))


def postpone_guards(model: openvino.Model) -> int:
    """Multiply by an attention's guard, 0 for rows without any token, after the projection of the states; returns how often.

    In place, with the same outputs: (states * guard) W = (states W) * guard. There OpenVINO computes the guard in one operator
    with the bias and the residual sum; inside attention it costs 2 to 4 % of a pass. A guard that is followed by anything but
    a projection stays where it is.
    """
    from openvino import opset13 as ops

    guards: dict[str, openvino.Node] = {}
    sites = [(node, found) for node in model.get_ordered_ops() if (found := _projection_of(node)) is not None]
    for node, product in sites:
        guard = node.input_value(1)
        name = guard.get_node().get_friendly_name()
        if name not in guards:
            guards[name] = ops.squeeze(guard, ops.constant([3]))
        users = product.output(0).get_target_inputs()
        guarded = ops.multiply(product, guards[name])
        for user in users:
            user.replace_source_output(guarded.output(0))
        node.output(0).replace(node.input_value(0))
    model.validate_nodes_and_infer_types()
    return len(sites)


def _projection_of(guard: openvino.Node) -> openvino.Node | None:
    """The product (batch, length, features) with a matrix that follows a guard of an attention; None for any other node."""
    if guard.get_type_name() != "Multiply" or guard.input_value(0).get_node().get_type_name() != "ScaledDotProductAttention":
        return None
    shape = guard.input_value(1).get_partial_shape()
    if len(shape) != 4 or any(axis.is_dynamic or axis.get_length() != 1 for axis in list(shape)[1:]):
        return None
    node = guard
    while (node := _only_user(node)) is not None and node.get_type_name() in STATES_ONLY:
        pass
    if node is None or node.get_type_name() != "MatMul" or len(node.get_output_partial_shape(0)) != 3:
        return None
    return node if len(node.input_value(1).get_partial_shape()) == 2 else None


def _only_user(node: openvino.Node) -> openvino.Node | None:
    """What reads the states in a node's output, if nothing else does."""
    users = node.output(0).get_target_inputs()
    return next((user.get_node() for user in users if user.get_index() == 0), None) if len(users) == 1 else None
