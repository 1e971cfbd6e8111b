"""ONNX Runtime's own tools: torch's exporter, the optimizer of transformer graphs, and dynamic int8 of both graphs."""

import torch
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.optimizer import optimize_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model", attn_implementation="eager").eval()
sample = AutoTokenizer.from_pretrained("model")(["a sentence", "another one"], padding=True, return_tensors="pt")
# the order of the inputs in the model, not that of the tokenizer, decides which name they get
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
names = {"input_names": ["input_ids", "attention_mask", "token_type_ids"], "output_names": ["logits"], "dynamic_axes": axes}
torch.onnx.export(model, (dict(sample),), "model.onnx", **names, opset_version=17, dynamo=False)
heads, hidden = model.config.num_attention_heads, model.config.hidden_size
optimize_model("model.onnx", "bert", num_heads=heads, hidden_size=hidden).save_model_to_file("optimized.onnx")
options = {"per_channel": True, "weight_type": QuantType.QInt8, "extra_options": {"DefaultTensorType": TensorProto.FLOAT}}
for source in ("model", "optimized"):
    quantize_dynamic(f"{source}.onnx", f"{source}_int8.onnx", **options)
