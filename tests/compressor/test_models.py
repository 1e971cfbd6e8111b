"""References to models, and states that only load on the base they were tuned on."""

import json
import sys
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.cost import shape_of
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.models.anatomy import layers_of
from compressor.models.build import build, head_names, weightless_model
from compressor.models.files.damage import Damage
from compressor.models.files.model_folder import check_pretrained
from compressor.models.reference import resolve
from compressor.models.special_tokens import PROBES, padding_id, read_otherwise, stock_tokenizer, tokenizer_of
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import tiny
from tests.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def code_of(reference: str, relative_to) -> str:
    with pytest.raises(UserError) as caught:
        resolve(reference, relative_to)
    assert "\n" not in str(caught.value)
    return caught.value.code


def test_a_folder_is_relative_to_the_pipeline_file(folder):
    found = resolve(f"./{folder.name}", folder.parent)
    assert found.folder == folder.resolve() and len(found.sha256) == 64


def test_a_package_is_found_without_being_imported(tmp_path, folder, monkeypatch):
    package = tmp_path / "some_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model").symlink_to(folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("package:some_model_package/model").sha256 == resolve(str(folder)).sha256
    assert "some_model_package" not in sys.modules
    assert code_of("package:some_model_package/elsewhere", tmp_path) == "E303"
    assert code_of("package:no_such_package/model", tmp_path) == "E303"


def test_what_is_not_there_or_not_whole(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert code_of("./nowhere", tmp_path) == "E303"
    for missing in ("config.json", "model.safetensors", "tokenizer.json"):
        part = tmp_path / f"without-{missing}"
        part.mkdir()
        for file in folder.iterdir():
            if file.name != missing:
                (part / file.name).symlink_to(file)
        assert code_of(str(part), tmp_path) == "E304"


def test_pruned_and_foreign_models_are_refused(tmp_path, folder):
    for name, change, code in (
        ("pruned", {"per_layer_config": {"0": {"intermediate_size": 3}}}, "E304"),
        ("foreign", {"model_type": "gpt_neox"}, "E301"),
    ):
        part = tmp_path / name
        part.mkdir()
        for file in folder.iterdir():
            (part / file.name).write_bytes(file.read_bytes())
        config = json.loads((part / "config.json").read_text()) | change
        (part / "config.json").write_text(json.dumps(config))
        assert code_of(str(part), tmp_path) == code


def test_a_model_that_was_pruned_is_no_base(architecture, tmp_path):
    """A whole checkpoint as it is written, its tokenizer beside it; of a T5 the decoder alone may have lost units."""
    write_tokenizer(tmp_path, architecture)
    model = tiny(architecture, torch.float32)
    remove(model, {len(layers_of(model)) - 1: Removal(neurons=[0])})
    save_checkpoint(model, tmp_path / "pruned", tmp_path)
    with pytest.raises(UserError, match=r"E304 .*is pruned already"):
        resolve("./pruned", tmp_path)


def test_one_changed_byte_changes_the_fingerprint(tmp_path, folder):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert resolve(str(tmp_path)).sha256 != resolve(str(folder)).sha256


def test_a_state_loads_on_its_own_base_only(tmp_path, folder):
    base = resolve(str(folder))
    model = build(folder, ["a", "b"])
    apply(model, "lora", Options(modules=("query",), rank=2, alpha=4.0))
    save_state(model, tmp_path / "state", base=str(folder), base_sha256=base.sha256, label_names=["a", "b"])
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "state")(**inputs).logits, model(**inputs).logits)
    other = write_model(tmp_path / "other", "mpnet")
    with pytest.raises(UserError, match="E306"):
        load(tmp_path / "state", base=other)
    with pytest.raises(UserError, match="E305"):
        load(tmp_path)


def test_the_head_is_what_the_auto_class_added(folder):
    """The pooler is in the file, so it belongs to the base and stays frozen."""
    model = build(folder, ["a", "b", "c"])
    assert head_names(model) == {"classifier.weight", "classifier.bias"}
    assert shape_of(model) == shape_of(weightless_model(folder, ["a", "b", "c"]))
    again = build(folder, ["a", "b", "c"])
    assert torch.equal(model.classifier.weight, again.classifier.weight), "the head is drawn from the seed"


def test_a_pooler_that_the_file_lacks_is_of_the_head(tmp_path):
    """In the plan as in the run: a masked language model of BERT is stored without one."""
    folder = write_model(tmp_path, auto="AutoModelForMaskedLM")
    model, planned = build(folder, ["a", "b", "c"]), weightless_model(folder, ["a", "b", "c"])
    assert "bert.pooler.dense.weight" in head_names(model) == head_names(planned)
    assert shape_of(model) == shape_of(planned) and compression_of(model).head_origin == "fresh"


def test_weights_that_lack_a_layer_are_not_a_random_head(tmp_path, folder):
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    whole = {name: tensor for name, tensor in tensors.items() if ".layer.1." not in name}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"E304 .*lacks \d+ tensors of the base"):
        build(tmp_path, ["a", "b"])


