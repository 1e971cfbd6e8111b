"""`compress export`: any classifier's folder, proven without a task; nothing half done is left."""

import copy
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

import export.standalone.folder
from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.errors import CheckError, UserError
from compressor.models.anatomy import layers_of
from compressor.models.build import build
from compressor.models.reference import reference_to, resolve
from compressor.models.special_tokens import tokenizer_of
from compressor.new_folder import SCRATCH
from compressor.processor import weight_bits
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.features import pad, torch_forward
from export.runtimes.onnxruntime import RUNTIME
from export.runtimes.sessions import run, session
from export.runtimes.tensorrt import profile_of
from export.standalone.folder import export_folder, prove, replacing, require_free, write_summary
from export.standalone.source_model import find_model, random_rows
from pipelines.cli.commands import main
from tests.compressor.conftest import tiny
from tests.export.conftest import notes, with_weights_of
from tests.tiny import WORDS, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> folder: a stock classifier, a pruned checkpoint of it, and an architecture without a row in the anatomy."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = write_model(root / "base")

    def put(name, model):
        save_checkpoint(model, root / name, tokenizer)

    model = tiny("bert", torch.float32)
    put("stock", model)
    remove(model, {0: Removal([1], [0, 5]), 1: Removal(neurons=list(range(12)))})
    put("pruned", model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 99}
    other = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("ernie", **sizes)).eval()
    other.save_pretrained(root / "other")
    for path in tokenizer.glob("token*"):
        (root / "other" / path.name).write_bytes(path.read_bytes())
    return root


@pytest.mark.slow
def test_a_stock_folder_from_the_command_line(folders, tmp_path):
    out = tmp_path / "deep" / "onnx"
    done = CliRunner().invoke(main, ["export", str(folders / "stock"), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "export.json").read_text())
    assert {path.name for path in out.iterdir()} >= {"model.onnx", "model_int8.onnx", "tokenizer.json", "config.json"}
    assert summary["opset"] == 20 and summary["files"]["fp32"]["inputs"]["input_ids"] == ["batch", "sequence"]
    assert summary["files"]["int8"]["bytes"] == (out / "model_int8.onnx").stat().st_size
    assert [row["passed"] for row in summary["parity"]] == [True, True]
    assert ["VNNI" in note for note in summary["notes"]] == [True] * (weight_bits() < 8)
    told = {"task": "sequence classification", "source": "stock", "source_sha256": reference_to(str(folders / "stock")).sha256}
    assert all(told.items() <= notes(out / name).items() for name in ("model.onnx", "model_int8.onnx"))
    again = CliRunner().invoke(main, ["export", str(folders / "stock"), "--out", str(out)])
    assert again.exit_code == 2 and "E620" in again.stderr and "--force" in again.stderr


@pytest.mark.slow
def test_a_state_has_a_config_of_its_own(folders, tmp_path):
    """Beside the exported files, for programs that read labels and sizes there: not that of the base."""
    base, names = resolve(str(folders / "base")), ["bad", "fair", "good"]
    model = build(base.folder, names)
    remove(model, {0: Removal([1], [0, 5])})
    save_state(model, tmp_path / "state", base=str(base.folder), base_sha256=base.sha256, label_names=names)
    export_folder(str(tmp_path / "state"), tmp_path / "onnx", precisions=["fp32"])
    config = json.loads((tmp_path / "onnx/config.json").read_text())
    assert list(config["id2label"].values()) == names and config["architectures"] == ["CompressedBertForSequenceClassification"]
    assert (tmp_path / "onnx/tokenizer.json").is_file()


