"""Text to text: what encoder and decoder read, the loss, changes of both, pruned models on disk, and what they generate.

Only tiny random T5s are tried: no pretrained one is at hand.
"""

import json

import numpy as np
import pytest
import torch
from peft.utils import CONFIG_NAME
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.cost import shape_of
from compressor.deltas.links import merged_copy
from compressor.deltas.sources import Masked
from compressor.errors import UserError, UserErrors
from compressor.methods import Options, apply
from compressor.models.anatomy import layers_of
from compressor.models.build import GENERATES, TEXT2TEXT, build, config_of, head_names, weightless_model
from compressor.models.reference import resolve
from compressor.models.special_tokens import start_id
from compressor.pruning.block_passes import BlockPasses
from compressor.pruning.scores import reconstruction_scores
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.peft.read import read_adapter
from compressor.storage.peft.write import write_peft
from compressor.tasks import TaskConfig
from compressor.tasks.data import read_data, task_tokenizer, tensor_batches
from compressor.tasks.decoding.decode_config import DecodeConfig
from compressor.tasks.decoding.generate_texts import generate_texts
from compressor.tasks.features import tokens_of
from compressor.tasks.kinds.text2text import KIND
from compressor.tasks.predictions import IGNORED
from compressor.tasks.reading import read_task
from compressor.training.distillation import HiddenTeacher
from compressor.training.training_rows import Collator, TrainingRows
from pipelines.check.checkup import facts_of, warnings_of
from tests.compressor.conftest import tiny, tuned
from tests.tiny import WORDS, write_model

ROWS = [
    {"source": " the film was good and very fine ", "target": "a good story"},
    {"source": "bad", "target": ["a bad story", "the film was bad and bad"]},
    {"source": "quite good plot", "target": "the film"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("t5"), "t5", auto="AutoModelForSeq2SeqLM")


def task(tmp_path, rows=ROWS, **keys) -> TaskConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskConfig(kind="text2text", train=path, validation=path, **keys)


def t5(dtype=torch.float64, seed: int = 0, architecture: str = "t5", **keys):
    model = tiny(architecture, dtype, seed, auto=AutoModelForSeq2SeqLM, **keys)
    model.compression.head_parameters = frozenset()
    return model


def words(ids) -> str:
    return " ".join(WORDS[place] for place in ids if place >= 0)


# --- reading ---


def test_the_encoder_reads_the_source_and_the_decoder_the_target_before_each_token(tmp_path, folder):
    config = task(tmp_path, prefix="story ", max_length=6)
    data = read_data(folder, config)
    first, second, third, _ = data.train.tokens
    assert words(first["input_ids"]) == "story the film was good [SEP]", "cut to six, with the end"
    assert words(first["decoder_input_ids"]) == "[PAD] a good story" and words(data.train.labels[0]) == "a good story [SEP]"
    assert words(second["input_ids"]) == words(third["input_ids"]) == "story bad [SEP]", "a row for each target"
    assert words(third["decoder_input_ids"]) == "[PAD] the film was bad and bad" and data.train.labels.shape == (4, 7)
    assert all(row["decoder_attention_mask"] == [1] * len(row["decoder_input_ids"]) for row in data.train.tokens)
    batch = Collator(data.pad_id)([TrainingRows(data.train.tokens, data.train.labels, None, KIND)[row] for row in (0, 1)])
    assert batch["input_ids"].shape == (2, 6) and batch["decoder_input_ids"].shape == batch["labels"].shape == (2, 4)
    share = Collator(data.pad_id, rank=1, processes=2)([{**first, "labels": data.train.labels[0]}] * 3)
    assert share["labels"].shape == (1, 4) and share["weight"] == 2 / 3
    lengths = tokens_of(task_tokenizer(folder, KIND), read_task(config).train, KIND.continues)
    assert lengths == [9, 3, 3, 5], "of the sources, uncut"


def test_of_several_columns_each_text_stands_behind_its_name(tmp_path, folder):
    """As T5 was pretrained: `prefix question: .. context: ..`; a single column, also in a list, has no name."""
    rows = [{"plot": " very good ", "story": "a film", "target": "fine"}]
    config = task(tmp_path, rows, text=["plot", "story"], prefix="quite ")
    assert read_task(config).train.texts == [("quite plot: very good story: a film",)]
    assert (
        words(read_data(folder, config).train.tokens[0]["input_ids"]) == "quite plot [UNK] very good story [UNK] a film [SEP]"
    )
    assert read_task(task(tmp_path, rows, text=["plot"])).train.texts == [("very good",)]
    with pytest.raises(UserErrors, match=r"E206 .*column 'story' holds nothing"):
        read_task(task(tmp_path, [{**rows[0], "story": None}], text=["plot", "story"]))
    with pytest.raises(ValidationError, match="reads 1 to 9 columns"):
        task(tmp_path, rows, text=[f"c{number}" for number in range(10)])


def test_a_target_is_cut_only_where_that_is_asked(tmp_path, folder):
    config = task(tmp_path, target_length=3)
    data, read = read_data(folder, config), read_task(config)
    facts = facts_of(read.train, KIND, config, [], task_tokenizer(folder, KIND))
    assert "train: 3 of 4 targets longer than target_length, cut there" in warnings_of(
        {"train": read.train}, KIND, config, {"train": facts}
    )
    assert [words(row[row != IGNORED]) for row in data.train.labels] == [
        *("a good [SEP]", "a bad [SEP]", "the film [SEP]", "the film [SEP]")
    ]


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        ({"source": "a", "target": " "}, "E207", "not a text"),
        ({"source": None, "target": "a"}, "E206", "not text"),
        ({"source": "a", "target": "good [SEP] bad"}, "E212", "spells the end of sentence"),
    ],
)
def test_mistakes_have_a_code_and_a_line(row, code, says, tmp_path, folder):
    with pytest.raises(UserErrors, match=rf"{code} .*rows.jsonl:4: .*{says}"):
        read_data(folder, task(tmp_path, [*ROWS, row]))


