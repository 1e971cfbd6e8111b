"""Joins the operators of one block's attention, with its three projections, into ONNX Runtime's Attention."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType, Value
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript.rewriter import RewriteRule

DOMAIN = "com.microsoft"
MASK = "attention_mask"


def joined_attention(proto: onnx.ModelProto, excluded: Collection[str] = ()) -> onnx.ModelProto:
    """The graph with one Attention for every attention over all tokens of a row, in the plain form that `trace` writes.

    Attentions with a matrix in `excluded` (by the names of `export.graph.trace.matrices`) stay as they are, as do those with
    position terms, rotary positions, grouped keys or a causal mask. The quantizer turns Attention into QAttention.
    """
    # the fp32 file may be opened on CUDA, too, where ONNX Runtime has a kernel for Attention

    def is_joinable(_context, x, mask, query, key, value, q_heads, **parts: Value) -> bool:
        products = [linear.producer().inputs[0].producer() for linear in (query, key, value)]
        weights = [constant_of(parts[f"{name}_weight"]) for name in "qkv"]
        biases = [constant_of(parts[f"{name}_bias"]) for name in "qkv"]
        return (
            not {product.name for product in products} & set(excluded)
            and all(array is not None for array in (*weights, *biases, constant_of(parts["scale"])))
            and all(weight.shape == weights[0].shape and weight.ndim == 2 for weight in weights)
            and x.shape is not None
            and len(x.shape) == 3
            and isinstance(head_size_of(q_heads), int)
            and is_padding_mask(mask)
        )

    def joined(op, x, mask, filled, q_heads, output, scores, **parts: Value) -> Value:
        weights, biases = ([constant_of(parts[f"{name}_{kind}"]) for name in "qkv"] for kind in ("weight", "bias"))
        name = scores.producer().name
        weight = op.initializer(onnx_ir.tensor(np.concatenate(weights, axis=1), name=f"{name}.weight"))
        bias = op.initializer(onnx_ir.tensor(np.concatenate(biases), name=f"{name}.bias"))
        (attention_mask,) = [given for given in mask.graph.inputs if given.name == MASK]
        tokens = op.Cast(attention_mask, to=DataType.INT32)
        # without qkv_hidden_sizes, with which the quantizer leaves it in fp32: all three are as wide as the weight says
        states = op.Attention(
            x,
            weight,
            bias,
            tokens,
            num_heads=weights[0].shape[1] // head_size_of(q_heads),
            scale=float(constant_of(parts["scale"])),
            mask_filter_value=float(np.finfo(np.float32).min / 2),
            _domain=DOMAIN,
        )
        return without_empty_rows(op, states, filled, output, name)

    return rewritten(proto, RewriteRule(_plain, joined, is_joinable))


def without_empty_rows(op, states: Value, filled: Value, output: Value, name: str) -> Value:
    """The states of a joined attention, which is named as the operator it replaces: 0 in rows without any token, which attend
    to nothing, as in PyTorch."""
    states.producer().name = name
    states.dtype, states.shape = output.dtype, output.shape
    return op.Mul(states, op.Squeeze(filled, op.Constant(value_ints=[3])))


def rewritten(proto: onnx.ModelProto, rule: RewriteRule) -> onnx.ModelProto:
    """The graph after a rule that joins attentions; `proto` itself where it fits nowhere."""
    program = onnx_ir.from_proto(proto)
    if not rule.apply_to_model(program):
        return proto
    for node in program.graph:
        node.metadata_props.clear()
    # every attention brought its own mask
    CommonSubexpressionEliminationPass()(program)
    RemoveUnusedNodesPass()(program)
    return onnx_ir.to_proto(program)


def _plain(op, x, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, heads_shape, shape, scale, mask, filled):
    """`plain_heads` of three products with a weight and a bias."""
    query = op.Add(op.MatMul(x, q_weight), q_bias, _outputs=["query"])
    key = op.Add(op.MatMul(x, k_weight), k_bias, _outputs=["key"])
    value = op.Add(op.MatMul(x, v_weight), v_bias, _outputs=["value"])
    return plain_heads(op, query, key, value, heads_shape, shape, scale, mask, filled)


def plain_heads(op, query, key, value, heads_shape, shape, scale, mask, filled):
    """softmax(Q K^T * scale + mask) V * filled, as `PlainAttention` is traced."""
    q_heads = op.Transpose(op.Reshape(query, heads_shape), perm=[0, 2, 1, 3], _outputs=["q_heads"])
    k_heads = op.Transpose(op.Reshape(key, heads_shape), perm=[0, 2, 3, 1])
    v_heads = op.Transpose(op.Reshape(value, heads_shape), perm=[0, 2, 1, 3])
    scores = op.MatMul(q_heads, k_heads, _outputs=["scores"])
    states = op.Mul(op.MatMul(op.Softmax(op.Add(op.Mul(scores, scale), mask), axis=-1), v_heads), filled)
    return op.Reshape(op.Transpose(states, perm=[0, 2, 1, 3]), shape, _outputs=["output"])


def is_padding_mask(mask: Value) -> bool:
    """Whether a mask is that of `PlainAttention.mask` for all tokens of a row: 0 or half the least number by `MASK` alone."""
    for operator in ("Expand", "Where", "Unsqueeze", "Cast"):
        maker = mask.producer()
        if maker is None or maker.op_type != operator:
            return False
        if operator == "Where" and not (constant_of(maker.inputs[1]) == 0 and constant_of(maker.inputs[2]) < -1e38):
            return False
        mask = maker.inputs[0]
    return mask.is_graph_input() and mask.name == MASK


def head_size_of(heads: Value) -> object:
    return heads.shape[-1] if heads.shape is not None else None


def constant_of(value: Value) -> np.ndarray | None:
    """What a constant holds."""
    return None if value.const_value is None else value.const_value.numpy()
