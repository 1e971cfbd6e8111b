"""A text for each prompt: what is read, where labels stand, what loss and metrics are, and that files hold the model."""

import json
import weakref

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.cost import shape_of
from compressor.deltas.links import merged_copy
from compressor.errors import UserError, UserErrors
from compressor.methods import Options, apply
from compressor.models.architectures import ARCHITECTURES
from compressor.models.build import GENERATES, build, further_ends, head_names, weightless_model
from compressor.models.reference import resolve
from compressor.models.special_tokens import padding_id
from compressor.pruning.prices import prices_of
from compressor.pruning.scores import loss_scores, random_scores
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.peft.read import CONFIG, read_adapter
from compressor.storage.peft.write import write_peft
from compressor.tasks import TaskConfig
from compressor.tasks.data import MOST_OUTPUTS, Data
from compressor.tasks.data import TokenRows as Loaded
from compressor.tasks.features import metric_inputs_of, predict, torch_forward
from compressor.tasks.kinds.generation import check_end
from compressor.tasks.predictions import IGNORED
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import kind_of
from compressor.training.distillation import HiddenTeacher
from export.parity.bounds import BOUNDS, row_of
from export.parity.compare import compare, in_other_batches
from pipelines.cli.commands import main
from tests.compressor.conftest import encoding, tiny
from tests.tiny import DECODERS, WORDS, write_model

KIND = kind_of("generation")


def decoder(architecture: str = "gpt2", dtype: torch.dtype = torch.float64, seed: int = 0):
    return tiny(architecture, dtype, seed, auto=AutoModelForCausalLM)


# --- reading ---

ROWS = [{"prompt": " name : A ", "target": "A is good . "}, {"prompt": "name : B", "target": "B"}]


def task(tmp_path, train, ending="jsonl", **options) -> TaskConfig:
    written = train if isinstance(train, str) else "".join(json.dumps(row) + "\n" for row in train)
    paths = {name: tmp_path / f"{name}.{ending}" for name in ("train", "validation")}
    for path in paths.values():
        path.write_text(written, encoding="utf-8")
    return TaskConfig(**paths, kind="generation", **options)


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("jsonl", ROWS),
        ("csv", 'prompt,target\n"name : A",A is good .\nname : B,B\n'),
        ("tsv", "prompt\ttarget\nname : A\tA is good .\nname : B\tB\n"),
    ],
)
def test_formats_read_the_same(tmp_path, ending, content):
    data = read_task(task(tmp_path, content, ending))
    assert data.train.texts == [("name : A",), ("name : B",)] and data.validation.labels == ["A is good .", "B"]
    assert data.label_names == []


def test_the_columns_may_have_other_names(tmp_path):
    data = read_task(task(tmp_path, 'mr,ref\n"name[A], area[B]","A, in B"\n', "csv", text="mr", label="ref"))
    assert data.train.texts == [("name[A], area[B]",)] and data.train.labels == ["A, in B"]


def test_a_number_is_a_target_as_its_text(tmp_path):
    rows = [{"prompt": "a", "target": target} for target in (12, -0.5, [3, "four"])]
    assert read_task(task(tmp_path, rows)).train.labels == ["12", "-0.5", "3", "four"]


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        ({"prompt": "a"}, "E207", "column 'target' holds nothing, not a text"),
        ({"prompt": "a", "target": " "}, "E207", "column 'target' holds ' '"),
        ({"prompt": "a", "target": True}, "E207", "column 'target' holds True"),
        ({"prompt": "a", "target": float("nan")}, "E207", "column 'target' holds nan, not a text or a number"),
        ({"prompt": "", "target": "b"}, "E206", "column 'prompt' holds ''"),
        ({"target": "b"}, "E206", "column 'prompt' holds nothing"),
    ],
)
def test_mistakes_have_a_code_and_a_line(tmp_path, row, code, says):
    with pytest.raises(UserErrors, match=rf"{code} .*train.jsonl:3: {says}"):
        read_task(task(tmp_path, [*ROWS, row]))


def test_a_prompt_is_one_column(tmp_path):
    with pytest.raises(ValidationError, match="a task of kind generation reads one column"):
        task(tmp_path, ROWS, text=["prompt", "more"])


# --- tokens ---


