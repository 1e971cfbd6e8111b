"""A graph of more than 2 GB, which is more than one protobuf message can be: its weights lie beside it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.graph.files import save
from export.runtimes.sessions import run, session

ROWS, WIDTH = 2_200_000, 128
"""Of each of two tables: 1.13 GB in fp32."""


@pytest.mark.slow
def test_more_than_two_gigabytes(tmp_path):
    save(two_tables(), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").stat().st_size < 10_000
    assert (tmp_path / "model.onnx.data").stat().st_size > 2**31
    logits = run(session(tmp_path / "model.onnx"), {"input_ids": np.array([[0, ROWS - 1], [1, 1]])})
    assert logits[0].tolist() == [3.0] * WIDTH and not logits[1].any()


def two_tables() -> onnx.ModelProto:
    """The mean over a row's tokens of the sum of two tables: the first has 2 in its first row, the other 4 in its last."""
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["first", "input_ids"], ["one"]),
            helper.make_node("Gather", ["last", "input_ids"], ["other"]),
            helper.make_node("Add", ["one", "other"], ["both"]),
            helper.make_node("ReduceMean", ["both", "axes"], ["logits"], keepdims=0),
        ],
        "large",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for name, row, value in (("first", 0, 2), ("last", -1, 4)):
        table = np.zeros((ROWS, WIDTH), np.float32)
        table[row] = value
        # in place: every copy of it is another gigabyte
        model.graph.initializer.add(name=name, dims=table.shape, data_type=TensorProto.FLOAT, raw_data=table.tobytes())
    return model
