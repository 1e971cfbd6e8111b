"""neural-compressor 3: static int8 of PyTorch's exported program, calibrated on 128 training rows."""

import csv
from pathlib import Path

import torch
from neural_compressor.torch.export import export
from neural_compressor.torch.quantization import StaticQuantConfig, convert, prepare
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("model").eval()
tokenizer = AutoTokenizer.from_pretrained("model")
texts = [row["text"] for row in csv.DictReader(Path("train.tsv").read_text().splitlines(), delimiter="\t")][:128]
rows = [tokenizer(texts[n : n + 8], padding=True, truncation=True, return_tensors="pt") for n in range(0, 128, 8)]
batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=512)
shapes = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
inputs = {name: rows[0][name] for name in shapes}


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


program = export(Logits(), tuple(inputs.values()), tuple(shapes.values()))
prepared = prepare(program, StaticQuantConfig())
for row in rows:
    prepared(row["input_ids"], row["attention_mask"])
quantized = convert(prepared)
names = {"input_names": list(shapes), "output_names": ["logits"], "dynamic_shapes": tuple(shapes.values())}
torch.onnx.export(quantized, tuple(inputs.values()), "model_int8.onnx", **names, dynamo=True)
