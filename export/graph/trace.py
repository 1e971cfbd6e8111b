"""A transformers model -> one unfused ONNX graph in fp32, which the files of every runtime and precision are made of.

`transformers.exporters` calls itself experimental, so it is used only here, and callers compare its output with PyTorch
(export/parity/compare.py).
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnx import TensorProto
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn
from transformers.exporters import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from compressor import __version__
from compressor.errors import UserError
from compressor.models.build import auto_class_of
from compressor.models.reference import Reference, is_hub_id
from compressor.models.tasks_table import BY_AUTO_CLASS
from export.graph.attention import plain_attention
from export.graph.exportable import require_traceable
from export.graph.rewrites.read_tokens import read_tokens

OPSET = 20
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Order of a graph's inputs, independent of the tokenizer; other inputs follow."""
AXES = ("batch", "sequence")
LOGITS = "logits"
PRODUCTS = ("MatMul", "Gemm", "Gather")
SCOPES = "pkg.torch.onnx.name_scopes"


def trace(model: nn.Module, encoding: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Trace the unfused graph with dynamic axes and the weights inside. Raises UserError E601 for too small a sample."""
    if min(encoding["input_ids"].shape) < 2:
        raise UserError("E601", f"sample of shape {encoding['input_ids'].shape}", "Give at least 2 rows of 2 tokens")
    # a forward with **kwargs would accept the others and leave unused inputs in the graph
    accepted = inspect.signature(model.forward).parameters
    names = sorted(encoding, key=lambda name: INPUTS.index(name) if name in INPUTS else len(INPUTS))
    inputs = {name: torch.from_numpy(encoding[name]) for name in names if name in accepted}
    with plain_attention(model):
        return read_tokens(trace_named(model, inputs, dict.fromkeys(inputs, AXES), outputs=(LOGITS,)))


@contextlib.contextmanager
def tracing(model: str) -> Iterator[None]:
    """Context in which a model is traced; `model` is the name that an error shows. Raises UserError E622 for any fault of the
    exporter."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # it may raise any exception
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError("E622", f"this model cannot be traced ({reason})", "Try another one", model) from error


def trace_named(
    model: nn.Module,
    inputs: Mapping[str, Any],
    axes: Mapping[str, Sequence[str | None]],
    *,
    outputs: Collection[str] | None = None,
) -> onnx.ModelProto:
    """The unfused graph of any module that has a `config`. `inputs` are its keyword arguments: tensors, or dicts of them. Of
    what it returns the graph has `outputs`, None for all: a decoder that classifies returns the keys and values of every block,
    too, which a server would send with each answer.

    `axes` gives each tensor (its names joined by dots, as the graph will call it) a name for each axis, None for a fixed one.
    Axes with the same name must be equal. In the sample no named axis may have size 1, and no two names should have the same
    size.
    """

    def dynamic(name: str, value: Any) -> dict:
        if isinstance(value, Mapping):
            return {key: dynamic(f"{name}.{key}", inner) for key, inner in value.items()}
        return {place: torch.export.Dim.DYNAMIC for place, axis in enumerate(axes[name]) if axis}

    require_traceable(model.config)
    shapes = {name: dynamic(name, value) for name, value in inputs.items()}
    # transformers does not pass `verbose` to torch's exporter, which would print its progress to stdout
    with unchanged(model), torch.no_grad(), contextlib.redirect_stdout(io.StringIO()) as progress:
        program, _ = OnnxExporter().export_program(model, dict(inputs), OnnxConfig(dynamic_shapes=shapes, opset_version=OPSET))
    logging.getLogger(__name__).info("%s", progress.getvalue().strip())
    if outputs is not None:
        _keep_outputs(program, outputs)
    _name_products(program)
    for node in program.graph.all_nodes():
        # stack traces and module paths: they contain local paths
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*program.graph.inputs, *program.graph.outputs):
        value.metadata_props.clear()
    proto = onnx_ir.to_proto(program)
    _name_axes(proto, axes)
    return proto


