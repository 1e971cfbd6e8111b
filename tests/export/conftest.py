"""One trace a model for the whole session: tracing is what takes time."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compressor.processor import weight_bits
from compressor.pruning.surgery import Removal, remove
from export.graph.files import save
from export.graph.rewrite import for_cpu, quantized_dynamic
from export.graph.trace import matrices, trace
from tests.compressor.conftest import tiny
from tests.made_once import made_once

INT8_APART = 0.1 if weight_bits() == 8 else 0.15
"""How far int8 of this machine may move the outputs of a tiny random model, as a share of the largest."""
UNEQUAL = {0: Removal([1, 3], [0, 5, 7]), 2: Removal([0], list(range(19)))}
PLANS = {
    "dense": {},
    "unequal": UNEQUAL,
    "emptied": {0: Removal(list(range(4)), [1]), 1: Removal([0, 2, 3], [])},
    "without a last head": {2: Removal(list(range(4)), [])},
}
MODELS = {
    f"{name}-{kind}": (name, removals) for name in ("bert", "mpnet") for kind, removals in (("dense", {}), ("unequal", UNEQUAL))
}


def encoding(rows: int, length: int, pad_id: int = 1) -> dict[str, np.ndarray]:
    """Right-padded rows of unequal length."""
    ids = np.random.default_rng(rows * 100 + length).integers(3, 99, size=(rows, length), dtype=np.int64)
    mask = np.ones_like(ids)
    for row in range(1, rows):
        mask[row, max(1, length - row) :] = 0
    ids[mask == 0] = pad_id
    return {"input_ids": ids, "attention_mask": mask}


def model_of(name: str) -> torch.nn.Module:
    """A tiny random model, dense or unequally pruned."""
    architecture, removals = MODELS[name]
    model = tiny(architecture, torch.float32, max_position_embeddings=520)
    if removals:
        remove(model, removals)
    return model


def check_wholly(path: Path) -> None:
    """onnx's own full check, with shape inference.

    SimplifiedLayerNormalization (RMSNorm) is ONNX Runtime's, but in ONNX's own domain, where onnx does not know it: for the
    check it is put into ONNX Runtime's.
    """
    graph = onnx.load(path)
    for node in graph.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            node.domain = "com.microsoft"
    onnx.checker.check_model(graph, full_check=True)


def notes(path: Path) -> dict[str, str]:
    """What a file says of itself."""
    return {note.key: note.value for note in onnx.load(path, load_external_data=False).metadata_props}


KINDS = ("fp32", "fused", "int8")


@dataclass(frozen=True)
class Exported:
    """A model, its traced graph, and its files: as traced, fused for the CPU, and int8."""

    model: torch.nn.Module
    graph: object
    fp32: Path
    fused: Path
    int8: Path


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """name -> Exported, made on first use."""

    @functools.cache
    def make(name: str) -> Exported:
        model = model_of(name)

        def write(folder: Path) -> None:
            sample = encoding(2, 9)
            if name.startswith("mpnet"):
                sample["token_type_ids"] = np.zeros_like(sample["input_ids"])
            graph = trace(model, sample)
            rewritten = for_cpu(graph)
            for kind, proto in zip(
                KINDS, (graph, rewritten, quantized_dynamic(rewritten, weight_bits=weight_bits())), strict=True
            ):
                save(proto, folder / f"{kind}.onnx")

        folder = made_once(tmp_path_factory.getbasetemp(), name, write)
        paths = [folder / f"{kind}.onnx" for kind in KINDS]
        return Exported(model, onnx.load(paths[0]), *paths)

    return make


@pytest.fixture(scope="session")
def traced(exported):
    """(architecture, plan) -> (model, graph), made on first use; neither is to be changed."""

    @functools.cache
    def make(architecture: str, plan: str = "dense") -> tuple[torch.nn.Module, onnx.ModelProto]:
        if (name := f"{architecture}-{plan}") in MODELS:
            return exported(name).model, exported(name).graph
        model = tiny(architecture, torch.float32, max_position_embeddings=520)
        if PLANS[plan]:
            remove(model, PLANS[plan])
        return model, trace(model, encoding(2, 9))

    return make


def with_weights_of(model: torch.nn.Module, graph: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a graph whose products have the matrices of another model of the same shape."""
    made = onnx.ModelProto()
    made.CopyFrom(graph)
    stored, names = {tensor.name: tensor for tensor in made.graph.initializer}, matrices(made)
    for node in made.graph.node:
        if node.op_type == "MatMul" and node.name in names:
            weight = model.get_submodule(node.name).weight.detach().numpy().T
            stored[node.input[1]].CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(weight), node.input[1]))
    return made
