"""A transformers model -> ONNX: fp32 with ONNX Runtime's fusions, and dynamic int8, from one trace.

`transformers.exporters` calls itself experimental, so it is used here only, and what it writes is compared with PyTorch
by whoever calls this (export/parity/compare.py).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnx_ir
    from torch import nn

    from compressor.models.hub import Reference
    from export.runtimes.sessions import Device

OPSET = 20
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""The order of a graph's inputs, whatever the tokenizer's; what has another name comes behind them."""
AXES = ("batch", "sequence")
WRONG_WHEN_FUSED = ("t5",)
"""Model types whose logits ONNX Runtime's fusions change: transformers 5.23 makes every attention of T5's decoder, also that to
its encoder, a GroupQueryAttention, which is wrong from the second block on. The graph as it was traced is right."""
PRODUCTS = ("MatMul", "Gemm", "Gather")
SCOPES = "pkg.torch.onnx.name_scopes"
SINGLE_FILE_LIMIT = 2_000_000_000
"""Bytes; protobuf cannot hold more, so larger models get a MODEL.data file beside them."""


def file_name(precision: str) -> str:
    """The file of a precision inside an exported folder."""
    return "model.onnx" if precision == "fp32" else f"model_{precision}.onnx"


def export_onnx(
    model: nn.Module,
    encoding: dict[str, np.ndarray],
    folder: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
) -> dict[str, Path]:
    """Write FOLDER/model.onnx and FOLDER/model_int8.onnx as asked; returns precision -> path.

    `model` is a classifier without chains, pruned or dense; it comes out as it went in. `encoding` is a sample, int64
    (batch, length), of at least 2 rows and 2 tokens: a size of 1 would be burnt into the graph. The axes of the inputs
    are named batch and sequence; two exports of one model are equal byte for byte. int8 is quantized from the unfused
    graph (the fused one has lost the types it needs) with one scale a channel. Types that fusions would harm are not fused.
    """
    return write_onnx(trace(model, encoding), folder, precisions=precisions, fuse=fuse and can_fuse(model))


def can_fuse(model: nn.Module) -> bool:
    """Whether the fusions leave what a model of this type computes."""
    from compressor.models.architectures import COMPRESSED

    return model.config.model_type.removeprefix(COMPRESSED) not in WRONG_WHEN_FUSED


def write_onnx(
    graph: onnx.ModelProto,
    folder: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
    limit: int = SINGLE_FILE_LIMIT,
    excluded: Sequence[str] = (),
    weight_bits: int = 8,
) -> dict[str, Path]:
    """The files of `export_onnx` from its graph, as `trace` gave it; the nodes `excluded` (of `matrices`) stay fp32 in int8,
    `limit` is as in `save`, `weight_bits` (7 or 8) as in `compressor.processor`."""
    from export.graph.half import brain, half

    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        "fp32": lambda: fused(graph) if fuse else graph,
        "int8": lambda: quantized_dynamic(graph, excluded, weight_bits),
        # CUDA's joined operators sum in fp32 inside; TensorRT knows none of them: it has its own (standalone/folder.py)
        "fp16": lambda: half(fused(graph, "cuda") if fuse else graph),
        "bf16": lambda: brain(graph),
    }
    paths = {}
    for precision in precisions:
        paths[precision] = folder / file_name(precision)
        made = writers[precision]()
        carry_over(graph, made)
        save(made, paths[precision], limit)
    return paths


