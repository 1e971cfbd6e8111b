"""Olive: its commands for a PyTorch export, ONNX Runtime's transformer fusions, and dynamic int8."""

from olive import run

torch_model = {"type": "HfModel", "model_path": "model", "task": "text-classification"}
passes = {"export": {"type": "OnnxConversion"}, "fuse": {"type": "OrtTransformersOptimization", "model_type": "bert"}}
run({"input_model": torch_model, "passes": passes, "output_dir": "fp32"})
passes["quantize"] = {"type": "OnnxDynamicQuantization", "per_channel": True}
run({"input_model": torch_model, "passes": passes, "output_dir": "int8"})