def _keep_outputs(program: onnx_ir.Model, names: Collection[str]) -> None:
    """Drop the other outputs, and what is computed for them alone."""
    for value in [value for value in program.graph.outputs if value.name not in names]:
        program.graph.outputs.remove(value)
    RemoveUnusedNodesPass()(program)


def _name_products(program: onnx_ir.Model) -> None:
    """Name every product and look-up after its module, so that a quantizer can exclude it by name."""
    taken: Counter[str] = Counter()
    for node in program.graph.all_nodes():
        if node.op_type in PRODUCTS:
            # "['', 'bert', 'bert.encoder', ..., 'bert.encoder.layer.0.attention.self.query', 'linear']"
            path = ast.literal_eval(node.metadata_props.get(SCOPES, "['', '']"))[-2] or "model"
            taken[path] += 1
            node.name = path if taken[path] == 1 else f"{path}#{taken[path]}"


def products_of(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """Those of a graph's `names` that are products of `modules`: a module that is called twice has two (DeBERTa's keys and
    queries, of tokens and of distances)."""
    return [name for name in names if name.partition("#")[0] in modules or name in modules]


def stamp(graph: onnx.ModelProto, model: nn.Module, source: Reference | None = None) -> onnx.ModelProto:
    """Record in a traced graph, in place, the origin of its files: product, task, labels and, if known, the source model.

    Every file made from the graph has it (ONNX's `metadata_props`): `product` with its version, `task`, `labels` (a JSON list
    by output number), `source` and `source_sha256`. Nothing in it depends on the machine: for a local folder only its name is
    stored.
    """
    notes, labels = {"product": f"compress-pipeline {__version__}", "task": "generation"}, model.config.id2label
    if not model.can_generate():
        notes["task"] = BY_AUTO_CLASS[auto_class_of(model)].kind
        notes["labels"] = json.dumps([labels[number] for number in sorted(labels)], ensure_ascii=False)
    if source is not None:
        notes |= {"source": portable(source), "source_sha256": source.sha256}
    del graph.metadata_props[:]
    for key, value in notes.items():
        graph.metadata_props.add(key=key, value=value)
    return graph


def portable(source: Reference) -> str:
    """A reference without machine-specific folders: package:NAME/PATH, a hub id, or the name of a local folder."""
    elsewhere = source.reference.startswith("package:") or is_hub_id(source.reference, source.folder)
    return source.reference if elsewhere else source.folder.name


def matrices(graph: onnx.ModelProto) -> list[str]:
    """The nodes of a graph of `trace` whose weights a quantizer converts to int8, in order: linear matrices and embeddings, by
    the names of their modules. (The products of two activations in attention are not: only OpenVINO's int8 has them.)"""
    weights = {
        tensor.name for tensor in graph.graph.initializer if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    }
    return [node.name for node in graph.graph.node if node.op_type in PRODUCTS and weights & set(node.input)]


def require_matrices(graph: onnx.ModelProto, names: Sequence[str]) -> None:
    """Raises ValueError for a name that is of no product of a graph."""
    nodes = [node.name for node in graph.graph.node]
    for name in names:
        if not products_of([name], nodes):
            raise ValueError(f"excluded has {name!r}, which the graph does not compute: its matrices are those of `matrices`")


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[nn.Module]:
    """Context with the model in eval mode; modes and config are restored afterwards."""
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
    """Replace the exporter's symbols (s18, s41, ...) by the names of `axes` everywhere, also in sums (s1 + s70)."""
    names = {}
    for value in proto.graph.input:
        for axis, dim in zip(axes[value.name], value.type.tensor_type.shape.dim, strict=True):
            names[dim.dim_param] = axis
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\bs\d+\b", lambda match: names.get(match[0]) or match[0], dim.dim_param)