@pytest.mark.parametrize("keys", [{"prefix": "a "}, {"target_length": 9}])
def test_other_kinds_have_no_sources(keys):
    with pytest.raises(ValidationError, match="is used by tasks of kind text2text"):
        TaskConfig(train="a.csv", validation="b.csv", **keys)


def test_models_of_one_stack_are_refused(tmp_path, folder):
    for name in ("bert", "gpt2"):
        with pytest.raises(UserError, match=f"E309 .*a '{name}' has no decoder behind an encoder"):
            weightless_model(write_model(tmp_path / name, name), [], TEXT2TEXT)
    with pytest.raises(UserError, match=r"E309 .*not trained to generate here. Say kind: text2text"):
        weightless_model(folder, [], GENERATES)


# --- loss ---


def batch_of(folder, tmp_path):
    data = read_data(folder, task(tmp_path))
    return next(tensor_batches(data.train, data.pad_id, 8)), data


def test_the_loss_is_that_of_transformers_a_row(folder, tmp_path):
    """Which shifts the labels itself; rows are meaned on their own. Smoothed labels are torch's."""
    (inputs, labels), _ = batch_of(folder, tmp_path)
    model, each, smooth = build(folder, [], auto_class=TEXT2TEXT), [], []
    with torch.no_grad():
        outputs = model(**inputs).logits
        for row in range(4):
            alone = {key: inputs[key][row : row + 1] for key in ("input_ids", "attention_mask")}
            each.append(model(**alone, labels=labels[row : row + 1]).loss)
            smooth.append(functional.cross_entropy(outputs[row], labels[row], label_smoothing=0.1))
        assert torch.allclose(KIND.loss(outputs, labels), torch.stack(each).mean(), atol=1e-6)
    assert torch.allclose(KIND.with_smoothing(0.1).loss(outputs, labels), torch.stack(smooth).mean(), atol=1e-6)
    gained = [kind.distillation(outputs, -outputs, labels) for kind in (KIND.with_smoothing(0.1), KIND)]
    assert torch.allclose(gained[0] - gained[1], (torch.stack(smooth).mean() - torch.stack(each).mean()) / 2, atol=1e-5)