def write_classifier(folder, architecture: str, labels: list[str], dtype=torch.float32):
    """A fine-tuned classifier's folder, and the bare base of the same weights in `folder`/base; returns the model."""
    model = tiny(architecture, dtype)
    model.config.id2label = dict(enumerate(labels))
    model.save_pretrained(folder)
    model.base_model.save_pretrained(folder / "base")
    return model


@pytest.mark.parametrize("labels", [["a", "b"], ["x", "y", "z"], ["b", "a", "c"]], ids=["fewer", "other", "another-order"])
def test_a_head_for_other_labels_is_not_taken_over(architecture, labels, tmp_path):
    """Whether its shapes fit or not: the same bits as on the bare base, whose head is drawn from the seed."""
    write_classifier(tmp_path, architecture, ["a", "b", "c"])
    model, bare = build(tmp_path, labels, 5), build(tmp_path / "base", labels, 5)
    assert (compression_of(model).head_origin, compression_of(bare).head_origin) == ("replaced", "fresh")
    assert head_names(model) == head_names(bare)
    assert all(torch.equal(tensor, bare.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_head_for_these_labels_is_kept(architecture, tmp_path):
    stored = write_classifier(tmp_path, architecture, ["a", "b", "c"])
    model = build(tmp_path, ["a", "b", "c"], 5)
    assert compression_of(model).head_origin == "kept" and head_names(model) == compression_of(stored).head_parameters
    assert all(torch.equal(tensor, stored.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_head_of_another_kind_of_task_is_not_taken_over(tmp_path):
    """A tagger's classifier has a sentence classifier's name and shape."""
    write_classifier(tmp_path, "bert", ["a", "b", "c"], torch.float16)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(tmp_path, ["a", "b", "c"])
    assert compression_of(model).head_origin == "replaced" and {tensor.dtype for tensor in model.parameters()} == {
        torch.float32
    }


def test_a_head_in_shards_is_found(tmp_path):
    tiny("bert", torch.float32).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert compression_of(build(tmp_path, ["a", "b"])).head_origin == "replaced"


def cased_bert() -> tuple[Tokenizer, dict[str, str]]:
    """As a cased BERT without tokenizer_config.json: transformers 5 makes lower case of all texts."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Good", "good", "film"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=frame)
    return tokenizer, {}


def deberta_of_transformers_4() -> tuple[Tokenizer, dict[str, str]]:
    """A Unigram with NFKC, which transformers 5 replaces by NFC, for its DebertaV2Tokenizer."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "\u2581", "\u2581good", "\u2581film"]
    tokenizer = Tokenizer(models.Unigram([(word, -float(index)) for index, word in enumerate(words)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    frame = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=frame)
    return tokenizer, {"tokenizer_class": "DebertaV2Tokenizer"}


def gpt2_of_digits() -> tuple[Tokenizer, dict[str, str]]:
    """Every digit is a token, which transformers 5's GPT2Tokenizer joins; it reads words without digits alike."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate([*bytes_, "19"])}, [("1", "9")]))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    return tokenizer, {"tokenizer_class": "GPT2Tokenizer"}


@pytest.mark.parametrize(
    ("model_type", "make", "text"),
    [
        ("bert", cased_bert, "Good film"),
        ("deberta-v2", deberta_of_transformers_4, "good \ufb01lm"),
        ("gpt2", gpt2_of_digits, "1984"),
    ],
)
def test_texts_are_read_as_the_file_that_is_served_says(model_type, make, text, tmp_path):
    folder = write_model(tmp_path / model_type, model_type)
    stored, config = make()
    stored.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, stock = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    assert ours(text)["input_ids"] == stored.encode(text).ids != stock(text)["input_ids"]
    assert read_otherwise(ours, stock) in PROBES
    assert (ours.pad_token_id, ours.sep_token_id) == (stored.token_to_id("[PAD]"), stored.token_to_id("[SEP]"))
    # the class's mask token is none of a BERT's file
    assert ours.mask_token_id == stored.token_to_id("[MASK]")


def test_a_tokenizer_that_is_read_alike_everywhere(tmp_path):
    folder = write_model(tmp_path)
    assert read_otherwise(tokenizer_of(folder), stock_tokenizer(folder)) is None


@pytest.mark.parametrize(
    ("model_type", "keys", "names", "types"),
    [
        ("bert", {}, None, [0, 0, 0, 1, 1]),  # as transformers 5's general class, which names no segments
        ("roberta", {"type_vocab_size": 1}, ["input_ids", "token_type_ids", "attention_mask"], None),  # with a BERT's class
        ("roberta", {"type_vocab_size": 2}, ["input_ids", "token_type_ids", "attention_mask"], [0, 0, 0, 1, 1]),
        ("gpt2", {}, ["input_ids", "token_type_ids", "attention_mask"], None),  # it would add a word's embedding to each token
        ("deberta-v2", {}, ["input_ids", "token_type_ids", "attention_mask"], [0, 0, 0, 1, 1]),  # it has no use for them
    ],
)
def test_pairs_have_the_segments_that_file_and_model_have(model_type, keys, names, types, tmp_path):
    folder = write_model(tmp_path, model_type, **keys)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_input_names": names}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    row = tokenizer_of(folder)("good", "bad")
    assert row.get("token_type_ids") == types and len(row["input_ids"]) == (2 if model_type == "gpt2" else 5)
    batch = {key: torch.tensor([values]) for key, values in row.items()}
    assert build(folder, ["a", "b"])(**batch).logits.shape == (1, 2)


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_positions_that_transformers_does_not_compute_are_refused(kind, tmp_path):
    """It would add absolute ones, and leave out the stored distances."""
    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for given, refused in (("absolute", False), (kind, True)):
        (folder / "config.json").write_text(json.dumps(config | {"position_embedding_type": given}))
        if refused:
            with pytest.raises(UserError, match=f"E304 .*position_embedding_type: '{kind}'"):
                resolve(str(folder))
        else:
            resolve(str(folder))


@pytest.mark.parametrize(
    ("model_type", "kind", "refused"),
    [
        ("camembert", "relative_key", True),
        ("albert", "relative_key_query", True),
        ("camembert", "absolute", False),
        ("esm", "rotary", False),
        ("esm", "relative_key", True),
    ],
)
def test_relative_positions_are_refused_of_types_without_a_row(model_type, kind, refused, tmp_path):
    """`compress export` and the rows of users take them."""
    folder = write_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "position_embedding_type": kind}))
    with pytest.raises(Damage, match="position_embedding_type") if refused else nullcontext():
        check_pretrained(folder, needs_row=False)


def test_a_t5_that_names_no_start_classifies(tmp_path):
    """Its decoder's inputs begin with padding then; a merged model's config.json says so."""
    folder = write_model(tmp_path / "base", "t5")
    named = build(folder, ["a", "b"])
    config = json.loads((folder / "config.json").read_text())
    del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    model, ids = build(folder, ["a", "b"]), torch.tensor([[5, 6, 3], [7, 8, 3]])
    assert model(ids).logits.shape == (2, 2) and torch.equal(model(ids).logits, named(ids).logits)
    save_checkpoint(model, tmp_path / "merged", folder)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["decoder_start_token_id"] == 0


def test_a_feed_forward_layer_is_computed_at_once(tmp_path):
    """In chunks of two, as its config.json says, a row of nine tokens would be refused, and a hook would see the last alone."""
    model = build(write_model(tmp_path, chunk_size_feed_forward=2), ["a", "b"])
    seen = []
    model.bert.encoder.layer[0].output.dense.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model(input_ids=torch.full((1, 9), 5))
    assert seen == [9] and model.config.chunk_size_feed_forward == 0
    save_checkpoint(model, tmp_path / "merged", tmp_path)
    config = tmp_path / "merged" / "config.json"  # that of an earlier version has the number of its base
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chunk_size_feed_forward": 2}))
    assert load(tmp_path / "merged")(input_ids=torch.full((1, 9), 5)).logits.shape == (1, 2)


def test_a_model_returns_named_logits_alone_however_it_was_saved(tmp_path):
    folder = write_model(tmp_path, return_dict=False, output_hidden_states=True)
    assert json.loads((folder / "config.json").read_text())["output_hidden_states"] is True
    ids = {"input_ids": torch.full((1, 3), 5)}
    assert list(build(folder, ["a", "b"])(**ids)) == ["logits"]


def test_a_head_that_is_pretrained_up_to_the_classes_is_kept(tmp_path):
    """A ModernBERT's, under the names of its masked language model."""
    folder = write_model(tmp_path, "modernbert", auto="AutoModelForMaskedLM")
    stored = load_file(folder / "model.safetensors")
    model = build(folder, ["a", "b"])
    assert compression_of(model).head_origin == "fresh" and "head.dense.weight" in head_names(model)
    assert torch.equal(model.head.dense.weight, stored["head.dense.weight"]) and "classifier.weight" not in stored


def test_a_whole_head_of_another_kind_is_drawn_anew(tmp_path):
    """A multiple choice's scores one number, as a regression's does."""
    folder = write_model(tmp_path, auto="AutoModelForMultipleChoice")
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    model = build(folder, ["value"])
    assert compression_of(model).head_origin == "replaced" and stored.shape == model.classifier.weight.shape
    assert not torch.equal(model.classifier.weight, stored)


def test_a_merged_model_has_the_chat_template_of_its_base(tmp_path):
    folder = write_model(tmp_path / "base", "gpt2")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_checkpoint(build(folder, ["a", "b"]), tmp_path / "merged", folder)
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_what_pads_is_said_in_one_place(tmp_path):
    """The config's own id, where the vocabulary has it; else the tokenizer's padding token; else its end of sentence."""
    write_model(tmp_path, "gpt2")
    config = AutoConfig.from_pretrained(tmp_path)
    assert padding_id(config, tmp_path) == weightless_model(tmp_path, ["a", "b"]).config.pad_token_id == 3
    config.pad_token_id = 7
    assert padding_id(config, tmp_path) == 7
    config.pad_token_id = -1
    tokens = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "pad_token": "[PAD]"}))
    assert padding_id(config, tmp_path) == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": None}))
    with pytest.raises(UserError, match="E304"):
        padding_id(config, tmp_path)