def words_of(frame: str = "$A", end: bool = True) -> PreTrainedTokenizerFast:
    """A word a token, 10 + its number; `frame` puts [B] (1) or [E] (2) around a text."""
    vocabulary = {"[U]": 0, "[B]": 1, "[E]": 2, **{word: 10 + number for number, word in enumerate("abcdefg")}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("[B]", 1), ("[E]", 2)])
    tokenizer.add_special_tokens(["[E]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[U]", **({"eos_token": "[E]"} if end else {}))


def encoded(tokenizer, rows: list[tuple[str, str]], max_length: int = 9):
    split = Split([(prompt,) for prompt, _ in rows], [target for _, target in rows], range(2, 2 + len(rows)))
    config = TaskConfig(train="t.csv", validation="v.csv", kind="generation", max_length=max_length)
    return KIND.encode(tokenizer, split, config, config.train)


@pytest.mark.parametrize("frame", ["$A", "$A [E]"])
def test_a_token_is_labelled_with_the_one_behind_it(frame):
    """From the last of the prompt on, up to the end; the end itself is no input, whoever put it there."""
    rows, labels = encoded(words_of(frame), [("a b c", "d e"), ("a", "f")])
    assert rows[0] == {"input_ids": [10, 11, 12, 13, 14], "attention_mask": [1] * 5}
    assert labels.tolist() == [[-100, -100, 13, 14, 2], [15, 2, -100, -100, -100]]


def test_a_beginning_belongs_to_the_prompt():
    rows, labels = encoded(words_of("[B] $A"), [("a", "f g")])
    assert rows[0]["input_ids"] == [1, 10, 15, 16] and labels.tolist() == [[-100, 15, 16, 2]]


def test_a_target_begins_with_its_space_as_in_running_text():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0, **{one: 1 + number for number, one in enumerate(alphabet)}, "Ġb": 300}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    rows, labels = encoded(tokenizer, [("a", "b")])
    assert rows[0]["input_ids"] == tokenizer("a b")["input_ids"] == [vocabulary["a"], 300]
    assert labels.tolist() == [[300, 0]]


