"""A torch model -> ONNX graphs: tracing, decoders with a cache, half precision, low-bit weights."""
