"""A torch model -> ONNX graphs: tracing, decoders with a cache, half precision, weights of few bits."""
