"""Inputs that were once answered by a traceback, a hang or a wrong yes. A row for each cause, with what it must be now."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.mutators import DEEP, described, tensor_header, with_header

Make = Callable[[bytes], bytes]
DIGITS = "9" * 5_000


@dataclass(frozen=True)
class Row:
    """`make` changes `file` of a seed (the first of its target where none is named). `codes`: one of these comes, or, where
    there is "accepted" among them, nothing need be wrong with it."""

    name: str
    target: str
    file: str
    make: Make
    codes: str
    seed: str = ""


def text(content: str | bytes) -> Make:
    """This instead of the file."""
    return lambda _: content if isinstance(content, bytes) else content.encode()


def edit(**keys: Any) -> Make:
    """Other values in a JSON file."""
    return lambda content: json.dumps(json.loads(content) | keys).encode()


def without(key: str) -> Make:
    return lambda content: json.dumps({name: one for name, one in json.loads(content).items() if name != key}).encode()


def put(key: str, raw: str) -> Make:
    """Raw text as a value of a JSON file: what json.dumps cannot write."""
    return lambda content: json.dumps(json.loads(content) | {key: "PLACE"}).replace('"PLACE"', raw).encode()


def tensor(change: Callable[[dict, str], None], name: str = "encoder.layer.1.output.dense.weight") -> Make:
    """Another header, by what `change` does to the row of one tensor."""

    def make(content: bytes) -> bytes:
        header = tensor_header(content)
        change(header, name)
        return with_header(content, header)

    return make


def length(of: Callable[[int, int], int]) -> Make:
    """Another length of the header, from that and the file's size."""

    def make(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        return of(size, len(content)).to_bytes(8, "little") + content[8:]

    return make


def number(value: bytes, everywhere: bool = False) -> Make:
    """Four bytes instead of the last float, or of all."""

    def make(content: bytes) -> bytes:
        start = 8 + int.from_bytes(content[:8], "little") if everywhere else len(content) - 4
        return content[:start] + value * ((len(content) - start) // 4)

    return make


def named(key: str, value: str) -> Make:
    """Another value of a key on a line of its own, in YAML."""
    return lambda content: re.sub(rf"^{key}: .*$", f"{key}: {value}", content.decode(), flags=re.MULTILINE).encode()


def sealed(change: Callable[[dict], Any]) -> Make:
    """A delta file with another description and a checksum that holds."""

    def write(description: dict) -> str:
        change(description)
        return json.dumps(description)

    return lambda content: described(content, write)


def outside(content: bytes) -> bytes:
    """The first shard, in the folder above."""
    index = json.loads(content)
    shards = sorted(set(index["weight_map"].values()))
    moved = {name: "../outside.safetensors" if file == shards[0] else file for name, file in index["weight_map"].items()}
    return json.dumps(index | {"weight_map": moved}).encode()


STRANGER = edit(model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})


def row(change: dict) -> Callable[[dict, str], None]:
    return lambda header, name: header[name].update(change)


CONFIG, WEIGHTS, INDEX = "model/config.json", "model/model.safetensors", "model/model.safetensors.index.json"
TOKENIZER, SETTINGS = "model/tokenizer.json", "model/tokenizer_config.json"
LOCK, REPORT, FACTS = "runs/tiny/pipeline.lock.yaml", "runs/tiny/report.json", "runs/tiny/run.json"
BASE, DAMAGED = "E304 E305", "E305"
RECORD = "E803 E805"


def config(name: str, make: Make, codes: str = f"{BASE} E301", seed: str = "bert") -> Row:
    return Row(f"config: {name}", "model config", CONFIG, make, codes, seed)


def tokenizer(name: str, file: str, make: Make, codes: str = BASE, seed: str = "bert") -> Row:
    return Row(f"tokenizer: {name}", "model config", file, make, codes, seed)


def weights(name: str, make: Make, codes: str = BASE, file: str = WEIGHTS, seed: str = "bert") -> Row:
    return Row(f"weights: {name}", "weights", file, make, codes, seed)


def lock(name: str, make: Make, file: str = LOCK, codes: str = RECORD) -> Row:
    return Row(f"run: {name}", "run", file, make, codes)


def jsonl(name: str, line: str, seed: str = "classification jsonl") -> Row:
    return Row(f"data: {name}", "data", "train.jsonl", lambda content: content + line.encode() + b"\n", "E210", seed)


def delta(name: str, change: Callable[[dict], Any], seed: str = "dsee", codes: str = "E310 E311") -> Row:
    return Row(f"delta: {name}", "sealed delta", "tuned.safetensors", sealed(change), codes, seed)


def link(kind: str, key: str, value: Any) -> Callable[[dict], None]:
    """Another value of a key of the first change of this kind, or of what its values are."""

    def change(description: dict) -> None:
        rows = [found for found in _changes(description["changes"]) if found["kind"] == kind]
        rows[0][key] = value

    return change


LONG = "x" * 100_000
HALF = text('name: x\nmodel: ./model\nstages: [{select: {modules: ["\\ud800"]}}]\n')
SCALE = sealed(lambda description: _changes(description["changes"])[0].update(scale={"a": 1}))
SHA256 = sealed(lambda description: description.update(base_sha256=1))
LIST_AS_LABEL = sealed(lambda description: description.update(labels=[["a"], "b"]))


def _changes(node: Any) -> list[dict]:
    if isinstance(node, dict):
        return ([node] if "kind" in node else []) + [found for value in node.values() for found in _changes(value)]
    return [found for value in node for found in _changes(value)] if isinstance(node, list) else []


HEADERS = (
    weights("a byte short", lambda content: content[:-1]),
    weights("a byte long", lambda content: content + b"\0"),
    weights("empty", text("")),
    weights("half", lambda content: content[: len(content) // 2]),
    weights("a header of no bytes", length(lambda size, whole: 0)),
    weights("a header longer than the file", length(lambda size, whole: whole)),
    weights("a header of 2^63 bytes", length(lambda size, whole: 2**63)),
    weights("a header cut off", length(lambda size, whole: size - 1)),
    weights("a header without shape", tensor(lambda header, name: header[name].pop("shape"))),
    weights("overlapping offsets", tensor(row({"data_offsets": [0, 3072]}))),
    weights("offsets beyond the file", tensor(row({"data_offsets": [2**40, 2**40 + 3072]}))),
    weights("a huge shape", tensor(row({"shape": [10**12, 24]}))),
    weights("a negative shape", tensor(row({"shape": [-32, 24]}))),
    weights("an unknown type", tensor(row({"dtype": "F4"}))),
    weights("a shape against the config", tensor(row({"shape": [24, 32]}))),
)
ROWS = (
    # the header of safetensors
    *HEADERS,
    # the same folders, and one with a stranger's code, given to an export alone
    *(Row(f"export of {one.name}", "export", one.file, one.make, one.codes, one.seed) for one in HEADERS),
    Row("export of code of its own", "export", CONFIG, STRANGER, f"{BASE} E301 E621", "bert"),
    # a config.json that is no config
    config("a list", text("[]")),
    config("a text", text('"bert"')),
    config("true", text("true")),
    config("empty", text("")),
    config("cut off", text("{")),
    config("twice in one file", lambda content: content * 2),
    config("UTF-16", lambda content: content.decode().encode("utf-16")),
    config("a byte order mark", lambda content: b"\xef\xbb\xbf" + content, f"{BASE} accepted"),
    config("no UTF-8", lambda content: content.replace(b"bert", b"be\xff\xfert")),
    config("3,000 deep", put("a", "[" * DEEP + "]" * DEEP)),
    config("5,000 digits", put("a", DIGITS)),
    # keys that transformers would stumble on, or take
    config("hidden size as text", edit(hidden_size="32")),
    config("hidden size as a fraction", edit(hidden_size=32.5)),
    config("5 heads", edit(num_attention_heads=5)),
    config("0 heads", edit(num_attention_heads=0)),
    config("heads as a mapping", edit(num_attention_heads={"a": 4})),
    config("-1 layers", edit(num_hidden_layers=-1)),
    config("10^9 layers", edit(num_hidden_layers=10**9)),
    config("10^12 words", edit(vocab_size=10**12)),
    config("an unknown activation", edit(hidden_act="evil")),
    config("a dropout of 10", edit(hidden_dropout_prob=10.0)),
    config("an unknown type of numbers", edit(dtype="float3"), f"{BASE} accepted"),
    config("a type of numbers that is a mapping", edit(dtype={"a": 1}), f"{BASE} accepted"),
    config("no type of numbers", edit(dtype=[]), f"{BASE} accepted"),
    config("positions as a text", edit(max_position_embeddings="64")),
    config("positions as a mapping", edit(max_position_embeddings={"a": 64})),
    config("padding as a mapping", edit(pad_token_id={"a": 0})),
    config("a class for a key", edit(__class__=3), f"{BASE} accepted"),
    config("another activation's capitals", edit(hidden_act="GELU")),
    config("a model type that is a number", edit(model_type=3)),
    config("labels that are a list", edit(id2label=["a"]), f"{BASE} accepted"),
    config("more layers than kinds of layers", edit(num_hidden_layers=22), seed="modernbert"),
    config("kinds of layers as a mapping", edit(layer_types={"a": 1}), seed="modernbert"),
    # tokenizers
    tokenizer("empty", TOKENIZER, text("{}")),
    tokenizer("a list", TOKENIZER, text("[]")),
    tokenizer("no UTF-8", TOKENIZER, lambda content: content.replace(b"good", b"\xffood")),
    tokenizer("half an escape", TOKENIZER, lambda content: content.replace(b'"good"', b'"\\ud8"')),
    tokenizer("an added token without its keys", TOKENIZER, edit(added_tokens=[{"id": 0, "content": "[PAD]"}])),
    tokenizer("settings cut off", SETTINGS, text("{")),
    tokenizer("settings that are a number", SETTINGS, text("1.5")),
    tokenizer("a class that is a list", SETTINGS, edit(tokenizer_class=["a"])),
    tokenizer("a special token that is a number", SETTINGS, edit(sep_token=7)),
    tokenizer("a length that is a mapping", SETTINGS, edit(model_max_length={"a": 1})),
    tokenizer("input names that are a text", SETTINGS, edit(model_max_length="512")),
    tokenizer("no word for unknown ones", TOKENIZER, lambda content: content.replace(b'"[UNK]": 1', b'"[UNX]": 1')),
    # the weights, and the index of their shards
    weights("a vocabulary against the config", edit(vocab_size=99), file=CONFIG),
    weights("one infinite number", number(b"\0\0\x80\x7f")),
    weights("one that is not a number", number(b"\0\0\xc0\x7f")),
    weights("none that is a number", number(b"\0\0\xc0\x7f", everywhere=True)),
    weights("a shard outside the folder", outside, file=INDEX, seed="shards"),
    weights("a shard that is a mapping", edit(weight_map={"a": {"b": 1}}), file=INDEX, seed="shards"),
    weights("an index that is a list", text("[]"), file=INDEX, seed="shards"),
    weights("an index without its map", text("{}"), file=INDEX, seed="shards"),
    weights("a shard of half a character", edit(weight_map={"a": "\ud800"}), file=INDEX, seed="shards"),
    weights("an index that is no UTF-8", lambda content: b"\xff" + content, file=INDEX, seed="shards"),
    # pipelines
    Row("pipeline: a model of 100,000 letters", "pipeline check", "pipeline.yaml", named("model", LONG), "E303 E104"),
    Row(
        "pipeline: a data file of 100,000 letters", "pipeline check", "pipeline.yaml", named("  train", LONG), "E201 E202 E104"
    ),
    Row("pipeline: a module of half a character", "pipeline check", "pipeline.yaml", HALF, "E101 E102 E104"),
    # data
    jsonl("3,000 lists in each other", "[" * DEEP),
    jsonl("3,000 lists in a row", '{"sentence": ' + "[" * DEEP + "]" * DEEP + ', "label": "class0"}'),
    jsonl("5,000 digits in a row", f'{{"sentence": "a", "label": {DIGITS}}}'),
    jsonl("5,000 digits among tags", f'{{"tokens": ["a"], "tags": [{DIGITS}]}}', "tokens"),
    Row(
        "data: a long field of CSV",
        "data",
        "train.csv",
        lambda c: c + b"word " * 40_000 + b",class1\n",
        "accepted",
        "classification csv",
    ),
    # deltas under a checksum that holds
    delta("a label that is a number", lambda description: description["labels"].__setitem__(0, 1)),
    delta("a label that is a list", lambda description: description.update(labels=[["a"], "b"])),
    delta("a sha256 that is a mapping", lambda description: description.update(base_sha256={"a": 1})),
    Row("delta: a label that is a list, applied", "applied delta", "tuned.safetensors", LIST_AS_LABEL, "E310 E311", "dsee"),
    delta("a scale that is a list", link("low_rank", "scale", [1.0]), "lora"),
    delta("a kind that is a mapping", link("low_rank", "kind", {"a": 1}), "lora"),
    delta("a key of no change", link("sparse", "evil", 1)),
    delta("a change of no kind", lambda description: _changes(description["changes"])[0].pop("kind"), "lora"),
    Row("delta: a scale that is a mapping, applied", "applied delta", "tuned.safetensors", SCALE, "E310 E311", "lora"),
    Row("delta: a sha256 that is a number, applied", "applied delta", "tuned.safetensors", SHA256, "E310 E306", "lora"),
    # states and checkpoints
    Row("state: 3,000 deep", "state", "stored/state.json", put("a", "[" * DEEP + "]" * DEEP), DAMAGED),
    Row("state: a base without its sha256", "state", "stored/state.json", edit(base={"reference": "x"}), DAMAGED),
    Row("state: labels that are mappings", "state", "stored/state.json", edit(labels=[{"a": 1}, "b"]), DAMAGED),
    Row("checkpoint: 3,000 deep", "checkpoint", "stored/config.json", put("a", "[" * DEEP + "]" * DEEP), DAMAGED),
    Row(
        "checkpoint: an unknown type of numbers",
        "checkpoint",
        "stored/config.json",
        edit(dtype="FLOAT32"),
        f"{DAMAGED} accepted",
    ),
    Row("checkpoint: a class for a key", "checkpoint", "stored/config.json", edit(__class__=3), f"{DAMAGED} accepted"),
    Row("state: no changes", "state", "stored/state.json", without("changes"), DAMAGED),
    Row("state: no labels", "state", "stored/state.json", without("labels"), DAMAGED),
    Row("state: labels that are a number", "state", "stored/state.json", edit(labels=1), DAMAGED),
    Row("state: a base that is a text", "state", "stored/state.json", edit(base="here"), DAMAGED),
    Row("state: kept that is a list", "state", "stored/state.json", edit(kept=[1]), DAMAGED),
    Row("state: kept of a layer that is none", "state", "stored/state.json", edit(kept={"null": {"heads": [0]}}), DAMAGED),
    Row("state: kept of layer 99", "state", "stored/state.json", edit(kept={"99": {"heads": [0]}}), DAMAGED),
    Row("checkpoint: a list", "checkpoint", "stored/config.json", text("[]"), DAMAGED),
    Row("checkpoint: no model type", "checkpoint", "stored/config.json", without("model_type"), DAMAGED),
    Row("checkpoint: a token as text", "checkpoint", "stored/config.json", edit(eos_token_id="3"), f"{DAMAGED} accepted"),
    Row("checkpoint: heads as a fraction", "checkpoint", "stored/config.json", edit(num_attention_heads=-0.5), DAMAGED),
    Row("checkpoint: a dropout of 10", "checkpoint", "stored/config.json", edit(attention_probs_dropout_prob=10.0), DAMAGED),
    Row("checkpoint: 10^9 layers", "checkpoint", "stored/config.json", edit(num_hidden_layers=10**9), DAMAGED),
    Row(
        "checkpoint: layers of their own that are a list",
        "checkpoint",
        "stored/config.json",
        edit(per_layer_config=[1]),
        DAMAGED,
    ),
    Row(
        "openvino: another output", "openvino", "model.xml", lambda content: content.replace(b"logits", b"xogits"), "E602 E611"
    ),
    Row("onnx: an operator that is no UTF-8", "graph", "model.onnx", lambda c: c.replace(b"Gather", b"Gath\xdfr"), "E602"),
    # what a run has left
    lock("an empty lock", text("")),
    lock("a lock that is a list", text("[]")),
    lock("a lock that is null", text("null")),
    lock("a lock that is a text", text("evil")),
    lock("an empty mapping", text("{}")),
    lock("a lock 3,000 deep", text("[" * DEEP)),
    lock("a lock without stages", lambda content: content.replace(b"\nstages:", b"\nstage:")),
    lock("stages that are numbers", lambda content: content.partition(b"\nstages:")[0] + b"\nstages: [1, 2]\n"),
    lock("a name that is a number", lambda content: content.replace(b"name: tiny", b"name: 3")),
    lock("facts cut off", text("{"), FACTS, f"{RECORD} accepted"),
    lock("facts that are a list", text("[]"), FACTS, f"{RECORD} accepted"),
    lock("facts 3,000 deep", text("[" * DEEP), FACTS, f"{RECORD} accepted"),
    lock("a model folder that is a number", edit(model_folder=3), FACTS, f"{RECORD} accepted"),
    lock("an empty report", text(""), REPORT),
    lock("a report that is a list", text("[]"), REPORT),
    lock("a report that is null", text("null"), REPORT),
    lock("a report without a summary", text("{}"), REPORT),
    lock("a summary that is a number", text('{"summary": 3}'), REPORT),
    lock("a summary of numbers", text('{"summary": [1, 2]}'), REPORT),
    lock("a report 3,000 deep", text("[" * DEEP), REPORT),
    lock("a report in UTF-16", lambda content: content.decode().encode("utf-16"), REPORT),
)
