"""onnx-neural-compressor, neural-compressor's successor for ONNX: dynamic int8 of torch's export."""

import torch
from onnx_neural_compressor.quantization import quantize
from onnx_neural_compressor.quantization.config import DynamicQuantConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model", attn_implementation="eager").eval()
sample = AutoTokenizer.from_pretrained("model")(["a sentence", "another one"], padding=True, return_tensors="pt")
# the order of the inputs in the model, not that of the tokenizer, decides which name they get
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
names = {"input_names": ["input_ids", "attention_mask", "token_type_ids"], "output_names": ["logits"], "dynamic_axes": axes}
torch.onnx.export(model, (dict(sample),), "model.onnx", **names, opset_version=17, dynamo=False)
quantize("model.onnx", "model_int8.onnx", DynamicQuantConfig())
