"""The runtimes that execute exported files: ONNX Runtime, OpenVINO, TensorRT."""