def test_states_of_the_decoder_are_compared_at_its_own_tokens(folder, tmp_path):
    """Distances and reconstruction of a padded batch are those of its rows alone, which have no padding."""
    (inputs, labels), data = batch_of(folder, tmp_path)
    student, dense = (build(folder, [], auto_class=TEXT2TEXT) for _ in range(2))
    apply(student, "full", Options(group="1"))
    with torch.no_grad():
        student.shared.weight.mul_(1.5)
    teacher = HiddenTeacher(dense, student)
    singles = list(tensor_batches(data.train, data.pad_id, 1))
    with torch.no_grad():
        whole = teacher.loss(student, dict(inputs), labels, KIND)[1]
        alone = [teacher.loss(student, dict(one), label, KIND)[1] for one, label in singles]
    assert torch.allclose(whole, torch.stack(alone).mean(), rtol=1e-4)
    model = t5()
    for structure in ("cross_heads", "neurons", "layers"):
        scores = [reconstruction_scores(model, structure, batches) for batches in ([inputs], [one for one, _ in singles])]
        assert all(torch.allclose(one, other) for one, other in zip(*scores, strict=True))
    last = BlockPasses(model, [inputs])
    with last.at(5, "neurons", "start") as see:
        assert len(see(0).output) == int(inputs["decoder_attention_mask"].sum())


# --- changes ---

CASES = ["lora", "dsee", "selective", "adapter", "propetl", "propetl-lora", "full"]


@pytest.mark.parametrize("case", CASES)
def test_both_stacks_are_tuned_and_merged(case, folder, tmp_path):
    (inputs, labels), _ = batch_of(folder, tmp_path)
    model = tuned(t5(), case)
    KIND.loss(model(**inputs).logits, labels).backward()
    moved = {name.split(".")[0] for name, one in model.named_parameters() if one.grad is not None and one.grad.any()}
    assert moved >= {"encoder", "decoder"} or (case == "full" and "shared" in moved)
    assert head_names(model) == frozenset() and (case == "full") == model.lm_head.weight.requires_grad
    model.eval()
    with torch.no_grad():
        assert torch.equal(merged_copy(model)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("case", ["propetl", "propetl-lora"])
def test_encoder_and_decoder_share_one_prototype(case):
    """As in ProPETL's experiments with T5: a mask for each block of both, over one adapter (or one A and B a module)."""
    model = tuned(t5(), case)
    views = {name: view for name, view in model.named_modules() if isinstance(view, Masked)}
    prototypes = {id(view.prototype) for view in views.values()}
    assert len(prototypes) == (2 if case == "propetl-lora" else 1)
    assert len(views) == 6 * len(prototypes) == len({id(view.layer) for view in views.values()})
    assert {name.split(".")[0] for name in views} == {"encoder", "decoder"}


# --- files ---


def test_a_head_that_is_stored_twice_with_equal_values_is_one(tmp_path):
    base = write_model(tmp_path, "t5", auto="AutoModelForSeq2SeqLM")
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["shared.weight"].clone()}, base / "model.safetensors", {"format": "pt"})
    assert shape_of(weightless_model(base, [], TEXT2TEXT)) == shape_of(build(base, [], 3, TEXT2TEXT))


@pytest.mark.parametrize("start", [None, 5])
def test_a_target_begins_as_the_config_says_else_with_padding(start, tmp_path):
    """Neither is written by a T5Config of transformers 5 that names no start."""
    base = write_model(tmp_path, "t5", auto="AutoModelForSeq2SeqLM", pad_token_id=1)
    keys = json.loads((base / "config.json").read_text())
    del keys["decoder_start_token_id"]
    (base / "config.json").write_text(json.dumps(keys | ({"decoder_start_token_id": start} if start else {})))
    assert start_id(config_of(base), 1) == (start or 1)


