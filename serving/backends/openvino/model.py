"""OpenVINO as a python-based Triton backend: serves stock repositories (`backend: "openvino"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/openvino/ holds no libtriton_openvino.so, so it imports nothing of the
project but the files that the server copies beside it.
"""

from batching import BatchingModel
from openvino_engine import Engine


class TritonPythonModel(BatchingModel):
    """One model instance: one compiled model and its inference request."""

    engine_type = Engine
