"""Adapter folders that stock peft wrote, and that stock peft reads: equal logits both ways."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from compressor.compression import compression_of
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import chain, chains, merged_copy
from compressor.errors import UserError
from compressor.methods import apply
from compressor.models.anatomy import matrices_of
from compressor.models.build import GENERATES, SEQUENCES, TEXT2TEXT, TOKENS, build
from compressor.pruning.surgery import Removal, remove
from compressor.storage.peft.attach import attach_adapter
from compressor.storage.peft.read import CONFIG, WEIGHTS, read_adapter
from compressor.storage.peft.write import common_sparsity, support_size, write_peft
from tests.compressor.conftest import OPTIONS, TRIED, encoding, logits, tiny, tuned
from tests.tiny import write_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = ("query", "value", "ffn_out")


def refused(code: str, call, *arguments, **named) -> str:
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    assert error.value.code == code
    return str(error.value)


def from_peft(folder, architecture, **arguments):
    """What stock peft makes of a folder, on the base that was never touched by us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(tiny(architecture), folder, **arguments)


def moved_head(model):
    with torch.no_grad():
        for name in compression_of(model).head_parameters:
            model.get_parameter(name).add_(0.1)
    return model


# --- written by us, read by peft ---


@pytest.mark.parametrize("method", ["lora", "propetl"])
@pytest.mark.parametrize("architecture", TRIED)
def test_peft_reads_our_lora(method, architecture, tmp_path):
    """GPT-2's query and value lie in one fused weight: they become one LoRA of both ranks. Masked prototypes: what is seen."""
    model = moved_head(tiny(architecture))
    if method == "propetl":
        apply(model, method, replace(OPTIONS, modules=("query", "value"), shared="lora"))
        with torch.no_grad():
            for _, layer, name in chains(model):
                for link in chain(layer, name):
                    link.source.prototype.B.normal_()
    else:
        tuned(model, method, MODULES)
    assert write_peft(model, tmp_path, base="here") == "LORA"
    theirs = from_peft(tmp_path, architecture)
    assert (logits(theirs) - logits(tiny(architecture))).abs().max() > 1e-3
    assert torch.allclose(logits(theirs), logits(model), atol=1e-12)


@pytest.mark.parametrize("method", ["dsee", "selective"])
@pytest.mark.parametrize("architecture", ["bert", "llama", "t5", "modernbert"])
def test_peft_reads_our_sparse_deltas_as_super_tuning(method, architecture, tmp_path):
    """Supports of unequal size on matrices of unequal size: peft has one ratio for all, the rest is zeros."""
    model = moved_head(tuned(tiny(architecture), method, MODULES, places=7))
    first = matrices_of(model, MODULES)[0]
    sparse = chain(first.owner)[-1]
    first.owner.parametrizations.weight[-1] = type(sparse)(sparse.omega[:2], sparse.values.detach()[:2])
    assert write_peft(model, tmp_path, base="here") == "SUPERTUNING"
    theirs = from_peft(tmp_path, architecture)
    assert torch.allclose(logits(theirs), logits(model), atol=1e-12)
    again = tiny(architecture)
    attach_adapter(again, read_adapter(tmp_path))
    assert torch.allclose(logits(again), logits(model), atol=1e-12)
    if architecture in ("t5", "modernbert"):
        return  # peft's own merge stumbles over their heads
    merged = theirs.merge_and_unload()
    ours = dict(merged_copy(model).named_parameters())
    for name, parameter in merged.named_parameters():
        assert torch.allclose(parameter, ours[name], atol=1e-12)


def test_deltas_of_several_stages_become_one(tmp_path):
    """Other ranks and other scales in one model: rank patterns for LoRA, zero rows for Super-Tuning."""
    model = tuned(tiny("bert"), "lora", ("query", "value"))
    query, value = matrices_of(model, ("query", "value"))[:2]
    for matrix, alpha in ((query, 3.0), (query, 12.0)):
        link = LowRank.start(matrix.original, 3, alpha, "2")
        torch.nn.init.normal_(link.source.B)
        matrix.attach(link)
    assert write_peft(model, tmp_path / "lora", base="here") == "LORA"
    assert json.loads((tmp_path / "lora" / CONFIG).read_text())["r"] == 8
    assert torch.allclose(logits(from_peft(tmp_path / "lora", "bert")), logits(model), atol=1e-12)
    again = tiny("bert")
    attach_adapter(again, read_adapter(tmp_path / "lora"))
    assert torch.allclose(logits(again), logits(model), atol=1e-12)
    value.attach(Sparse(torch.tensor([0, 9]), torch.tensor([1.0, -2.0], dtype=torch.float64)))
    assert write_peft(model, tmp_path / "super", base="here") == "SUPERTUNING"
    assert torch.allclose(logits(from_peft(tmp_path / "super", "bert")), logits(model), atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(400, 10_000_000)), min_size=1, max_size=20))
