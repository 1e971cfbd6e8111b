"""A tiny pretrained folder and a tiny labelled task, real in every part, small enough for a whole pipeline in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

from compressor.models.architectures import ARCHITECTURES

GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "awful", "poor", "dull")
NEURONS = 24
FILLER = ("the", "film", "plot", "was", "and", "a", "very", "quite", "scene", "story")


def own_keys(model_type: str, *, layers: int, neurons: int) -> dict:
    """What a tiny model's config calls otherwise, or has of its own: grouped key and value heads for Llama."""
    t5 = {"d_ff": neurons, "num_layers": layers, "num_decoder_layers": layers, "d_kv": 8, "dropout_rate": 0.0}
    deberta = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "position_buckets": 8,
        "max_relative_positions": 16,
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
    }
    modernbert = {"global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 2, "sep_token_id": 3}
    rows = {
        "deberta-v2": deberta,
        "gpt2": {"n_inner": neurons, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {"num_key_value_heads": 2},
        "mistral": {"num_key_value_heads": 2},
        "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
        "distilbert": {"hidden_dim": neurons, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
        "electra": {"embedding_size": 32},
        "modernbert": {**modernbert, "mlp_dropout": 0.0},
        "t5": t5,
        "t5-gated": {**t5, "feed_forward_proj": "gated-gelu"},
    }
    return rows.get(model_type, {})


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *FILLER)
ROWS = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "t5": ("$A [SEP]", "$A [SEP] $B [SEP]"),
    "gpt2": ("$A", "$A $B"),
    "llama": ("[CLS] $A", "[CLS] $A $B"),
    "qwen3": ("$A", "$A $B"),
}
"""How a tokenizer frames one text and a pair; the other encoders do it as BERT."""
DECODERS = tuple(name for name, row in ARCHITECTURES.items() if row.head_on_tokens)
"""They generate, and have no padding token."""
SEGMENTS = ("bert", "electra", "deberta-v2")
"""Their tokenizers give token_type_ids (a DeBERTa has no use for them)."""


def write_tokenizer(folder: Path, model_type: str) -> None:
    """A word-level fast tokenizer with the frame and special tokens that are usual for the type; decoders have no padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single, pair = ROWS.get(model_type, ROWS["bert"])
    special = [(word, WORDS.index(word)) for word in ("[CLS]", "[SEP]") if word in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    tokens = {"unk_token": "[UNK]"}
    if model_type in (*DECODERS, "t5"):
        tokens["eos_token"] = "[SEP]"
    else:
        tokens |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    if model_type not in DECODERS:
        tokens["pad_token"] = "[PAD]"
    names = ["input_ids", *(["token_type_ids"] if model_type in SEGMENTS else []), "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **tokens).save_pretrained(folder)


def write_model(folder: Path, model_type: str = "bert", *, auto: str = "AutoModel", **keys) -> Path:
    """A random 2-layer model (hidden 32, 4 heads, 24 neurons) with its tokenizer, saved as usual.

    `auto` is the Auto class that makes it, `keys` are of its config.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    write_tokenizer(folder, model_type.removesuffix("-gated"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type.removesuffix("-gated"),
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": NEURONS,
            "vocab_size": len(WORDS),
            "max_position_embeddings": 64,
            "initializer_range": 0.15,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "pad_token_id": None if model_type in DECODERS else 0,
            "decoder_start_token_id": 0,
            **own_keys(model_type, layers=2, neurons=NEURONS),
            **keys,
        },
    )
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
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


def write_scores(folder: Path, *, rows: int = 160) -> dict:
    """The same for a regression on pairs: the score is 5 times the share of good words among the telling; returns `task:`."""
    draw = random.Random(0)
    for name, count in (("train", rows), ("dev", 2 * rows)):
        lines = ["first\tsecond\tscore"]
        for _ in range(count):
            good, bad = draw.choice([(0, 2), (1, 3), (1, 2), (1, 1), (2, 1), (3, 1), (2, 0)])
            words = draw.choices(GOOD, k=good) + draw.choices(BAD, k=bad) + draw.choices(FILLER, k=draw.randint(0, 6))
            draw.shuffle(words)
            lines.append(f"{' '.join(words)}\t{' '.join(draw.choices(FILLER, k=3))}\t{5 * good / (good + bad):.3f}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    task = {"kind": "regression", "train": "train.tsv", "validation": "dev.tsv", "text": ["first", "second"], "label": "score"}
    return {**task, "max_length": 32}


def write_tags(folder: Path, *, rows: int = 160) -> dict:
    """The same for words: a good or a bad one is an entity, with another behind it or not. train.jsonl, and dev.conll, in IOB1;
    returns `task:`."""
    draw = random.Random(0)

    def tagged() -> list[tuple[str, str]]:
        words = []
        for name in draw.choices(("GOOD", "BAD"), k=draw.randint(1, 2)):
            words += [(word, "O") for word in draw.choices(FILLER, k=draw.randint(1, 5))]
            telling = GOOD if name == "GOOD" else BAD
            words += [(draw.choice(half), f"I-{name}") for half in (telling[:2], telling[2:])[: draw.randint(1, 2)]]
        return words

    columns = (list(zip(*tagged(), strict=True)) for _ in range(rows))
    lines = (json.dumps({"tokens": words, "tags": tags}) for words, tags in columns)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    sentences = ("\n".join(f"{word} X {tag}" for word, tag in tagged()) for _ in range(2 * rows))
    (folder / "dev.conll").write_text("-DOCSTART- X O\n\n" + "\n\n".join(sentences) + "\n")
    return {"kind": "tokens", "train": "train.jsonl", "validation": "dev.conll", "max_length": 32}


def write_prompts(folder: Path, *, rows: int = 160) -> dict:
    """The same for a generation: the target says the telling words of the prompt again, in a frame. train.jsonl, and dev.csv;
    returns `task:`."""
    draw = random.Random(0)

    def pair() -> tuple[str, str]:
        label, filler = draw.randint(0, 1), draw.choices(FILLER, k=draw.randint(1, 3))
        word = draw.choice((BAD, GOOD)[label])
        return " ".join([*filler, word]), f"the film was {word} and {word}" if label else f"a {word} story"

    lines = (json.dumps(dict(zip(("prompt", "target"), pair(), strict=True))) for _ in range(rows))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "dev.csv").write_text(
        "prompt,target\n" + "".join(f'"{one}","{other}"\n' for one, other in (pair() for _ in range(2 * rows)))
    )
    return {"kind": "generation", "train": "train.jsonl", "validation": "dev.csv", "max_length": 32}


def write_sources(folder: Path, *, rows: int = 160) -> dict:
    """The same for an encoder and a decoder: the same pairs, with a prefix and scores of generated texts; returns `task:`."""
    task = {**write_prompts(folder, rows=rows), "kind": "text2text", "text": "prompt", "label": "target"}
    return {
        **task,
        "prefix": "the ",
        "decode": {"max_new_tokens": 12, "metrics": ["exact_match", "bleu", "rouge_2"], "rows": 20},
    }


EVERYTHING = [
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
    {"benchmark": {"batch": [1, 2], "length": [16], "rounds": 6, "profile": True}},
    {"report": None},
]  # fmt: skip
"""The quickstart's shape, in seconds."""
LEFT_OUT = {"recover": {"control": False}, "benchmark": {"real_lengths": False, "machine_limits": False, "profile": False}}
STAGES = [
    {name: {**keys, **LEFT_OUT[name]} if name in LEFT_OUT else keys for name, keys in stage.items()} for stage in EVERYTHING
]
"""The same without what takes longest, which tests/end_to_end/test_whole_path.py has."""


def write_labels(folder: Path, *, rows: int = 160) -> dict:
    """The same with several labels: for a good word, a bad one, and a certain other. train.jsonl has lists, dev.tsv separated
    labels; returns `task:`."""
    draw = random.Random(0)

    def labelled() -> tuple[str, list[str]]:
        words, labels = draw.choices(FILLER[:6], k=draw.randint(1, 3)), []
        for name, telling in (("praise", GOOD), ("blame", BAD), ("tale", FILLER[8:])):
            if draw.random() < 0.5:
                labels.append(name)
                words += draw.choices(telling, k=2)
        draw.shuffle(words)
        return " ".join(words), labels

    pairs = (labelled() for _ in range(rows))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text, "labels": labels}) + "\n" for text, labels in pairs))
    lines = (f"{text}\t{', '.join(labels)}" for text, labels in (labelled() for _ in range(2 * rows)))
    (folder / "dev.tsv").write_text("text\tlabels\n" + "\n".join(lines) + "\n")
    return {"kind": "multilabel", "train": "train.jsonl", "validation": "dev.tsv", "max_length": 32}


