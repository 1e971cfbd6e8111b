"""Bytes of the files of a measurement, and of the processes that hold them: every model has its own, all live at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from compressor.cost import ModelShape
from compressor.models.modules import STRUCTURES
from compressor.pruning.surgery import Removal
from export.latency.machine_limits import TYPE_BYTES
from export.latency.table import probes

PROCESS = 100_000_000
"""Bytes of a process beside the weights of its file. Seen after a pass of 8 x 128 of DistilBERT: 101 MB with ONNX Runtime, 263
with OpenVINO, 272 with PyTorch."""


def file_bytes(shape: ModelShape, precision: str) -> int:
    """Bytes of a file in a precision."""
    return shape.bytes * TYPE_BYTES.get(precision, 4) // 4


def table_files(dense: ModelShape, model: nn.Module, precision: str) -> list[int]:
    """Bytes of every file that `table.measure_table` times, those of a last block that is timed by itself left out. `model` has
    the layers of `dense`, or fewer, and needs no weights."""
    every = ({}, *probes(model, reads_first=False))
    return [file_bytes(shape_without(dense, removals), precision) for removals in every]


def shape_without(dense: ModelShape, removals: Mapping[int, Removal]) -> ModelShape:
    """The shape of a model after `surgery.remove`."""
    shape, every = dense, [removals.get(place, Removal()) for place in range(len(dense.layers))]
    for structure in STRUCTURES:
        pairs = zip(dense.layers, every, strict=True)
        shape = shape.with_units(structure, [max(layer.units(structure) - len(gone.of(structure)), 0) for layer, gone in pairs])
    return shape.without([place for place, gone in enumerate(every) if gone.whole])


def memory_of(files: Sequence[int]) -> int:
    """Bytes of memory of one process for each file."""
    return sum(files) + PROCESS * len(files)