def test_one_ratio_has_room_for_every_support(counts):
    sparsity = common_sparsity(counts)
    assert 0 <= sparsity < 1
    assert all(max(places, 1) <= support_size(size, sparsity) <= size for places, size in counts)
    least = max(max(places, 1) / size for places, size in counts)
    assert all(support_size(size, sparsity) <= size * least + 1 for _, size in counts)


def test_without_a_head_peft_keeps_the_base_s(tmp_path):
    model = moved_head(tuned(tiny("bert"), "lora", MODULES))
    write_peft(model, tmp_path, base="here", head=False)
    assert not any("classifier" in name for name in load_file(tmp_path / WEIGHTS))
    plain = tuned(tiny("bert"), "lora", MODULES)
    assert torch.allclose(logits(from_peft(tmp_path, "bert")), logits(plain), atol=1e-12)


def test_what_peft_has_no_form_for(tmp_path):
    for method in ("adapter", "prefix", "propetl", "bitfit", "full"):
        refused("E314", write_peft, tuned(tiny("bert"), method), tmp_path, base="here")
    assert "Conv1D" in refused("E314", write_peft, tuned(tiny("gpt2"), "dsee"), tmp_path, base="here")
    pruned = tuned(tiny("bert"), "lora")
    remove(pruned, {0: Removal(heads=[1])})
    assert "pruned" in refused("E314", write_peft, pruned, tmp_path, base="here")
    assert "nothing" in refused("E314", write_peft, tiny("bert"), tmp_path, base="here")
    refused("E314", common_sparsity, [(5, 4)])
    assert list(tmp_path.iterdir()) == []


# --- written by peft, read by us ---


