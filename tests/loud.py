"""A tiny BERT of which int8 breaks one matrix, and its graph, which tests of several folders share."""

from pathlib import Path

import onnx
import torch

from export.graph.files import save
from export.graph.trace import trace
from tests.compressor.conftest import tiny
from tests.export.conftest import encoding
from tests.made_once import made_once

LOUD = "bert.encoder.layer.1.output.dense"
"""The matrix that int8 breaks."""


def loud_model() -> torch.nn.Module:
    """One input of LOUD is a thousand times the others, and is multiplied by 0."""
    model = tiny("bert", torch.float32)
    with torch.no_grad():
        model.bert.encoder.layer[1].intermediate.dense.bias[0] = 3000.0
        model.bert.encoder.layer[1].output.dense.weight.mul_(4)[:, 0] = 0.0
    return model


def loud_graph(own: Path) -> onnx.ModelProto:
    """Its graph, traced once a session; `own` is the worker's folder."""
    folder = made_once(own, "loud", lambda folder: save(trace(loud_model(), encoding(2, 9)), folder / "model.onnx"))
    return onnx.load(folder / "model.onnx")