@pytest.mark.parametrize("trim", [False, True])
def test_a_space_of_its_own_is_said_too(trim):
    """Digits alone, as SmolLM2's tokenizer cuts: a prompt ends before the space, so the model must learn to say it."""
    vocabulary = {"</s>": 0, **{one: 1 + number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    rows, labels = encoded(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), [("a", "7")])
    assert rows[0]["input_ids"] == [vocabulary[one] for one in ("a", "Ġ", "7")]
    assert labels.tolist() == [[vocabulary["Ġ"], vocabulary["7"], 0]]


def test_nothing_is_cut_off_and_every_text_can_end():
    with pytest.raises(UserError, match=r"E213 t.csv:4: 1 of 3 rows are longer than max_length 4, the longest 5 tokens"):
        encoded(words_of(), [("a b", "c"), ("a", "b c d"), ("a b", "c d e")], max_length=4)
    for frame in ("$A", "$A [E]", "$A [B]"):
        rows, labels = encoded(words_of(frame), [("a", "b")])
        assert (rows[0]["input_ids"], labels.tolist()) == ([10, 11], [[11, 2]]), "what the tokenizer adds is taken off"
        with pytest.raises(UserError, match=r"E212 .*the target 'b \[E\]' spells the end of sentence"):
            encoded(words_of(frame), [("a", "b [E]")])
    with pytest.raises(UserError, match=r"E212 t.csv:3: the target 'b \[E\] c' spells the end of sentence"):
        encoded(words_of(), [("a [E]", "b"), ("a", "b [E] c")])
    with pytest.raises(UserError, match=r"E212 t.csv: the tokenizer has no end of sentence"):
        encoded(words_of(end=False), [("a", "b")])
    with pytest.raises(UserError, match=r"E213 t.csv:2: the tokenizer produces no separate token"):
        encoded(words_of(), [("", "b")])


def test_the_model_and_its_tokenizer_end_a_text_alike(tmp_path):
    tokenizer = words_of()
    for end in (2, [1, 2]):
        check_end(tokenizer, PretrainedConfig(eos_token_id=end), tmp_path)
    for end in (1, [3], None):
        with pytest.raises(UserError, match=r"E212 .*the tokenizer ends a text with token 2, config.json with"):
            check_end(tokenizer, PretrainedConfig(eos_token_id=end), tmp_path)
    own = tmp_path / "generation_config.json"
    for ends in ("[1, 2]", "null"):
        own.write_text(f'{{"eos_token_id": {ends}}}')
        check_end(tokenizer, PretrainedConfig(eos_token_id=2), tmp_path)
    own.write_text('{"eos_token_id": [7, 8]}')
    with pytest.raises(UserError, match=r"E212 .*generation_config.json with \[7, 8\]"):
        check_end(tokenizer, PretrainedConfig(eos_token_id=2), tmp_path)


def test_more_tokens_that_end_a_text_stay_with_the_model(tmp_path):
    """As chat models have them: through a checkpoint, and told where config.json does not say the same. The digest, by which a
    delta finds its base, is that of the weights."""
    base = write_model(tmp_path / "base", "llama", auto=GENERATES, eos_token_id=3)
    own, digests, told = base / "generation_config.json", set(), []
    for ends in ("{}", '{"eos_token_id": 3}', '{"eos_token_id": [3]}', '{"eos_token_id": [7, 3]}'):
        own.write_text(ends)
        digests.add(resolve(str(base)).sha256)
        told.append(further_ends(base))
    assert len(digests) == 1 and told == [[], [], [], [3, 7]]
    save_checkpoint(build(base, [], auto_class=GENERATES), tmp_path / "merged", base)
    assert load(tmp_path / "merged").generation_config.eos_token_id == [7, 3]
    (tmp_path / "merged/generation_config.json").write_text('{"eos_token_id": [3,')
    with pytest.raises(UserError, match=r"E305 .*generation_config.json"):
        load(tmp_path / "merged")


def test_a_model_that_says_nothing_has_figures_still():
    """JSON knows neither NaN nor Infinity."""
    for logits in (np.full((2, 9), np.nan), np.array([[0.0] * 8 + [1e30]] * 2)):
        found, known = KIND.metric_inputs(logits.astype(np.float32), np.array([[3, 4]]))
        quality = KIND.quality(found, known)
        assert np.isfinite([quality[name] for name in ("likelihood", "log_likelihood", "perplexity", "accuracy")]).all()
        assert "e+" in KIND.metric.aside(quality["likelihood"])


def test_numbers_alone_are_prompts(tmp_path):
    assert read_task(task(tmp_path, [{"prompt": "12", "target": "twelve"}])).train.texts == [("12",)]


def test_outputs_of_one_pass_are_held_at_a_time():
    """Of rows with long prompts and few labels, which are all that stays."""
    alive, rows = [], [{"input_ids": [5] * 50, "attention_mask": [1] * 50} for _ in range(6)]
    labels = np.full((6, 50), IGNORED)
    labels[:, -1] = 3

    def forward(encoding):
        outputs = np.zeros((*encoding["input_ids"].shape, 7), dtype=np.float32)
        alive.append(weakref.ref(outputs))
        assert sum(one() is not None for one in alive) <= 2, "this one, and the one before it at most"
        return outputs

    assert all(one.shape == (6, 7) for one in in_other_batches(forward, rows, 0, 2, labels).values())


# --- loss and metrics ---

ENCODING = encoding()
LABELS = torch.full((3, 9), IGNORED)
for row, (first, last) in enumerate(((4, 8), (1, 6), (2, 4))):
    LABELS[row, first:last] = ENCODING["input_ids"][row, first + 1 : last + 1]


@pytest.mark.parametrize("architecture", DECODERS)
def test_the_loss_is_that_of_transformers_a_row(architecture):
    """Which shifts the labels itself; rows are meaned on their own, so that a short one counts as much as a long one.
    Smoothed labels are torch's."""
    model, each, smooth = decoder(architecture), [], []
    with torch.no_grad():
        logits = model(**ENCODING).logits
        for row in range(3):
            known = LABELS[row] != IGNORED
            smooth.append(functional.cross_entropy(logits[row][known], LABELS[row][known], label_smoothing=0.1))
            alone = {key: value[row : row + 1] for key, value in ENCODING.items()}
            shifted = functional.pad(LABELS[row : row + 1, :-1], (1, 0), value=IGNORED)
            each.append(model(**alone, labels=shifted).loss)
    assert torch.allclose(KIND.loss(logits, LABELS), torch.stack(each).mean().double(), atol=1e-6)
    assert torch.allclose(KIND.loss(logits, LABELS, "sum"), torch.stack(each).sum().double(), atol=1e-6)
    assert torch.allclose(KIND.with_smoothing(0.1).loss(logits, LABELS), torch.stack(smooth).mean(), atol=1e-6)


def test_distillation_is_at_the_labels_alone():
    student, teacher = torch.randn(2, 3, 9, 99, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    soft = []
    for row in range(3):
        known = LABELS[row] != IGNORED
        p, q = ((one[row][known] / 2).log_softmax(-1) for one in (teacher, student))
        soft.append((p.exp() * (p - q)).sum(-1).mean())
    expected = 0.5 * KIND.loss(student, LABELS) + 0.5 * 4 * torch.stack(soft).mean()
    assert torch.allclose(KIND.distillation(student, teacher, LABELS), expected)
    teacher[LABELS == IGNORED] = 1e3
    assert torch.allclose(KIND.distillation(student, teacher, LABELS), expected)


def test_a_live_teacher_may_teach_logits_alone():
    dense, student = decoder(), decoder(seed=1)
    outputs, loss = HiddenTeacher(dense, student, weight=0.0, logits=True).loss(student, dict(ENCODING), LABELS, KIND)
    assert torch.equal(loss, KIND.distillation(outputs.logits, dense(**ENCODING).logits, LABELS))
    _, more = HiddenTeacher(dense, student, weight=2.0, logits=True).loss(student, dict(ENCODING), LABELS, KIND)
    assert more > loss


def test_a_teacher_of_hidden_states_alone_computes_no_words():
    """The loss is that of the labels and of the distance, and the dense model's vocabulary is left alone."""
    dense, student, asked = decoder(), decoder(seed=1), []
    _, both = HiddenTeacher(dense, student, weight=1.0, logits=True).loss(student, dict(ENCODING), LABELS, KIND)
    outputs, taught = student(**ENCODING), dense(**ENCODING).logits
    dense.get_output_embeddings().register_forward_hook(lambda *known: asked.append(known))
    _, loss = HiddenTeacher(dense, student, weight=1.0).loss(student, dict(ENCODING), LABELS, KIND)
    distance = both - KIND.distillation(outputs.logits, taught, LABELS)
    assert torch.allclose(loss, KIND.loss(outputs.logits, LABELS) + distance) and not asked


def unpadded() -> list[dict[str, list[int]]]:
    lengths = ENCODING["attention_mask"].sum(1).tolist()
    return [{key: value[row, :n].tolist() for key, value in ENCODING.items()} for row, n in enumerate(lengths)]


def test_metrics_are_those_of_all_tokens_and_made_batch_by_batch():
    model, labels = decoder("llama"), LABELS.numpy()
    forward = torch_forward(model)
    found, known = metric_inputs_of(forward, unpadded(), 1, labels, KIND.metric_inputs, batch_size=2)
    whole = KIND.metric_inputs(predict(forward, unpadded(), 1, labels=labels), labels)
    assert np.allclose(found, whole[0], atol=1e-5) and np.array_equal(known, whole[1])
    with torch.no_grad():
        logits = model(**ENCODING).logits[LABELS != IGNORED]
    true = LABELS[LABELS != IGNORED]
    nats, quality = float(functional.cross_entropy(logits, true)), KIND.quality(found, known)
    assert list(quality) == ["likelihood", "interval", "log_likelihood", "perplexity", "accuracy", "rows"]
    assert quality["log_likelihood"] == pytest.approx(-nats, abs=1e-5)
    assert quality["perplexity"] == pytest.approx(np.exp(nats), rel=1e-4) == pytest.approx(1 / quality["likelihood"])
    assert quality["accuracy"] == pytest.approx(float((logits.argmax(-1) == true).double().mean()))
    low, high = quality["interval"]
    assert 0 < low <= quality["likelihood"] <= high < 1 and quality["rows"] == 3
    assert known[:, 0].tolist() == [4, 5, 2]


def test_parity_holds_as_many_rows_as_fit_and_has_bounds_of_its_own():
    rows = Loaded([{"input_ids": [5] * n} for n in range(1, 41)], np.full((40, 40), 7), KIND)
    assert Data(rows, rows, [], 1, vocabulary=100).compared() is rows
    assert len(Data(rows, rows, [], 1, vocabulary=100).compared(25)) == 25
    few = Data(rows, rows, [], 1, vocabulary=MOST_OUTPUTS // 40 // 6).compared()
    assert len(few) == 6 and [len(few.tokens[place]["input_ids"]) for place in (0, -1)] == [1, 40]
    assert len(Data(rows, rows, [], 1, vocabulary=2**30).compared()) == 2
    assert Data(rows, rows, [], 1, vocabulary=MOST_OUTPUTS // 40 // 6).batch_size == 6
    assert Data(rows, rows, ["a", "b"], 1).batch_size == Data(rows, rows, [], 1, vocabulary=9).batch_size == 32
    assert row_of("fp32", KIND) == "fp32, generated" and row_of("int8", KIND) == "int8, generated"
    assert row_of("fp32", kind_of("tokens")) == "fp32" and BOUNDS[row_of("merged", KIND)].difference == 0.0
    outputs, labels = np.random.default_rng(0).normal(size=(11, 50)).astype(np.float32), LABELS.numpy() % 50
    labels[LABELS == IGNORED] = IGNORED
    outputs[:, 0] = 40.0
    assert compare("x", "removed", outputs, outputs + 1e-3, labels, task=KIND).passed, "of a row whose largest is 40"
    assert not compare("x", "removed", outputs, outputs + 1e-2, labels, task=KIND).passed
    assert not compare("x", "merged", outputs, outputs + 1e-6, labels, task=KIND).passed


def test_scores_and_prices_ask_the_same_loss():
    model = decoder()
    alone = [({key: one[row : row + 1] for key, one in ENCODING.items()}, LABELS[row : row + 1]) for row in range(3)]
    whole, apart = (loss_scores(model, "neurons", "taylor", batches, kind=KIND) for batches in ([(ENCODING, LABELS)], alone))
    assert all(torch.allclose(one, other) and one.any() for one, other in zip(whole, apart, strict=True))
    scores = {"neurons": random_scores(model, "neurons", 0)}
    prices = [prices_of(model, scores, batches, KIND)["neurons"] for batches in ([(ENCODING, LABELS)], alone)]
    assert all(np.allclose(*pair) and pair[0][-1] > 0 for pair in zip(*prices, strict=True))


# --- models and files ---


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_pruned_and_tuned_model_lives_on_disk(architecture, tmp_path):
    """State, delta file and checkpoint; the head is the base's, frozen, and looks at every token."""
    base = write_model(tmp_path / "base", architecture, auto="AutoModelForCausalLM")
    model, found = build(base, [], 3, GENERATES), resolve(str(base))
    assert head_names(model) == frozenset() and compression_of(model).head_origin == "own" and model.config.id2label == {}
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(base).lm_head.weight)
    shape = shape_of(model)
    assert shape_of(weightless_model(base, [], GENERATES)) == shape and shape.head == 0
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(input_ids=torch.full((2, 7), 4))
    assert counter.get_total_flops() == shape.flops(7, batch=2)
    apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query",), group="1"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1)
    assert sum(parameter.numel() for parameter in trained) == 2 * 2 * (32 + 32)
    facts = {"base": str(base), "base_sha256": found.sha256, "label_names": []}
    write_peft(model, tmp_path / "peft", base=str(base))
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["task_type"] == "CAUSAL_LM"
    assert read_adapter(tmp_path / "peft").auto_class == GENERATES
    asked = ["delta", "convert", str(tmp_path / "peft"), str(tmp_path / "x"), "--labels", "a,b"]
    assert "E315" in (refused := CliRunner().invoke(main, asked)).output and refused.exit_code == 2
    remove(model, {0: Removal([1], [0, 5, 7]), 1: Removal([0], list(range(20)))})
    rows = {"input_ids": torch.tensor([[2, 5, 9, 3], [2, 7, 3, 0]]), "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]])}
    expected = model(**rows).logits
    assert expected.shape == (2, 4, len(WORDS))
    save_state(model, tmp_path / "state", **facts)
    delta_file.write(model, tmp_path / "delta.safetensors", **facts)
    save_checkpoint(merged_copy(model), tmp_path / "checkpoint", base)
    for again in (load(tmp_path / "state"), load(base, delta=tmp_path / "delta.safetensors"), load(tmp_path / "checkpoint")):
        assert torch.equal(again(**rows).logits, expected) and head_names(again) == frozenset()
    assert padding_id(again.config, base) == 3, "neither has a padding token: the end pads"


def test_full_tuning_moves_tied_embeddings_once(tmp_path):
    base = write_model(tmp_path / "base", "gpt2", auto="AutoModelForCausalLM")
    model, found = build(base, [], 0, GENERATES), resolve(str(base))
    apply(model, "full", Options(group="1"))
    with torch.no_grad():
        model.transformer.wte.weight.add_(0.5)
    save_state(model, tmp_path / "state", base=str(base), base_sha256=found.sha256, label_names=[])
    again = load(tmp_path / "state")
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_base_without_its_head_is_no_generator(tmp_path):
    """A Llama's is a matrix of its own: it would be random."""
    with pytest.raises(UserError, match=r"E304 .*lacks 1 tensors of the base, e.g. lm_head.weight"):
        build(write_model(tmp_path, "llama"), [], 0, GENERATES)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(DECODERS)))
def test_what_does_not_generate_is_refused(architecture, tmp_path):
    base = write_model(tmp_path / "base", architecture)
    for make in (lambda: weightless_model(base, [], GENERATES), lambda: build(base, [], auto_class=GENERATES)):
        with pytest.raises(UserError, match=f"E309 .*a '{architecture}' is not trained to generate"):
            make()


def test_a_row_of_its_outputs_is_no_prediction():
    with pytest.raises(UserError, match="E716"):
        KIND.prediction([], np.zeros((1, 2)), "a", [(0, 1)])