@pytest.mark.slow
def test_a_pruned_checkpoint_and_force(folders, tmp_path):
    """Unequal layers; a second export takes the place of the first only when asked, and of nothing that is no export."""
    out = tmp_path / "onnx"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="E620"):
        export_folder(str(folders / "pruned"), out, precisions=["fp32"], force=True)
    assert (out / "mine.txt").read_text() == "keep"
    (out / "export.json").write_text('{"written": ["model_int8.onnx"]}')
    (out / "model_int8.onnx").touch()
    with pytest.raises(UserError, match=r"E620 .*holds 'mine.txt', which no export wrote: it is not replaced"):
        export_folder(str(folders / "pruned"), out, precisions=["fp32"], force=True)
    (out / "mine.txt").rename(tmp_path / "mine.txt")
    export_folder(str(folders / "pruned"), out, precisions=["fp32"], fuse=False, force=True, limit=1000)
    (out / "model.plan").touch()  # of the engine's script
    require_free(out, force=True)
    assert not (out / "model_int8.onnx").exists()
    assert (out / "model.onnx.data").stat().st_size > (out / "model.onnx").stat().st_size, "weights beside the graph"
    rows = {"input_ids": np.array([[2, 4, 3], [2, 5, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    rows["token_type_ids"] = np.zeros_like(rows["input_ids"])
    expected = torch_forward(load(folders / "pruned"))(rows)
    assert abs(run(session(out / "model.onnx"), rows) - expected).max() < 1e-5
    assert RUNTIME.values(out / "model.onnx", rows)


@pytest.mark.slow
def test_a_classifier_of_tokens(tmp_path):
    """Cut; every token of rows of many lengths, alone and in mixed batches."""
    tokenizer = write_model(tmp_path / "base")
    model = tiny("bert", torch.float32, auto=AutoModelForTokenClassification)
    remove(model, {0: Removal([1], [0, 5]), 1: Removal(whole=True)})
    save_checkpoint(model, tmp_path / "model", tokenizer)
    summary = export_folder(str(tmp_path / "model"), tmp_path / "onnx", precisions=["fp32", "int8"])
    assert summary["kind"] == "token classification" and len(summary["labels"]) == 3
    assert summary["files"]["fp32"]["outputs"] == {"logits": ["batch", "sequence", 3]}
    assert [row["passed"] for row in summary["parity"]] == [True, True] and summary["parity"][0]["rows"] > 128
    rows = {"input_ids": np.array([[2, 4, 3], [2, 5, 0]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    rows["token_type_ids"] = np.zeros_like(rows["input_ids"])
    expected = torch_forward(load(tmp_path / "model"))(rows)
    assert abs(run(session(tmp_path / "onnx" / "model.onnx"), rows) - expected)[rows["attention_mask"] == 1].max() < 1e-5


@pytest.mark.slow
def test_an_architecture_without_a_row_is_tried(folders, tmp_path):
    summary = export_folder(str(folders / "other"), tmp_path / "onnx", precisions=["fp32"])
    unsupported, compared = summary["notes"]
    assert unsupported == "'ernie' is not a supported architecture: it can be exported, not pruned"
    assert compared == "rows of up to 128 tokens were compared: longer ones may be computed otherwise in the files"


def test_what_is_refused(folders, tmp_path):
    """A base without a head would get a random one; a broken graph leaves nothing behind."""
    refused = partial(export_folder, out=tmp_path / "onnx", precisions=["fp32"])
    with pytest.raises(UserError, match=r"E621 .*classifier"):
        refused(str(folders / "base"))
    with pytest.raises(UserError, match="E303"):
        refused(str(folders / "nothing"))
    wrong = CliRunner().invoke(main, ["export", "x", "--out", str(tmp_path / "onnx"), "--precision", "int3"])
    assert wrong.exit_code == 2 and "E109" in wrong.stderr
    unused = CliRunner().invoke(main, ["export", "x", "--out", str(tmp_path / "onnx"), "--length", "64"])
    assert unused.exit_code == 2 and "E624 --length is not used" in unused.stderr
    with pytest.raises(UserError, match=r"E624 .*the model takes 64 tokens, fewer than 128"):
        refused(str(folders / "stock"), engine=profile_of([1], [128]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["stock", "pruned"])
def test_a_link_out_of_the_folder_is_not_copied(folders, tmp_path, name):
    """Nor from a checkpoint of this project."""
    shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / name / "vocab.txt").symlink_to(folders / "base" / "tokenizer.json")
    with pytest.raises(UserError, match=r"E304 .*has a vocab.txt that is a link out of it"):
        export_folder(str(tmp_path / name), tmp_path / "onnx", precisions=["fp32"])
    assert not (tmp_path / "onnx").exists()


def test_a_model_that_cannot_be_traced(folders, tmp_path):
    """I-BERT quantizes with NumPy inside its forward pass, which no exporter follows."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 99}
    config = AutoConfig.for_model("ibert", quant_mode=True, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "ibert")
    for path in (folders / "base").glob("token*"):
        (tmp_path / "ibert" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"E622 .*ibert: this model cannot be traced \(RuntimeError: "):
        export_folder(str(tmp_path / "ibert"), tmp_path / "onnx", precisions=["fp32"])
    assert not (tmp_path / "onnx").exists()


def test_a_model_whose_tensors_are_joined_as_it_is_loaded(folders, tmp_path):
    """transformers stores experts one by one: such a folder is complete."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 99}
    config = AutoConfig.for_model("mixtral", num_key_value_heads=2, num_local_experts=4, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "mixtral")
    for path in (folders / "base").glob("token*"):
        (tmp_path / "mixtral" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"E304 .*mixtral' has tensors of other names .*architecture is not supported"):
        find_model(str(tmp_path / "mixtral"))


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_model_of_a_class_that_renames_is_called_damaged(folders, tmp_path, cut):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 99}
    config, place = AutoConfig.for_model("esm", pad_token_id=1, mask_token_id=3, **sizes), tmp_path / "esm"
    AutoModelForSequenceClassification.from_config(config).save_pretrained(place)
    for path in (folders / "base").glob("token*"):
        (place / path.name).write_bytes(path.read_bytes())
    assert find_model(str(place)).kind == "sequence classification"
    if cut:
        tensors = load_file(place / "model.safetensors")
        del tensors["esm.encoder.layer.0.attention.self.query.weight"]
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    else:
        described = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(described | {"intermediate_size": 48}))
    told = "lacks 1 tensors" if cut else r"of shape \[24, 32\], by its config\.json"
    with pytest.raises(UserError, match=rf"E304 .* {told}"):
        find_model(str(place))


UNLISTED = (
    "export.json, as that of an earlier version, does not list the files of the export.*Delete the folder if it holds nothing"
)
FOREIGN = r"holds '\.gitignore', which no export wrote"


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        ("{}", UNLISTED),
        ("[", FOREIGN),
        ('{"written": 1}', FOREIGN),
        ('{"written": ["model.onnx", []]}', FOREIGN),
        ("1", FOREIGN),
    ],
)
def test_force_replaces_no_file_that_no_export_wrote(tmp_path, summary, told):
    """Nothing is lost, whatever stands in the summary."""
    (tmp_path / "export.json").write_text(summary)
    (tmp_path / ".gitignore").write_text("mine")
    with pytest.raises(UserError, match=f"E620 .*{told}"):
        require_free(tmp_path, force=True)


@pytest.mark.parametrize("place", [".", "link", "folder", "new"])
def test_the_folder_may_be_the_current_one_or_a_link(tmp_path, monkeypatch, place):
    """A folder that is there is filled, and not replaced: that would fail for these, and for a mount, once all is exported."""
    for name in ("here", "elsewhere", "here/folder"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if place == "link":
        (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    if place == ".":
        (tmp_path / "here" / "folder").rmdir()
    for content, force in (("first", False), ("second", True)):
        with replacing(Path(place), force) as folder:
            (folder / content).write_text(content)
            write_summary(folder, {})
        assert sorted(path.name for path in Path(place).iterdir()) == ["export.json", content]
    with pytest.raises(ValueError, match="half"), replacing(Path(place), True) as folder:
        (folder / "third").write_text("half")
        raise ValueError("half")
    assert sorted(path.name for path in Path(place).iterdir()) == ["export.json", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "here"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_what_another_program_wrote_meanwhile_is_not_replaced(tmp_path, there, force):
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with pytest.raises(UserError, match=r"E620 "), replacing(out, force) as folder:
        (folder / "model.onnx").touch()
        out.mkdir(exist_ok=True)
        (out / "other").touch()
    assert [path.name for path in out.iterdir()] == ["other"] and [*tmp_path.iterdir()] == [out]


def test_force_replaces_no_folder_with_folders_in_it(tmp_path, monkeypatch):
    """An export has none: it was written into a project, which --out . --force would delete."""
    (tmp_path / "src").mkdir()
    (tmp_path / "export.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"E620 \.: the folder holds the folder 'src', as no export does: it is not replaced"):
        require_free(Path("."), force=True)
    # what a killed export leaves is in nobody's way
    (tmp_path / "src").rename(tmp_path / f"{SCRATCH}0")
    with replacing(Path("."), force=True) as folder:
        (folder / "export.json").write_text("[]")
    assert [path.name for path in tmp_path.iterdir()] == ["export.json"] and (tmp_path / "export.json").read_text() == "[]"


def test_a_wrong_graph_is_not_published(folders, tmp_path, exported, monkeypatch):
    import export.graph.rewrite

    made, graph = exported("bert-dense"), onnx.ModelProto()
    graph.CopyFrom(made.graph)
    monkeypatch.setattr(export.standalone.folder, "trace", lambda *_: graph)
    save_checkpoint(made.model, tmp_path / "stock", folders / "base")

    def spoiled(proto, **_):
        tensor = next(one for one in proto.graph.initializer if one.name == "classifier.weight")
        tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) * 2).tobytes()
        return proto

    monkeypatch.setattr(export.graph.rewrite, "for_cpu", spoiled)
    with pytest.raises(
        CheckError, match=r"E610 PyTorch -> model.onnx.*suspected: the pooler or the task head.*precision out, or add --no-fuse"
    ):
        export_folder(str(tmp_path / "stock"), tmp_path / "onnx", precisions=["fp32"], limit=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_a_file_that_overflows_fp16_is_not_published(folders, tmp_path, exported, monkeypatch):
    """FFNs whose states are some 50,000, and return to a usual size: each weight is well within the range of fp16."""
    made = exported("bert-dense")
    model = copy.deepcopy(made.model)
    with torch.no_grad():
        for layer in layers_of(model):
            layer.linear("ffn_in").weight.sign_().mul_(9e3)
            layer.linear("ffn_out").weight /= 5e4
    monkeypatch.setattr(export.standalone.folder, "trace", lambda *_: with_weights_of(model, made.graph))
    save_checkpoint(model, tmp_path / "stock", folders / "base")
    with pytest.raises(CheckError, match=r"E610 PyTorch -> model_fp16.onnx.*suspected: block 0"):
        export_folder(str(tmp_path / "stock"), tmp_path / "onnx", precisions=["fp32", "fp16"])
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


@pytest.mark.slow
def test_independent_labels_are_not_taken_for_one_softmax(folders, tmp_path, monkeypatch):
    """Logits that are all as much higher give the same classes of a softmax, and other probabilities of labels."""
    export_folder(str(folders / "stock"), tmp_path / "onnx", precisions=["int8"])
    loaded, path = find_model(str(folders / "stock")), tmp_path / "onnx" / "model_int8.onnx"
    monkeypatch.setattr(export.standalone.folder, "run", lambda *given: run(*given) + 3)
    assert prove(loaded, "int8", path).passed
    loaded.model.config.problem_type = "multi_label_classification"
    with pytest.raises(CheckError, match=r"E610 PyTorch -> model_int8.onnx.*decisions agree"):
        prove(loaded, "int8", path)


def test_it_is_compared_on_the_cpu(folders, monkeypatch):
    """As the file is: a GPU adds in another order."""
    loaded = find_model(str(folders / "stock"))
    like = torch_forward(loaded.model, accelerate=False)
    monkeypatch.setattr("compressor.tasks.features.accelerated", lambda _: pytest.fail("the model is moved"))
    monkeypatch.setattr(export.standalone.folder, "parity_session", lambda *_: None)
    monkeypatch.setattr(export.standalone.folder, "run", lambda _, encoding: like(encoding))
    assert prove(loaded, "int8", Path("model_int8.onnx")).passed


@pytest.mark.parametrize(("own", "end", "expected"), [(1, None, 1), (None, "[SEP]", WORDS.index("[SEP]")), (None, None, None)])
def test_rows_are_padded_with_a_token_of_the_model(folders, tmp_path, own, end, expected):
    """config.json comes first, as in a pipeline; a padding token that tokenizer_config.json adds has no embedding."""
    shutil.copytree(folders / "stock", tmp_path / "model")
    tokenizer = tokenizer_of(tmp_path / "model")
    tokenizer.add_tokens([f"new{number}" for number in range(99 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path / "model")
    for name, keys in (("config", {"pad_token_id": own}), ("tokenizer_config", {"pad_token": "[LATE]", "eos_token": end})):
        path = tmp_path / "model" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    # no text can have it: tokenizer.json, by which texts are read, is without
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token_id == 99
    assert tokenizer_of(tmp_path / "model").pad_token_id is None
    if expected is None:
        with pytest.raises(UserError, match=r"E304 .*neither config.json nor the tokenizer has a padding token"):
            find_model(str(tmp_path / "model"))
    else:
        loaded = find_model(str(tmp_path / "model"))
        assert loaded.pad_id == loaded.model.config.pad_token_id == expected
        torch_forward(loaded.model)(pad([loaded.rows[0], loaded.rows[-1]], loaded.pad_id))


@pytest.mark.parametrize(
    ("architecture", "padding", "most"),
    [("roberta", 0, 127), ("roberta", 1, 126), ("data2vec-text", 3, 124), ("qwen2", 200, 126)],
)
def test_rows_fit_into_positions_that_begin_behind_the_padding(folders, architecture, padding, most):
    """128 of them, as many as the longest row would have tokens. Of a decoder the padding is any token."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300}
    config = AutoConfig.for_model(architecture, max_position_embeddings=128, pad_token_id=padding, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    rows = random_rows(model, tokenizer_of(folders / "stock"))
    assert max(len(row["input_ids"]) for row in rows) == most
    torch_forward(model)({name: np.array([rows[-1][name]]) for name in rows[-1]})