@pytest.mark.parametrize("architecture", ["t5", "t5-gated"])
def test_a_pruned_and_tuned_model_lives_on_disk(architecture, tmp_path):
    """State, delta file, adapter of peft and checkpoint, in transformers' Auto class, too; Flan-T5's LM head is a matrix of its
    own."""
    tied = architecture == "t5"
    base = write_model(tmp_path / "base", architecture, auto="AutoModelForSeq2SeqLM", tie_word_embeddings=tied)
    if not tied:
        stock = AutoModelForSeq2SeqLM.from_pretrained(base)
        stock.lm_head.weight = torch.nn.Parameter(torch.randn_like(stock.lm_head.weight))
        stock.config.tie_word_embeddings = False
        stock.save_pretrained(base)
    model, found = build(base, [], 3, TEXT2TEXT), resolve(str(base))
    assert model.compression.head_origin == "own" and tied == (model.lm_head.weight is model.shared.weight)
    shape = shape_of(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(weightless_model(base, [], TEXT2TEXT)) == shape
    ids = torch.full((2, 7), 4)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), math:
        model(input_ids=ids, decoder_input_ids=ids)
    assert counter.get_total_flops() == shape.flops(7, batch=2)
    apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query", "cross_value"), group="1"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    write_peft(model, tmp_path / "peft", base=str(base))
    assert json.loads((tmp_path / "peft" / CONFIG_NAME).read_text())["task_type"] == "SEQ_2_SEQ_LM"
    assert read_adapter(tmp_path / "peft").auto_class == TEXT2TEXT
    remove(model, {0: Removal([1], [0, 5, 7]), 2: Removal([0], cross_heads=[1, 2]), 3: Removal(cross_heads=list(range(4)))})
    rows = {"input_ids": torch.tensor([[5, 9, 3], [7, 3, 0]]), "attention_mask": torch.tensor([[1] * 3, [1, 1, 0]])}
    rows["decoder_input_ids"] = torch.tensor([[0, 8, 9, 10], [0, 5, 5, 7]])
    with torch.no_grad():
        expected = model.eval()(**rows).logits
        facts = {"base": str(base), "base_sha256": found.sha256, "label_names": []}
        save_state(model, tmp_path / "state", **facts)
        delta_file.write(model, tmp_path / "delta.safetensors", **facts)
        save_checkpoint(merged_copy(model), tmp_path / "checkpoint", base)
        for again in (
            load(tmp_path / "state"),
            load(base, delta=tmp_path / "delta.safetensors"),
            load(tmp_path / "checkpoint"),
        ):
            assert torch.equal(again(**rows).logits, expected) and head_names(again) == frozenset()
        again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint")
        assert torch.equal(again(**rows).logits, expected)


# --- texts ---


class Numbers:
    """A tokenizer whose texts are the numbers of the tokens."""

    eos_token_id = 3

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


PROMPTS = [[5, 8, 9], [6], [7, 7, 11, 12, 30, 31], [8, 40]]


def alone(model, prompt: list[int], count: int) -> str:
    """Greedy search without padding and without a cache, from the start token 1."""
    ids = [1]
    with torch.no_grad():
        while len(ids) <= count:
            outputs = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]))
            if (following := int(outputs.logits[0, -1].argmax())) == 3:
                break
            ids.append(following)
    return " ".join(map(str, ids[1:]))


@pytest.mark.parametrize(("architecture", "blocks"), [("t5", 3), ("t5-gated", 3), ("t5", 4)])
def test_texts_are_those_of_one_token_at_a_time(architecture, blocks):
    """Of a model with changes, pruned heads, settings of its own that sample, and as many blocks in its decoder, or more."""
    model = t5(architecture=architecture, num_decoder_layers=blocks)
    remove(model, {0: Removal([1], [0, 5, 7]), 4: Removal([2], cross_heads=[0])})
    model = tuned(model, "lora", ("query", "cross_value"))
    model.generation_config.update(do_sample=True, temperature=5.0, decoder_start_token_id=9)
    expected = [alone(model.eval(), prompt, 7) for prompt in PROMPTS]
    assert generate_texts(model, Numbers(), PROMPTS, DecodeConfig(max_new_tokens=7), 1) == expected
    assert len(set(expected)) > 1 and model.generation_config.do_sample
    short = generate_texts(model, Numbers(), PROMPTS, DecodeConfig(max_new_tokens=7, beams=3, no_repeat_ngram=1), 1)
    assert all(len(set(text.split())) == len(text.split()) for text in short)


def test_a_prompt_is_the_whole_source(tmp_path, folder):
    data = read_data(folder, task(tmp_path, prefix="the ", decode={"metrics": ["exact_match"]}))
    assert [words(prompt) for prompt in data.validation.prompts][1:] == ["the bad [SEP]", "the quite good plot [SEP]"]
    item = data.validation.items[1]
    assert item.references == ("a bad story", "the film was bad and bad") and item.prompt == "the bad"
    assert np.array_equal(data.validation.prompts[1], data.train.tokens[1]["input_ids"])


def test_layers_know_the_mask_of_their_tokens():
    masks = {"attention_mask": torch.zeros(1, 2), "decoder_attention_mask": torch.zeros(1, 5)}
    lengths = [layer.token_mask(masks).shape[1] for layer in layers_of(t5(torch.float32))]
    assert lengths == [2, 2, 2, 5, 5, 5]
