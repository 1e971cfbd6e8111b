"""onnx-neural-compressor, neural-compressor's successor for ONNX: dynamic int8 of torch's export."""

import torch
from onnx_neural_compressor.quantization import quantize
from onnx_neural_compressor.quantization.config import DynamicQuantConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model", attn_implementation="eager").eval()
sample = AutoTokenizer.from_pretrained("model")(["a sentence", "another one"], padding=True, return_tensors="pt")
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
names = {"input_names": list(sample), "output_names": ["logits"], "dynamic_axes": axes}
torch.onnx.export(model, (dict(sample),), "model.onnx", **names, opset_version=17, dynamo=False)
quantize("model.onnx", "model_int8.onnx", DynamicQuantConfig())
