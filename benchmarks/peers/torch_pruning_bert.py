"""Torch-Pruning, as its example for BERT: half of the heads and of the FFN by |W|; two epochs of training; ONNX, int8."""

import csv
from pathlib import Path

import torch
import torch_pruning
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.bert.modeling_bert import BertSelfAttention

torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained("model", attn_implementation="eager").eval()
tokenizer = AutoTokenizer.from_pretrained("model")
sample = dict(tokenizer(["a sentence", "another one"], padding=True, return_tensors="pt"))
# the order of the inputs in the model, not that of the tokenizer, decides which name they get
axes = {name: {0: "batch", 1: "length"} for name in sample} | {"logits": {0: "batch"}}
options = {
    "input_names": ["input_ids", "attention_mask", "token_type_ids"],
    "output_names": ["logits"],
    "dynamic_axes": axes,
    "opset_version": 17,
}
attentions = [module for module in model.modules() if isinstance(module, BertSelfAttention)]
heads = {layer: part.num_attention_heads for part in attentions for layer in (part.query, part.key, part.value)}
pruner = torch_pruning.pruner.MetaPruner(
    model,
    sample,
    importance=torch_pruning.importance.MagnitudeImportance(p=2, group_reduction="mean"),
    pruning_ratio=0.5,
    num_heads=heads,
    prune_head_dims=False,
    prune_num_heads=True,
    head_pruning_ratio=0.5,
    output_transform=lambda output: output.logits.sum(),
    # without the embeddings the hidden size would be halved, too
    ignored_layers=[model.bert.embeddings, model.bert.pooler, model.classifier],
)
for group in pruner.step(interactive=True):
    group.prune()
for part in attentions:
    part.num_attention_heads, part.all_head_size = pruner.num_heads[part.query], part.query.out_features
torch.onnx.export(model, (sample,), "pruned.onnx", **options, dynamo=False)
rows = [(row["text"], int(row["label"])) for row in csv.DictReader(Path("train.tsv").read_text().splitlines(), delimiter="\t")]
loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 2 * len(loader))
model.train()
for _ in range(2):
    for texts, labels in loader:
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
torch.onnx.export(model.eval(), (sample,), "trained.onnx", **options, dynamo=False)
quantize_dynamic("trained.onnx", "trained_int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
