"""`compress export`: a model folder to ONNX without a pipeline."""
