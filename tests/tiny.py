"""A tiny pretrained folder and a tiny labelled task, real in every part, small enough for a whole pipeline in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "awful", "poor", "dull")
FILLER = ("the", "film", "plot", "was", "and", "a", "very", "quite", "scene", "story")


def write_model(folder: Path, model_type: str = "bert") -> Path:
    """A random 2-layer model (hidden 32, 4 heads, 24 neurons) with a word-level fast tokenizer, saved as usual."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *FILLER]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"bert": ["input_ids", "token_type_ids", "attention_mask"], "mpnet": ["input_ids", "attention_mask"]}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=names[model_type],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        vocab_size=len(words),
        max_position_embeddings=64,
        initializer_range=0.15,
    )
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


def sentence(label: int, draw: random.Random) -> str:
    """A few filler words around one or two words that carry the label."""
    words = draw.choices(FILLER, k=draw.randint(2, 12)) + draw.choices((BAD, GOOD)[label], k=draw.randint(1, 2))
    draw.shuffle(words)
    return " ".join(words)


def write_data(folder: Path, *, rows: int = 160, pairs: bool = False, classes: int = 2) -> dict:
    """train.tsv and a dev.tsv of twice as many rows, so that a label that int8 turns is less than a point; returns `task:`.

    With three classes the third has no telling word at all.
    """
    draw = random.Random(0)
    for name, count in (("train", rows), ("dev", 2 * rows)):
        lines = ["first\tsecond\tlabel" if pairs else "sentence\tlabel"]
        for index in range(count):
            label = index % classes
            text = sentence(label, draw) if label < 2 else " ".join(draw.choices(FILLER, k=6))
            other = [" ".join(draw.choices(FILLER, k=3))] if pairs else []
            lines.append("\t".join([text, *other, f"class{label}"]))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    columns = ["first", "second"] if pairs else "sentence"
    return {"train": "train.tsv", "validation": "dev.tsv", "text": columns, "label": "label", "max_length": 32}


STAGES = [
    {"select": {"count": 4}},
    {"tune": {"method": "dsee", "rank": 4, "epochs": 6, "learning_rate": 0.02, "batch_size": 8}},
    {"prune": [
        {"structure": "heads", "criterion": "delta", "remove": 1},
        {"structure": "neurons", "criterion": "taylor", "remove": 0.5},
    ]},
    {"select": {"count": 4, "modules": "all"}},
    {"recover": {"method": "dsee", "rank": 4, "modules": "all", "epochs": 4, "learning_rate": 0.02, "batch_size": 8}},
    {"merge": None},
    {"export": {"precision": ["fp32", "int8"]}},
    {"deploy": {"name": "tiny"}},
    {"benchmark": {"batch": [1, 2], "length": [16], "rounds": 3}},
    {"report": None},
]  # fmt: skip
"""The quickstart's shape, in seconds."""


def write_pipeline(folder: Path, *, stages: list | None = None, model_type: str = "bert", **data) -> Path:
    """A whole project in `folder`: model, data and pipeline.yaml; returns the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", model_type)
    pipeline = {
        "name": "tiny",
        "model": "./model",
        "task": write_data(folder, **data),
        "stages": stages if stages is not None else STAGES,
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(pipeline)), sort_keys=False))
    return path
