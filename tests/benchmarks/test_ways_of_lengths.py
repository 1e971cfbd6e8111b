"""benchmarks/lengths.py: which ways it takes, and that it ends where a process of one dies."""

import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks import lengths


@pytest.mark.parametrize("ways", ["openvino pad 8,openvino pad 16", "onnxruntime,openvino pad 8", ""])
def test_a_way_needs_the_plain_one_that_it_is_compared_with(ways, monkeypatch, capsys):
    """Told before anything is exported."""
    monkeypatch.setattr("sys.argv", ["lengths.py", "--ways", ways])
    monkeypatch.setattr(lengths, "exported", lambda folder: pytest.fail("exported"))
    with pytest.raises(SystemExit) as stopped:
        lengths.main()
    assert stopped.value.code == 2 and "needs beside it the plain way" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_process_that_dies_is_not_waited_for(tmp_path, monkeypatch, capfd):
    """The last one, whose end of the pipe nothing else closes in this process."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", TensorProto.INT64, ["batch", "sequence"])
    graph = helper.make_graph([helper.make_node("Identity", ["input_ids"], ["logits"])], "same", [ids], [logits])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "same.onnx")
    files = {"onnxruntime": {"fp32": tmp_path / "same.onnx", "int8": tmp_path / "none.onnx"}}
    monkeypatch.setattr(lengths, "exported", lambda folder: (lengths.rows_in(lengths.DATA), files))
    monkeypatch.setattr("sys.argv", ["lengths.py", "--ways", "onnxruntime", "--rows", "4"])
    with pytest.raises(EOFError):
        lengths.main()
    assert "none.onnx" in capfd.readouterr().err
