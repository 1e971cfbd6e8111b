"""An ONNX graph on disk: one file, or one with its weights beside it above 2 GB."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir

from export.graph.half import emulated

SINGLE_FILE_LIMIT = 2_000_000_000
"""Largest size in bytes of a protobuf file; larger models get a MODEL.data file beside them."""


def save(proto: onnx.ModelProto, path: Path, limit: int = SINGLE_FILE_LIMIT) -> None:
    """Save as one file of less than `limit` bytes, or with a PATH.data file beside it; `proto` is not changed."""
    program = onnx_ir.from_proto(proto)
    # proto.ByteSize() would write the whole message into memory, three times
    if sum(value.const_value.nbytes for value in program.graph.initializers.values()) < limit:
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return
    # onnx.save would empty `proto`, which int8 still needs, and append to an old data file
    onnx_ir.save(program, path, external_data=f"{path.name}.data")


def with_every_value(path: Path) -> onnx.ModelProto:
    """A stored graph, emulated if it is in half precision, that also gives out every value it computes on the way."""
    proto = emulated(onnx.load(path))
    names = [name for node in proto.graph.node for name in node.output if name]
    shown = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in shown)
    return proto


def carry_over(graph: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """Copy the metadata of `graph` to a graph that was made of it: not every converter keeps them."""
    present = {note.key for note in made.metadata_props}
    made.metadata_props.extend(note for note in graph.metadata_props if note.key not in present)
