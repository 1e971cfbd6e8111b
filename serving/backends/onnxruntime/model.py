"""ONNX Runtime as a python-based Triton backend: serves stock repositories (`backend: "onnxruntime"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/onnxruntime/ holds no libtriton_onnxruntime.so, so it imports nothing
of the project but the files that the server copies beside it.
"""

from batching import BatchingModel
from onnxruntime_engine import Engine


class TritonPythonModel(BatchingModel):
    """One model instance: one ONNX Runtime session."""

    engine_type = Engine
