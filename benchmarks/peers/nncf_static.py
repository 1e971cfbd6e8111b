"""NNCF on OpenVINO's own conversion of the PyTorch model, and on torch's ONNX file: static int8."""

import csv
from pathlib import Path

import nncf
import onnx
import openvino
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model").eval()
tokenizer = AutoTokenizer.from_pretrained("model")
texts = [row["text"] for row in csv.DictReader(Path("train.tsv").read_text().splitlines(), delimiter="\t")][:128]
rows = [dict(tokenizer(texts[n : n + 8], padding=True, truncation=True, return_tensors="np")) for n in range(0, 128, 8)]
sample = dict(tokenizer(["a sentence", "another one"], padding=True, return_tensors="pt"))
converted = openvino.convert_model(model, example_input=sample)
openvino.save_model(converted, "fp32.xml", compress_to_fp16=False)
options = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(rows)}
openvino.save_model(nncf.quantize(converted, nncf.Dataset(rows), **options), "int8.xml", compress_to_fp16=False)
# the order of the inputs in the model, not that of the tokenizer, decides which name they get
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
names = {"input_names": ["input_ids", "attention_mask", "token_type_ids"], "output_names": ["logits"], "dynamic_axes": axes}
model.set_attn_implementation("eager")
torch.onnx.export(model, (sample,), "model.onnx", **names, opset_version=17, dynamo=False)
onnx.save(nncf.quantize(onnx.load("model.onnx"), nncf.Dataset(rows), **options), "int8.onnx")
