"""A torch model -> ONNX Runtime and OpenVINO, sessions of both, parity and latency."""

import sys

# OpenVINO and NNCF report their use to Google Analytics without asking, and transformers' exporters import both where they are
# installed. They keep silent where this package cannot be imported
sys.modules.setdefault("openvino_telemetry", None)