def their_lora(folder, architecture, **options):
    """A LoRA of stock peft with every weight moved; gives its logits."""
    targets = {"bert": ["query", "value", "output.dense"], "gpt2": ["c_attn", "mlp.c_proj"], "llama": ["q_proj", "down_proj"]}
    config = peft.LoraConfig(r=4, target_modules=targets[architecture], task_type="SEQ_CLS", **options)
    model = peft.get_peft_model(tiny(architecture), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "options",
    [
        {"lora_alpha": 3},
        {"lora_alpha": 6, "use_rslora": True, "lora_dropout": 0.1},
        {"lora_alpha": 5, "rank_pattern": {"1.*": 2, "query": 3, "c_attn": 7}, "alpha_pattern": {"value|q_proj|mlp.c_proj": 9}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_we_read_the_lora_of_peft(architecture, options, tmp_path):
    expected = their_lora(tmp_path, architecture, **options)
    model, adapter = tiny(architecture), read_adapter(tmp_path)
    assert adapter.classes == 3
    attach_adapter(model, adapter)
    assert torch.allclose(logits(model), expected, atol=1e-12)
    narrow = tiny(architecture, torch.float32)
    attach_adapter(narrow, adapter)
    assert torch.allclose(logits(narrow), expected.float(), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"r": 4}, {"r": 3, "lora_alpha": 7.5, "select_top": False}], ids=str)
def test_we_read_the_super_tuning_of_peft(options, tmp_path):
    config = peft.SupertuningConfig(
        target_modules=["query", "output.dense"], task_type="SEQ_CLS", sparsity=0.9, init_weights=False, **options
    )
    trained = peft.get_peft_model(tiny("bert"), config)
    with torch.no_grad():
        for name, tensor in trained.named_buffers():
            if "supertuning_indices" in name:  # a place that stands there twice
                tensor[1] = tensor[0]
    trained.save_pretrained(tmp_path)
    model, adapter = tiny("bert"), read_adapter(tmp_path)
    attach_adapter(model, adapter)
    assert (logits(model) - logits(tiny("bert"))).abs().max() > 1e-3
    assert torch.allclose(logits(model), logits(trained.eval()), atol=1e-12)
    sparse = [link for _, layer, name in chains(model) for link in chain(layer, name) if isinstance(link, Sparse)]
    assert all((link.omega.diff() > 0).all() for link in sparse)


def test_super_tuning_that_cannot_be_read_as_it_is(tmp_path):
    assert write_peft(tuned(tiny("bert"), "dsee", MODULES), tmp_path, base="here") == "SUPERTUNING"
    tensors = load_file(tmp_path / WEIGHTS)
    some = next(name for name in tensors if name.endswith("_indices"))
    for spoilt, told in ((None, "save_precomputed_indices"), (tensors[some] + 10**6, "sizes"), (tensors[some][1:], "sizes")):
        save_file({name: t for name, t in {**tensors, some: spoilt}.items() if t is not None}, tmp_path / WEIGHTS)
        bare = tiny("bert")
        assert told in refused("E313", attach_adapter, bare, read_adapter(tmp_path))
        assert not any(chains(bare))
    save_file(tensors, tmp_path / WEIGHTS)
    assert "sizes" in refused("E313", attach_adapter, tiny("bert", hidden_size=64), read_adapter(tmp_path))
    save_file({**tensors, "base_model.model.x.lora_A.weight": torch.ones(1)}, tmp_path / WEIGHTS)
    assert "x.lora_A" in refused("E313", read_adapter, tmp_path)


def test_a_lora_trained_without_a_task_head(tmp_path):
    base = tiny("bert").bert
    trained = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights="gaussian"))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trained.save_pretrained(tmp_path)
    model, adapter = tiny("bert"), read_adapter(tmp_path)
    assert adapter.classes is None
    attach_adapter(model, adapter)
    with torch.no_grad():
        ours, theirs = model.bert(**encoding()).last_hidden_state, trained.eval()(**encoding()).last_hidden_state
    assert torch.allclose(ours, theirs, atol=1e-12)


def adapted(folder, architecture: str, auto: type, task_type: str | None = None):
    """The folder of stock peft's LoRA on a tiny model of an Auto class."""
    target = {"gpt2": "c_attn", "t5": "q", "bert": "query"}[architecture]
    config = peft.LoraConfig(r=2, target_modules=[target], task_type=task_type)
    peft.get_peft_model(tiny(architecture, auto=auto), config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("architecture", "auto", "task_type", "auto_class"),
    [
        ("bert", AutoModelForSequenceClassification, None, SEQUENCES),
        ("bert", AutoModelForTokenClassification, None, TOKENS),
        ("gpt2", AutoModelForCausalLM, None, GENERATES),
        ("t5", AutoModelForSeq2SeqLM, None, TEXT2TEXT),
        ("gpt2", AutoModel, None, SEQUENCES),
        ("bert", AutoModel, "FEATURE_EXTRACTION", SEQUENCES),
        ("t5", AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM", TEXT2TEXT),
    ],
)
def test_the_class_of_the_model_is_read(architecture, auto, task_type, auto_class, tmp_path):
    """peft records the task type, or without one the name of the class."""
    assert read_adapter(adapted(tmp_path, architecture, auto, task_type)).auto_class == auto_class


@pytest.mark.parametrize(
    ("auto", "task_type", "told"),
    [
        (AutoModelForMaskedLM, None, "BertForMaskedLM"),
        (AutoModelForQuestionAnswering, None, "BertForQuestionAnswering"),
        (AutoModelForQuestionAnswering, "QUESTION_ANS", "QUESTION_ANS"),
    ],
)
def test_a_model_of_another_task_is_refused(auto, task_type, told, tmp_path):
    assert f"another task ({told})" in refused("E313", read_adapter, adapted(tmp_path, "bert", auto, task_type))


@pytest.mark.parametrize("name", ["BertOfMine", "pipeline", "BertConfig"])
def test_what_is_no_model_class_is_refused(name, tmp_path):
    config = json.loads((adapted(tmp_path, "bert", AutoModel) / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"auto_mapping": {"base_model_class": name}}))
    assert f"another task ({name})" in refused("E313", read_adapter, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"trainable_token_indices": [1]},
        {"lora_bias": True},
    ],
    ids=str,
)
def test_other_kinds_of_lora_are_refused(options, tmp_path):
    their_lora(tmp_path, "bert", **options)
    assert next(iter(options)) in refused("E313", read_adapter, tmp_path)


