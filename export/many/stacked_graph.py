"""A model of many tasks -> one graph with the input `task` (batch,), and the file of it for a runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass

from compressor.deltas.stacked import StackedModel
from compressor.models.reference import Reference
from export.graph.attention import plain_attention
from export.graph.rewrite import for_cpu
from export.graph.rewrites.joined_gathers import joined_gathers
from export.graph.rewrites.joined_heads import joined_heads
from export.graph.rewrites.late_gathers import late_gathers
from export.graph.rewrites.read_tokens import read_tokens
from export.graph.trace import AXES, LOGITS, stamp, trace_named
from export.runtimes.onnxruntime import RUNTIME as ONNX_RUNTIME
from export.runtimes.runtime import Runtime

TASK = "task"
"""Name of the input with the task of each row."""


def trace_stacked(
    model: StackedModel, encoding: Mapping[str, np.ndarray], tasks: Sequence[Mapping[str, Any]], source: Reference | None
) -> onnx.ModelProto:
    """The traced graph of many tasks, which it names in its metadata as `tasks` (JSON). `encoding` is a sample as for `trace`.

    Its inputs are those of the base and `task`, int64 (batch,): the number of each row's task.
    """
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoding]
    inputs = {name: torch.from_numpy(encoding[name]) for name in names}
    rows = len(inputs["input_ids"])
    inputs[TASK] = torch.arange(rows) % len(tasks)
    axes = {**dict.fromkeys(names, AXES), TASK: AXES[:1]}
    with torch.no_grad():
        model(**inputs)  # faults of a layer appear here, in words
    with plain_attention(model.model):
        graph = read_tokens(trace_named(model, inputs, axes, outputs=(LOGITS,)))
    stamp(graph, model.model, source)
    notes = [note for note in graph.metadata_props if note.key != "labels"]
    del graph.metadata_props[:]
    graph.metadata_props.extend(notes)
    graph.metadata_props.add(key="tasks", value=json.dumps(list(tasks), ensure_ascii=False))
    return graph


def write_stacked(graph: onnx.ModelProto, folder: Path, runtime: Runtime, *, fuse: bool) -> Path:
    """Write the traced graph of many tasks for a runtime, in fp32; returns the file. `fuse` as in `Runtime.write`."""
    graph = _once(graph)
    if runtime is ONNX_RUNTIME and fuse:
        graph = late_gathers(joined_gathers(joined_heads(for_cpu(graph))))
    return runtime.write(graph, folder, precisions=["fp32"], fuse=fuse)["fp32"]


def _once(graph: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with equal weights stored once: VeRA's random matrices are those of every layer."""
    program = onnx_ir.from_proto(graph)
    DeduplicateInitializersPass(size_limit=2**40)(program)
    return onnx_ir.to_proto(program)