def write_answers(folder: Path, *, rows: int = 160) -> dict:
    """The same for questions: the answer is the one or two good words of the context, in every sixth row there is none.
    train.jsonl has SQuAD's lists, dev.jsonl a list of answers; returns `task:`."""
    draw = random.Random(0)
    for name, count in (("train", rows), ("dev", 2 * rows)):
        lines = []
        for row in range(count):
            before, after = (" ".join(draw.choices(FILLER, k=draw.randint(1, 4))) for _ in range(2))
            told = " ".join(half[draw.randint(0, 1)] for half in (GOOD[:2], GOOD[2:])[: draw.randint(1, 2)])
            context = f"{before} {told if row % 6 else draw.choice(BAD)} {after}"
            found = [{"text": told, "answer_start": len(before) + 1}] if row % 6 else []
            lists = {key: [one[key] for one in found] for key in ("text", "answer_start")}
            answers = lists if name == "train" else found
            lines.append(json.dumps({"question": "was the film", "context": context, "answers": answers}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {"kind": "spans", "train": "train.jsonl", "validation": "dev.jsonl", "max_length": 32}


def write_choices(folder: Path, *, rows: int = 160) -> dict:
    """The same for three choices, of which the one with good words is right. train.tsv has a column for each, dev.jsonl too;
    returns `task:`."""
    draw = random.Random(0)

    def row() -> dict:
        right = draw.randint(0, 2)
        words = [draw.choices(GOOD if place == right else BAD, k=2) + draw.choices(FILLER, k=2) for place in range(3)]
        cells = {f"choice{place}": " ".join(draw.sample(each, 4)) for place, each in enumerate(words)}
        return {"premise": " ".join(draw.choices(FILLER, k=draw.randint(2, 4))), **cells, "label": right}

    (folder / "dev.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(2 * rows)))
    lines = ["premise\tchoice0\tchoice1\tchoice2\tlabel", *("\t".join(map(str, row().values())) for _ in range(rows))]
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    task = {"kind": "choices", "train": "train.tsv", "validation": "dev.jsonl", "max_length": 32}
    return {**task, "text": ["premise", "choice0", "choice1", "choice2"], "label": "label"}


def write_marked(folder: Path, *, rows: int = 160) -> dict:
    """The same for two marked spans of a text, the first of which is a good word or a bad one; train.jsonl, and dev.tsv, where
    spans with a number are JSON; returns `task:`."""
    draw = random.Random(0)

    def row() -> dict:
        label = draw.randint(0, 1)
        words = [*draw.choices(FILLER[:5], k=draw.randint(1, 4)), draw.choice((BAD, GOOD)[label])]
        words += [*draw.choices(FILLER[:5], k=draw.randint(1, 3)), "story"]
        place = next(number for number, word in enumerate(words) if word in GOOD + BAD)
        return {"text": " ".join(words), "span1": [place, words[place]], "span2": "story", "label": f"class{label}"}

    (folder / "train.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(rows)))
    cells = ((one["text"], json.dumps(one["span1"]), one["span2"], one["label"]) for one in (row() for _ in range(2 * rows)))
    (folder / "dev.tsv").write_text("text\tspan1\tspan2\tlabel\n" + "".join("\t".join(each) + "\n" for each in cells))
    return {"kind": "marked", "train": "train.jsonl", "validation": "dev.tsv", "max_length": 32}


WRITERS = {
    "classification": write_data,
    "regression": write_scores,
    "tokens": write_tags,
    "generation": write_prompts,
    "text2text": write_sources,
    "multilabel": write_labels,
    "spans": write_answers,
    "choices": write_choices,
    "marked": write_marked,
}
"""Kind of task -> what writes one."""


def write_pipeline(
    folder: Path, *, stages: list | None = None, model_type: str = "bert", kind: str = "classification", **data
) -> Path:
    """A whole project in `folder`: model, data and pipeline.yaml; returns the path of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    decoder, text2text = kind == "generation" and model_type in DECODERS, kind == "text2text"
    auto = "AutoModelForCausalLM" if decoder else "AutoModelForSeq2SeqLM" if text2text else "AutoModel"
    write_model(folder / "model", model_type, auto=auto)
    pipeline = {
        "name": "tiny",
        "model": "./model",
        "task": WRITERS[kind](folder, **data),
        "stages": stages if stages is not None else STAGES,
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(pipeline)), sort_keys=False))
    return path