def test_an_adapter_on_a_tied_weight_is_refused(tmp_path):
    """peft adds to the outputs of `lm_head` alone; a delta here is of its weight, and so of the embeddings."""

    def decoder(tied: bool):
        model = tiny("llama", auto=AutoModelForCausalLM, tie_word_embeddings=tied)
        compression_of(model).head_parameters = frozenset()  # as a model has that is built from a folder
        return model

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    peft.get_peft_model(decoder(True), config).save_pretrained(tmp_path, save_embedding_layers=False)
    tied, untied, adapter = decoder(True), decoder(False), read_adapter(tmp_path)
    assert "the weight of lm_head in another layer" in refused("E313", attach_adapter, tied, adapter)
    assert not any(chains(tied))
    attach_adapter(untied, adapter)
    assert "lm_head" in {path for path, _, _ in chains(untied)}


def on_folder(folder, architecture: str, auto: str, task_type: str, classes: int):
    """A base in a folder, and stock peft's LoRA on it, saved with what it saves by itself of the task head; without a task type
    of a DistilBERT's the layer before the classes."""
    base = write_model(folder / "base", architecture, auto=auto, vocab_size=99)
    made = AutoModelForTokenClassification if task_type == "TOKEN_CLS" else AutoModelForSequenceClassification
    theirs = made.from_pretrained(base, num_labels=classes, ignore_mismatched_sizes=True)
    target = {"modernbert": "Wqkv", "deberta-v2": "query_proj", "distilbert": "q_lin"}[architecture]
    saved = None if task_type else ["pre_classifier"]
    config = peft.LoraConfig(r=2, target_modules=[target], task_type=task_type, modules_to_save=saved, init_lora_weights=False)
    adapted = peft.get_peft_model(theirs, config)
    adapted.save_pretrained(folder / "adapter")
    return base, adapted


@pytest.mark.parametrize(
    ("architecture", "auto", "task_type", "labels"),
    [
        ("modernbert", "AutoModelForMaskedLM", "SEQ_CLS", ["a", "b", "c"]),
        ("modernbert", "AutoModelForMaskedLM", "TOKEN_CLS", ["a", "b", "c"]),
        ("deberta-v2", "AutoModelForSequenceClassification", "SEQ_CLS", ["LABEL_0", "LABEL_1"]),
        ("deberta-v2", "AutoModelForSequenceClassification", "SEQ_CLS", ["a", "b", "c"]),
        ("distilbert", "AutoModelForSequenceClassification", None, ["LABEL_0", "LABEL_1"]),
    ],
    ids=["masked words", "masked words, tokens", "classifier", "classifier of other labels", "all but the classes"],
)
def test_what_an_adapter_leaves_of_the_task_head_is_the_base_s(architecture, auto, task_type, labels, tmp_path):
    base, theirs = on_folder(tmp_path, architecture, auto, task_type, len(labels))
    adapter = read_adapter(tmp_path / "adapter")
    model = build(base, labels, auto_class=adapter.auto_class)
    assert adapter.head and adapter.head.keys() < compression_of(model).head_parameters
    assert adapter.classes == (len(labels) if task_type else None)
    attach_adapter(model, adapter, base=base)
    assert torch.allclose(logits(model), logits(theirs), atol=1e-5)


def test_a_part_of_the_task_head_that_nobody_stored_is_refused(tmp_path):
    """peft trains a DeBERTa's pooler only where it is told to; over masked words there is none in the base, either."""
    base, _ = on_folder(tmp_path, "deberta-v2", "AutoModelForMaskedLM", "SEQ_CLS", 2)
    adapter, model = read_adapter(tmp_path / "adapter"), build(base, ["a", "b"])
    says = f"E313 {tmp_path / 'adapter'}: parts of the task head are neither in it nor in the base's files: pooler.dense. "
    assert says in refused("E313", attach_adapter, model, adapter, base=base)
    assert says in refused("E313", attach_adapter, model, adapter) and not any(chains(model))