def trace(model: nn.Module, encoding: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The unfused graph with dynamic axes and the weights inside. Raises UserError E601 for a sample that is too small."""
    import torch

    if min(encoding["input_ids"].shape) < 2:
        raise UserError("E601", f"sample of shape {encoding['input_ids'].shape}", "Give at least 2 rows of 2 tokens")
    # a forward with **kwargs would swallow the others and leave dead inputs in the graph
    accepted = inspect.signature(model.forward).parameters
    names = sorted(encoding, key=lambda name: INPUTS.index(name) if name in INPUTS else len(INPUTS))
    inputs = {name: torch.from_numpy(encoding[name]) for name in names if name in accepted}
    return trace_named(model, inputs, dict.fromkeys(inputs, AXES))


def trace_named(model: nn.Module, inputs: Mapping[str, Any], axes: Mapping[str, Sequence[str | None]]) -> onnx.ModelProto:
    """The unfused graph of any module that has a `config`. `inputs` are its keyword arguments: tensors, or dicts of them.

    `axes` gives each tensor (its names joined by dots, as the graph will call it) a name an axis, None where that is fixed.
    Axes of one name must be equal. No size of a named axis may be 1, here, and no two should be equal.
    """
    import onnx_ir
    import torch
    from transformers.exporters import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    def dynamic(name: str, value: Any) -> dict:
        if isinstance(value, Mapping):
            return {key: dynamic(f"{name}.{key}", inner) for key, inner in value.items()}
        return {place: torch.export.Dim.DYNAMIC for place, axis in enumerate(axes[name]) if axis}

    shapes = {name: dynamic(name, value) for name, value in inputs.items()}
    # transformers hands no `verbose` down to torch's exporter, which would print its progress to stdout
    with unchanged(model), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()) as progress:
        program, _ = OnnxExporter().export_program(model, dict(inputs), OnnxConfig(dynamic_shapes=shapes, opset_version=OPSET))
    logging.getLogger(__name__).info("%s", progress.getvalue().strip())
    _name_products(program)
    for node in program.graph.all_nodes():
        # stack traces and module paths: they hold folders of this machine
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*program.graph.inputs, *program.graph.outputs):
        value.metadata_props.clear()
    proto = onnx_ir.to_proto(program)
    _name_axes(proto, axes)
    return proto


def _name_products(program: onnx_ir.Model) -> None:
    """Call every product and look-up after the module that it is in, which is how a quantizer is told what to leave alone."""
    taken: Counter[str] = Counter()
    for node in program.graph.all_nodes():
        if node.op_type in PRODUCTS:
            # "['', 'bert', 'bert.encoder', ..., 'bert.encoder.layer.0.attention.self.query', 'linear']"
            path = ast.literal_eval(node.metadata_props.get(SCOPES, "['', '']"))[-2] or "model"
            taken[path] += 1
            node.name = path if taken[path] == 1 else f"{path}#{taken[path]}"


def stamp(graph: onnx.ModelProto, model: nn.Module, source: Reference | None = None) -> onnx.ModelProto:
    """Note in a traced graph, in place, what its files are: product, task, labels and, where known, the model it comes from.

    Every file that is made of the graph carries it (ONNX's `metadata_props`): `product` with its version, `task`, `labels` (a
    JSON list by output number), `source` and `source_sha256`. Nothing in it depends on the machine: of a local folder its name.
    """
    from compressor import __version__
    from compressor.models.hub import TOKENS, auto_class_of

    notes, labels = {"product": f"compress-pipeline {__version__}", "task": "generation"}, model.config.id2label
    if not model.can_generate():
        notes["task"] = f"{'token' if auto_class_of(model) == TOKENS else 'sequence'} classification"
        notes["labels"] = json.dumps([labels[number] for number in sorted(labels)], ensure_ascii=False)
    if source is not None:
        notes |= {"source": portable(source), "source_sha256": source.sha256}
    del graph.metadata_props[:]
    for key, value in notes.items():
        graph.metadata_props.add(key=key, value=value)
    return graph


def portable(source: Reference) -> str:
    """A reference without the folders of one machine: package:NAME/PATH, a hub id, or the name of a local folder."""
    from compressor.models.hub import is_hub_id

    elsewhere = source.reference.startswith("package:") or is_hub_id(source.reference, source.folder)
    return source.reference if elsewhere else source.folder.name


def carry_over(graph: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """Give a graph that was made of another one its notes, which not every converter keeps."""
    present = {note.key for note in made.metadata_props}
    made.metadata_props.extend(note for note in graph.metadata_props if note.key not in present)


def matrices(graph: onnx.ModelProto) -> list[str]:
    """The nodes of a graph of `trace` whose weights a quantizer turns to int8, in order: linear matrices and embeddings, by the
    names of their modules. (The products of two activations in attention are none: only OpenVINO's int8 has them.)"""
    from onnx import TensorProto

    weights = {one.name for one in graph.graph.initializer if one.data_type == TensorProto.FLOAT and len(one.dims) == 2}
    return [node.name for node in graph.graph.node if node.op_type in PRODUCTS and weights & set(node.input)]


@contextlib.contextmanager
def unchanged(model: nn.Module):
    """Put the model in eval mode for a while; modes and the config come back as they were."""
    modes = {module: module.training for module in model.modules()}
    config = dict(model.config.__dict__)
    try:
        yield model.eval()
    finally:
        for module, mode in modes.items():
            module.training = mode
        model.config.__dict__.clear()
        model.config.__dict__.update(config)


def _name_axes(proto: onnx.ModelProto, axes: Mapping[str, Sequence[str | None]]) -> None:
    """Give the exporter's symbols (s18, s41, ...) the names of `axes`, wherever they stand, also in sums (s1 + s70)."""
    names = {}
    for value in proto.graph.input:
        for axis, dim in zip(axes[value.name], value.type.tensor_type.shape.dim, strict=True):
            names[dim.dim_param] = axis
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\bs\d+\b", lambda found: names.get(found[0]) or found[0], dim.dim_param)


def fused(proto: onnx.ModelProto, device: Device = "cpu") -> onnx.ModelProto:
    """The same graph with ONNX Runtime's operators for a device: SkipLayerNormalization, on CUDA MultiHeadAttention, too."""
    import onnx_ir
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

    program = onnx_ir.from_proto(proto)
    fuse_for_onnxruntime(program, device)
    for value in program.graph.initializers.values():
        value.shape = value.const_value.shape  # transformers notes the scale of attention as (), and stores it as (1,)
    return onnx_ir.to_proto(program)


def quantized_dynamic(proto: onnx.ModelProto, excluded: Sequence[str] = (), weight_bits: int = 8) -> onnx.ModelProto:
    """The graph with int8 weights (one scale a channel) and activations quantized at run time; embeddings are int8 too.

    The nodes `excluded`, by name, stay as they are. `weight_bits` of 7 is for processors on which products of 8 bits overflow.
    """
    import onnx_ir
    from transformers.exporters import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer
    from transformers.exporters.configs import ExportFormat

    # a Gemm is made NAME_MatMul and an addition first
    both = [name for one in excluded for name in (one, f"{one}_MatMul")]
    config = OnnxRuntimeDynamicConfig(per_channel=True, nodes_to_exclude=both, reduce_range=weight_bits == 7)
    quantizer = OnnxRuntimeQuantizer(config)
    return onnx_ir.to_proto(quantizer.quantize(onnx_ir.from_proto(proto), {}, ExportFormat.ONNX))


def save(proto: onnx.ModelProto, path: Path, limit: int = SINGLE_FILE_LIMIT) -> None:
    """One file of less than `limit` bytes, or one with PATH.data beside it; `proto` stays as it is."""
    import onnx_ir

    program = onnx_ir.from_proto(proto)
    # proto.ByteSize() would write the whole message into memory, three times
    if sum(one.const_value.nbytes for one in program.graph.initializers.values()) < limit:
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return
    # onnx.save would empty `proto`, which int8 is still to be made from, and append to an old data file
    onnx_ir.save(program, path, external_data=f"{path.name}.data")
