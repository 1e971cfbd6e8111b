"""Joins the heads of one attention, whose projections stay apart, into ONNX Runtime's MultiHeadAttention."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType, Value
from onnxscript.rewriter import RewriteRule

from export.graph.rewrites.joined_attention import (
    DOMAIN,
    MASK,
    constant_of,
    head_size_of,
    is_padding_mask,
    plain_heads,
    rewritten,
    without_empty_rows,
)


def joined_heads(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with one MultiHeadAttention for every attention in plain form that `joined_attention` left: one whose queries,
    keys or values are more than a product with a weight, such as one with deltas of its own for each row."""

    def is_joinable(_context, query, mask, q_heads, scale, **_: Value) -> bool:
        return (
            query.shape is not None
            and len(query.shape) == 3
            and isinstance(head_size_of(q_heads), int)
            and isinstance(query.shape[-1], int)
            and constant_of(scale) is not None
            and is_padding_mask(mask)
        )

    def joined(op, query, key, value, mask, filled, q_heads, output, scale, scores, **_: Value) -> Value:
        (attention_mask,) = [given for given in mask.graph.inputs if given.name == MASK]
        name = scores.producer().name
        query, key, value, bias = _without_biases(query, key, value)
        if bias is not None:
            bias = op.initializer(onnx_ir.tensor(bias, name=f"{name}.bias"))
        states = op.MultiHeadAttention(
            query,
            key,
            value,
            bias,
            op.Cast(attention_mask, to=DataType.INT32),
            num_heads=query.shape[-1] // head_size_of(q_heads),
            scale=float(constant_of(scale)),
            mask_filter_value=float(np.finfo(np.float32).min / 2),
            _domain=DOMAIN,
        )
        return without_empty_rows(op, states, filled, output, name)

    return rewritten(proto, RewriteRule(plain_heads, joined, is_joinable))


def _without_biases(*projections: Value) -> tuple[Value | np.ndarray | None, ...]:
    """Queries, keys and values before their constant biases, and these joined; unchanged, and None, if none has one."""
    inner, biases = [], []
    for projection in projections:
        adding = projection.producer()
        constant = constant_of(adding.inputs[1]) if adding is not None and adding.op_type == "Add" else None
        has_bias = constant is not None and constant.ndim == 1
        inner.append(adding.inputs[0] if has_bias else projection)
        biases.append(constant if has_bias else np.zeros(projections[0].shape[-1], np.float32))
    if not any(bias.any() for bias in biases):
        return *projections, None
    return *inner, np.concatenate(biases)
