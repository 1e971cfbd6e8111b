"""A traced graph as ONNX Runtime computes it fastest: rewritten for the CPU, fused for CUDA, or with dynamic int8."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir
from torch import nn
from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer
from transformers.exporters.configs import ExportFormat
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

from compressor.deltas.factored import factored
from compressor.models.architectures import COMPRESSED
from export.graph.rewrites.joined_attention import joined_attention
from export.graph.rewrites.separate_residuals import separate_residuals
from export.graph.trace import products_of
from export.runtimes.runtime import Device

WRONG_WHEN_FUSED = ("t5",)
"""Model types whose logits ONNX Runtime's fusions change: transformers 5.23 makes every attention of T5's decoder, also that
to its encoder, a GroupQueryAttention, which is wrong from the second block on. The traced, unfused graph is correct."""


def can_fuse(model: nn.Module) -> bool:
    """Whether the fusions leave what this model computes, and the names of the matrices that int8 may leave alone."""
    # fusions would join the deltas of several matrices and lose their names
    return model.config.model_type.removeprefix(COMPRESSED) not in WRONG_WHEN_FUSED and not any(factored(model))


def fused(proto: onnx.ModelProto, device: Device = "cpu") -> onnx.ModelProto:
    """The same graph with transformers' fusions for a device: MultiHeadAttention on CUDA, GroupQueryAttention over a cache.

    For a graph without a cache on the CPU, `for_cpu` is faster.
    """
    # a copy: the fusions rename initializers, which the program has in common with the graph that it is read from
    copied = onnx.ModelProto()
    copied.CopyFrom(proto)
    program = onnx_ir.from_proto(copied)
    fuse_for_onnxruntime(program, device)
    for value in program.graph.initializers.values():
        value.shape = value.const_value.shape  # transformers declares attention's scale with shape (), and stores (1,)
    return onnx_ir.to_proto(program)


def for_cpu(proto: onnx.ModelProto, excluded: Collection[str] = (), *, join: bool = True) -> onnx.ModelProto:
    """The same graph as ONNX Runtime's CPU computes it fastest, in fp32 and as what int8 is quantized from.

    Attention is joined where `join` allows it, but for attentions with a matrix in `excluded`.
    """
    graph = separate_residuals(proto)
    return joined_attention(graph, excluded) if join else graph


def quantized_dynamic(proto: onnx.ModelProto, excluded: Sequence[str] = (), weight_bits: int = 8) -> onnx.ModelProto:
    """The graph with int8 weights (one scale per channel) and activations quantized at run time; embeddings are int8 too.

    The products of the modules `excluded` are not quantized. `weight_bits` of 7 is for processors on which products of 8 bits
    overflow.
    """
    # a Gemm is first split into NAME_MatMul and an addition
    products = products_of(excluded, (node.name for node in proto.graph.node))
    both = [name for node in products for name in (node, f"{node}_MatMul")]
    config = OnnxRuntimeDynamicConfig(per_channel=True, nodes_to_exclude=both, reduce_range=weight_bits == 7)
    quantizer = OnnxRuntimeQuantizer(config)
    return onnx_ir.to_proto(quantizer.quantize(onnx_ir.from_proto(proto), {}, ExportFormat.ONNX))