@pytest.mark.parametrize(
    ("architecture", "auto", "task_type", "saved", "told"),
    [
        ("llama", AutoModelForCausalLM, "CAUSAL_LM", ["embed_tokens", "lm_head"], "lm_head.weight, model.embed_tokens.weight"),
        ("bert", AutoModelForSequenceClassification, "SEQ_CLS", ["pooler"], "bert.pooler.dense.bias, bert.pooler.dense.weight"),
    ],
    ids=["vocabulary", "pooler"],
)
def test_whole_weights_of_the_base_are_refused(architecture, auto, task_type, saved, told, tmp_path):
    """Nothing is wrong with the base, as a line on another task head would have it."""
    model, target = tiny(architecture, auto=auto), {"llama": "q_proj", "bert": "query"}[architecture]
    config = peft.LoraConfig(r=2, target_modules=[target], task_type=task_type, modules_to_save=saved)
    peft.get_peft_model(tiny(architecture, auto=auto), config).save_pretrained(tmp_path)
    compression_of(model).head_parameters = None  # a vocabulary's is none of the task
    line = refused("E313", attach_adapter, model, read_adapter(tmp_path))
    assert f"{tmp_path}: it holds whole weights that are no part of the task head: {told}. Merge it with peft" in line
    assert not any(chains(model))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([1], "its keys"),
        ({"r": None}, "a LORA has r"),
        ({"r": 0}, "a LORA has r"),
        ({"r": "2"}, "r: "),
        ({"lora_alpha": "x"}, "lora_alpha: "),
        ({"lora_alpha": float("nan")}, "lora_alpha: "),
        ({"rank_pattern": {"(": 2}}, "no regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern: "),
        ({"peft_type": ["LORA"]}, "peft_type: "),
        ({"task_type": ["SEQ_CLS"]}, "task_type: "),
        ({"auto_mapping": {"base_model_class": 1}}, "auto_mapping.base_model_class: "),
        ({"auto_mapping": "BertModel"}, "auto_mapping: "),
    ],
    ids=str,
)
def test_a_config_that_no_peft_writes_is_refused(change, says, tmp_path):
    write_peft(tuned(tiny("bert", torch.float32), "lora"), tmp_path, base="b")
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(change if isinstance(change, list) else config | change))
    assert says in refused("E313", read_adapter, tmp_path)


def test_tensors_that_are_not_finite_are_refused(tmp_path):
    model = tuned(tiny("bert", torch.float32), "lora")
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if name.endswith(".B"))[0, 0] = float("nan")
    write_peft(model, tmp_path, base="b")
    assert "NaN or infinite" in refused("E313", read_adapter, tmp_path)


def test_adapters_that_do_not_fit_or_are_damaged(tmp_path):
    refused("E313", read_adapter, tmp_path)
    their_lora(tmp_path, "bert")
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "init_lora_weights": "pissa"}))  # it changes the base's weights
    assert "pissa" in refused("E313", read_adapter, tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    adapter, model = read_adapter(tmp_path), tiny("gpt2")
    refused("E313", attach_adapter, model, adapter)
    assert not any(chains(model))
    of_two = refused("E313", attach_adapter, tiny("bert", num_labels=2), adapter)
    assert f"{tmp_path}: classifier.bias is (3,), the model wants (2,)" in of_two
    tensors = load_file(tmp_path / WEIGHTS)
    some = next(name for name in tensors if "lora_B" in name)
    for tensor in (tensors[some][:-1].contiguous(), None):
        save_file({name: t for name, t in {**tensors, some: tensor}.items() if t is not None}, tmp_path / WEIGHTS)
        bare = tiny("bert")
        refused("E313", attach_adapter, bare, read_adapter(tmp_path))
        assert not any(chains(bare))
    save_file({**tensors, "base_model.model.x.lora_embedding_A": torch.ones(1)}, tmp_path / WEIGHTS)
    assert "lora_embedding_A" in refused("E313", read_adapter, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"no tensors")
    refused("E313", read_adapter, tmp_path)
    (tmp_path / CONFIG).write_text('{"peft_type": "ADALORA"}')
    save_file(tensors, tmp_path / WEIGHTS)
    assert "ADALORA" in refused("E313", read_adapter, tmp_path)
