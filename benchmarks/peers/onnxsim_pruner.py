"""onnxsim's pruner on an ONNX file: half of the heads and of the FFN by Wanda, ridge regression, ONNX Runtime's int8."""

import csv
from pathlib import Path

import onnx
import onnxsim
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.optimizer import optimize_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model", attn_implementation="eager").eval()
tokenizer = AutoTokenizer.from_pretrained("model")
sample = tokenizer(["a sentence", "another one"], padding=True, return_tensors="pt")
# the order of the inputs in the model, not that of the tokenizer, decides which name they get
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
names = {"input_names": ["input_ids", "attention_mask", "token_type_ids"], "output_names": ["logits"], "dynamic_axes": axes}
torch.onnx.export(model, (dict(sample),), "model.onnx", **names, opset_version=17, dynamo=False)
# it finds heads and neurons only where they are one operator
dense = optimize_model("model.onnx", "bert", num_heads=12, hidden_size=384).model
texts = [row["text"] for row in csv.DictReader(Path("train.tsv").read_text().splitlines(), delimiter="\t")][:64]
rows = [dict(tokenizer(texts[n : n + 8], padding=True, truncation=True, return_tensors="np")) for n in range(0, 64, 8)]
pruned = onnxsim.apply_attention_head_wanda_pruning(dense, rows, sparsity=0.5)
pruned = onnxsim.apply_structured_wanda_pruning(pruned, rows, sparsity=0.5)
onnx.save(pruned, "pruned.onnx")
recovered = onnxsim.apply_pruning_finetune(dense, pruned, rows)
onnx.save(recovered, "recovered.onnx")
options = {"per_channel": True, "weight_type": QuantType.QInt8, "extra_options": {"DefaultTensorType": onnx.TensorProto.FLOAT}}
quantize_dynamic("recovered.onnx", "recovered_int8.onnx", **options)
