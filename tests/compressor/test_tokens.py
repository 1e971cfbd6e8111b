"""Tags of words: what is read, where the model answers, how entities are counted, and that losses and files know it."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.cost import shape_of
from compressor.deltas.links import merged_copy
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.models.architectures import ARCHITECTURES
from compressor.models.build import TOKENS, build, weightless_model
from compressor.models.reference import resolve
from compressor.pruning.scores import loss_scores
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.live import remember
from compressor.storage.peft.read import CONFIG
from compressor.storage.peft.write import write_peft
from compressor.tasks import TaskConfig
from compressor.tasks.features import predict, torch_forward
from compressor.tasks.first_tokens import first_tokens
from compressor.tasks.kinds.tokens import metric_inputs, to_iob2
from compressor.tasks.predictions import IGNORED, by_row, cut, predictions_in, rows_of, spread
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import kind_of
from compressor.training.distillation import HiddenTeacher
from compressor.training.training_rows import Collator, TrainingRows
from export.parity.compare import compare, in_other_batches
from tests.compressor.conftest import encoding, tiny
from tests.compressor.delta_parts import sealed
from tests.tiny import write_model

KIND = kind_of("tokens")
NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
ENCODERS = [name for name, row in ARCHITECTURES.items() if row.bidirectional]


# --- reading ---

JSONL = [
    {"tokens": ["EU", "rejects", "Peter", "Blackburn"], "tags": ["B-ORG", "O", "B-PER", "I-PER"]},
    {"tokens": ["no", "one"], "tags": ["O", "O"]},
]
CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O
Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER

no DT I-NP O
one NN I-NP O
"""


def task(tmp_path, train, validation=None, ending="jsonl", **options) -> TaskConfig:
    paths = {}
    for name, content in (("train", train), ("validation", train if validation is None else validation)):
        paths[name] = tmp_path / f"{name}.{ending}"
        written = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        paths[name].write_text(written, encoding="utf-8")
    return TaskConfig(**paths, kind="tokens", **options)


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("jsonl", JSONL),
        ("conll", CONLL),
        ("txt", CONLL.replace("\n", "\r\n")),
        ("conll", "EU\tB-ORG\nrejects\tO \nPeter\tB-PER\nBlackburn\tI-PER\n\n\n\nno\tO\none\tO"),
    ],
)
def test_formats_and_schemes_read_the_same(tmp_path, ending, content):
    """Lists or columns, tabs or spaces, IOB1 or IOB2."""
    data = read_task(task(tmp_path, content, ending=ending))
    assert data.label_names == ["O", "B-ORG", "I-ORG", "B-PER", "I-PER"], (
        "both outputs of every type, though I-ORG is never seen"
    )
    assert data.train.texts == [(("EU", "rejects", "Peter", "Blackburn"),), (("no", "one"),)]
    assert data.validation.labels == [[1, 0, 3, 4], [0, 0]]


def test_the_columns_may_have_other_names(tmp_path):
    rows = [{"words": row["tokens"], "ner": row["tags"]} for row in JSONL]
    assert read_task(task(tmp_path, rows, text="words", label="ner")).train.labels[0] == [1, 0, 3, 4]
    plain = TaskConfig(train="a", validation="b", kind="tokens")
    assert (plain.text, plain.label) == ("tokens", "tags")
    assert (TaskConfig(train="a", validation="b").text, TaskConfig(train="a", validation="b").label) == ("text", "label")


@pytest.mark.parametrize(
    ("tags", "read"),
    [
        ("O I-A I-A O", "O B-A I-A O"),
        ("I-A B-A I-A", "B-A B-A I-A"),
        ("B-A I-B I-B", "B-A B-B I-B"),
        ("I-B I-A O I-A", "B-B B-A O B-A"),
        ("B-A-1 I-A-1 I-A", "B-A-1 I-A-1 B-A"),
    ],
)
def test_broken_sequences_begin_an_entity_where_it_begins(tags, read):
    assert to_iob2(tags.split()) == read.split()


GOOD = {"tokens": ["a", "b"], "tags": ["B-X", "O"]}
MISTAKES = {
    "a bad tag": ({"tokens": ["a", "b"], "tags": ["O", "X"]}, "E207", "'X' of word 2 ('b') is not a tag"),
    "another scheme": ({"tokens": ["a"], "tags": ["S-X"]}, "E207", "'S-X' of word 1"),
    "a tag without a type": ({"tokens": ["a"], "tags": ["B-"]}, "E207", "'B-' of word 1"),
    "a number": ({"tokens": ["a"], "tags": [3]}, "E207", "3 of word 1"),
    "no list of tags": ({"tokens": ["a"], "tags": "O"}, "E207", "column 'tags' holds 'O', not tags"),
    "no tags": ({"tokens": ["a"]}, "E207", "column 'tags' holds nothing, not tags"),
    "an empty sentence": ({"tokens": [], "tags": []}, "E206", "column 'tokens' holds [], not words"),
    "no words": ({"tags": ["O"]}, "E206", "column 'tokens' holds nothing, not words"),
    "text": ({"tokens": "a b", "tags": ["O", "O"]}, "E206", "column 'tokens' holds 'a b', not words"),
    "a long text": (
        {"tokens": "so it was " * 9, "tags": ["O"]},
        "E206",
        "column 'tokens' holds 'so it was so it was so it was so it was so it was so it...', not words",
    ),
    "an empty word": ({"tokens": ["a", " "], "tags": ["O", "O"]}, "E206", "word 2 is ' '"),
    "two words for one": ({"tokens": ["New York"], "tags": ["B-X"]}, "E206", "word 1 is 'New York'"),
    "a space that no tokenizer shows": ({"tokens": ["a\u00a0b"], "tags": ["B-X"]}, "E206", "word 1 is 'a\\xa0b'"),
    "half of a character": ({"tokens": ["\ud800"], "tags": ["B-X"]}, "E210", "an unpaired surrogate"),
    "a number for a word": ({"tokens": [7], "tags": ["O"]}, "E206", "word 1 is 7"),
    "too few tags": ({"tokens": ["a", "b"], "tags": ["O"]}, "E214", "2 words and 1 tags"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_have_a_code_and_a_line(tmp_path, mistake):
    row, code, says = MISTAKES[mistake]
    for name, files in (("train", ([GOOD, row], [GOOD])), ("validation", ([GOOD], [GOOD, row]))):
        with pytest.raises(UserError) as caught:
            read_task(task(tmp_path, *files))
        assert str(caught.value).startswith(f"{code} {tmp_path / name}.jsonl:2: {says}")


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        ("a O\nb B-X\n\nc\n", "E210", 4),
        ("a\nb\n", "E210", 1),
        ("a X O\nb B-X\n", "E210", 2),
        ("\n\na B-X\nb E-X\n", "E207", 4),
    ],
)
def test_mistakes_in_columns_are_in_the_line_of_the_word(tmp_path, content, code, line):
    with pytest.raises(UserError, match=rf"{code} .*train.conll:{line}: "):
        read_task(task(tmp_path, content, CONLL, "conll"))


def test_a_type_that_training_lacks_and_files_without_entities(tmp_path):
    with pytest.raises(
        UserError, match=r"E209 .*validation.conll:5: entities of type 'PER' never occur in training. Training has: ORG"
    ):
        read_task(task(tmp_path, "EU I-ORG\n", CONLL, "conll"))
    for files in (("a O\n", CONLL), (CONLL, "a O\n")):
        with pytest.raises(UserError, match=r"E208 .*every word has the tag O"):
            read_task(task(tmp_path, *files, "conll"))
    with pytest.raises(UserError, match=r"E208 .*150 types of entities"):
        read_task(task(tmp_path, "".join(f"a B-{n}\n" for n in range(150)), ending="conll"))
    with pytest.raises(UserError, match=r"E205 .*no column 'text'"):
        read_task(task(tmp_path, CONLL, ending="conll").model_copy(update={"kind": "classification", "text": "text"}))
    with pytest.raises(ValidationError, match="a task of kind tokens reads one column"):
        task(tmp_path, JSONL, text=["tokens", "other"])


def test_a_subset_needs_every_type(tmp_path):
    rows = [GOOD] * 19 + [{"tokens": ["c"], "tags": ["I-Y"]}]
    assert len(read_task(task(tmp_path, rows, [GOOD], subset={"share": 0.95, "seed": 1})).train) == 19
    with pytest.raises(UserError, match=r"E211 .*holds no entity of type 'Y'"):
        read_task(task(tmp_path, rows, [GOOD], subset={"share": 0.05}))


# --- tokens ---


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT's: pieces, punctuation apart, control characters gone."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "black", "##burn", "##s", "u", ".", "s", "eu"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def bytes_of_words(trim: bool) -> PreTrainedTokenizerFast:
    """As RoBERTa's and ModernBERT's: bytes, a space belongs to the word behind it."""
    vocabulary = {one: n for n, one in enumerate(("<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    vocabulary |= {"ĠE": len(vocabulary), "ĠEU": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "E"), ("ĠE", "U")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=trim, add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def encoded(tokenizer, sentences, max_length: int = 40):
    labels = [list(range(len(words))) for words in sentences]
    split = Split([(tuple(words),) for words in sentences], labels, [1 + 10 * row for row in range(len(sentences))])
    config = TaskConfig(train="t.conll", validation="v.conll", kind="tokens", max_length=max_length)
    return KIND.encode(tokenizer, split, config, config.train)


def test_a_word_is_labelled_at_its_first_token():
    rows, labels = encoded(word_pieces(), [["Blackburns", "U.S.", "EU"], ["eu"]])
    ids = [2, 4, 5, 6, 7, 8, 9, 8, 10, 3]
    assert rows[0]["input_ids"] == ids and "offset_mapping" not in rows[0]
    assert labels.tolist() == [[-100, 0, -100, -100, 1, -100, -100, -100, 2, -100], [-100, 0, *[-100] * 8]]


@pytest.mark.parametrize("trim", [True, False])
def test_spaces_belong_to_words_where_a_tokenizer_takes_them_so(trim):
    """The tokens are those of the running text, as the model was pretrained."""
    tokenizer = bytes_of_words(trim)
    rows, labels = encoded(tokenizer, [["né", "EU", "x y"]])
    assert rows[0]["input_ids"] == tokenizer("né EU x y")["input_ids"]
    words = tokenizer.convert_ids_to_tokens(
        [token for token, label in zip(rows[0]["input_ids"], labels[0], strict=True) if label >= 0]
    )
    assert words[:2] == ["n", "ĠEU"] and words[2] in ("Ġ", "x")


def test_places_where_spaces_have_tokens_of_their_own_and_words_have_none():
    words = ["ab", "c", "d"]
    assert first_tokens([(0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (0, 0)], words) == [1, 4, 5]
    assert first_tokens([(0, 2), (2, 4)], words) == [0, 1, None], "cut off"
    assert first_tokens([(0, 4), (5, 6)], words) == [0, None, 1], "one token for two words is the first's"
    assert first_tokens([(0, 0), (0, 2), (5, 6), (0, 0)], words) == [1, None, 2], "nothing to the tokenizer"


def test_no_word_is_left_out_of_the_score():
    with pytest.raises(UserError) as caught:
        encoded(word_pieces(), [["eu"], ["eu"] * 5, ["eu"] * 7], max_length=6)
    assert str(caught.value).startswith(
        "E213 t.conll:11: 2 of 3 sentences are longer than max_length 6, the longest 9 tokens. Set task.max_length to 9"
    )
    with pytest.raises(UserError, match=r"E213 t.conll:12: the tokenizer produces no separate token for word 2, '\\u200b'"):
        encoded(word_pieces(), [["eu"], ["eu", "\u200b", "eu"]])


# --- answers ---

RNG = np.random.default_rng(0)
LABELS = np.array([[-100, 1, 2, -100, 0], [3, -100, -100, -100, -100], [-100, 0, 1, 3, 4]])
ANSWERS = RNG.normal(size=(8, 5)).astype(np.float32)


def test_answers_go_into_rows_and_batches_and_back():
    assert rows_of(LABELS).tolist() == [0, 0, 0, 1, 2, 2, 2, 2] and rows_of(np.zeros(3)).tolist() == [0, 1, 2]
    rows = by_row(ANSWERS, LABELS)
    assert [len(one) for one in rows] == [3, 1, 4] and np.array_equal(np.concatenate(rows), ANSWERS)
    batch = spread([rows[1], rows[0]], LABELS[[1, 0]])
    assert batch.shape == (2, 5, 5) and np.array_equal(
        np.concatenate([predictions_in(*one) for one in zip(batch, LABELS[[1, 0]], strict=True)]),
        np.concatenate([rows[1], rows[0]]),
    )
    assert not batch[LABELS[[1, 0]] == IGNORED].any()
    numbers = np.arange(6.0).reshape(3, 2)
    assert by_row(numbers, np.zeros(3)) is numbers and np.array_equal(spread(list(numbers), np.zeros(3)), numbers)
    assert cut(LABELS, 3).shape == (3, 3) and cut(np.zeros(7), 3).shape == (7,)


def test_a_batch_is_as_long_as_its_rows():
    rows = [{"input_ids": [5] * n, "attention_mask": [1] * n} for n in (5, 1, 5)]
    items = TrainingRows(rows, LABELS.tolist(), by_row(ANSWERS, LABELS), KIND)
    batch = Collator(0)([items[1]])
    assert batch["labels"].tolist() == [[3]] and torch.equal(batch["teacher"][0], torch.from_numpy(ANSWERS[3:4]))
    assert Collator(0)([items[1], items[0]])["teacher"].shape == (2, 5, 5)


def test_predictions_are_at_the_words_whatever_shares_a_batch():
    """One row at a time, or with longer ones: in the order of the rows."""
    model = tiny("bert", auto=AutoModelForTokenClassification)
    rows = [{"input_ids": [4 + n] * n, "attention_mask": [1] * n} for n in (3, 9, 2, 5)]
    labels = np.full((4, 9), IGNORED)
    for row, n in enumerate((3, 9, 2, 5)):
        labels[row, 1:n] = 0
    found = predict(torch_forward(model), rows, 1, labels=labels, batch_size=3)
    expected = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0, 1:].detach().numpy() for row in rows]
    assert found.shape == (2 + 8 + 1 + 4, 3) and np.allclose(found, np.concatenate(expected), atol=1e-5)
    others = in_other_batches(torch_forward(model), rows, 1, labels=labels)
    by_length = np.concatenate([expected[row] for row in (2, 0, 3, 1)])
    assert all(np.allclose(one, by_length, atol=1e-5) for one in others.values())


# --- metrics ---


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """Entities as seqeval's default reads them, by hand."""
    found, start = set(), None
    for place, (last, tag) in enumerate(zip(["O", *tags], [*tags, "O"], strict=True)):
        if last != "O" and (tag == "O" or tag[0] == "B" or tag[2:] != last[2:]):
            found.add((last[2:], start, place))
        if tag != "O" and (last == "O" or tag[0] == "B" or tag[2:] != last[2:]):
            start = place
    return found


def outputs_of(predicted: list[list[int]]) -> np.ndarray:
    return np.eye(len(NAMES), dtype=np.float32)[np.concatenate(predicted)]


def f1(outputs: np.ndarray, labels: np.ndarray) -> float:
    return KIND.metric.value(*metric_inputs(outputs, labels))


def test_entities_are_counted_as_seqeval_counts_them():
    """On random sequences, most of them broken; the figures by sentence are what intervals draw."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 9) for _ in range(300)]
    true, predicted = ([[draw.choice((0, 0, 1, 2, 3, 4)) for _ in range(n)] for n in lengths] for _ in range(2))
    predicted = [list(one) if draw.random() < 0.5 else other for one, other in zip(true, predicted, strict=True)]
    labels = np.full((300, 12), IGNORED)
    for row, tags in enumerate(true):
        labels[row, draw.sample(range(12), len(tags))] = 0  # anywhere, in order
        labels[row, labels[row] == 0] = tags
    outputs = outputs_of(predicted)
    pairs = [[spans([NAMES[tag] for tag in tags]) for tags in pair] for pair in zip(true, predicted, strict=True)]
    right, said, there = (
        sum(map(len, sets)) for sets in ((a & b for a, b in pairs), (b for _, b in pairs), (a for a, _ in pairs))
    )
    quality = KIND.quality(*metric_inputs(outputs, labels))
    assert list(quality) == ["f1", "interval", "accuracy", "rows"] and quality["rows"] == 300
    assert quality["f1"] == pytest.approx(2 * right / (said + there)) and 0.3 < quality["f1"] < 0.9
    equal = [a == b for pair in zip(true, predicted, strict=True) for a, b in zip(*pair, strict=True)]
    assert quality["accuracy"] == pytest.approx(np.mean(equal))
    found, known = metric_inputs(outputs, labels)
    assert found[:, 0].tolist() == [len(a & b) for a, b in pairs] and known[:, 0].tolist() == [len(a) for a, _ in pairs]
    low, high = quality["interval"]
    assert low < quality["f1"] < high and high - low < 0.2


def test_a_span_must_be_whole_and_of_its_type():
    """Peter Blackburn: half of him, him and one more, a place, and two halves are all wrong."""
    labels = np.array([[0, 3, 4, 0]])
    assert f1(outputs_of([[0, 3, 4, 0]]), labels) == 1.0
    for wrong in ([0, 3, 0, 0], [0, 3, 4, 4], [0, 1, 2, 0], [0, 3, 3, 0], [0, 0, 0, 0]):
        assert f1(outputs_of([wrong]), labels) == 0.0
    assert f1(outputs_of([[0, 4, 4, 0]]), labels) == 1.0, "an I- that begins is a beginning"
    assert f1(outputs_of([[0, 3, 2, 0]]), labels) == 0.0
    assert f1(outputs_of([[0], [0]]), np.array([[0], [0]])) == 0.0, "nothing to find and nothing found"


def test_an_entity_ends_with_its_sentence():
    labels = np.array([[3, IGNORED], [4, IGNORED]])
    found, there = metric_inputs(outputs_of([[3], [4]]), labels)
    assert found[:, 0].tolist() == there[:, 0].tolist() == [1, 1]


def test_one_tag_moves_f1_by_no_more_than_its_grain():
    """Which is what `compress verify` allows between machines; few entities in many words move it far."""
    labels = RNG.choice([0, 0, 0, 0, 1, 2, 3], size=(6, 9))
    true = outputs_of(labels.tolist())
    assert KIND.grain(np.array([[3, 0], [0, 1]])) == 1.5
    for place, tag in itertools.product(range(len(true)), range(5)):
        flipped = true.copy()
        flipped[place] = np.eye(5)[tag]
        assert abs(KIND.metric.value(*metric_inputs(flipped, labels)) - 1) <= KIND.grain(labels) < 0.5


def test_parity_tells_the_row_and_gates_by_f1():
    labels = np.tile(np.array([[IGNORED, 0, 3, 4, 0]]), (50, 1))
    outputs = 4 * outputs_of([[0, 3, 4, 0]] * 50) + RNG.normal(scale=0.1, size=(200, 5)).astype(np.float32)
    assert compare("hop", "int8", outputs, outputs.copy(), labels, task=KIND).passed
    broken = outputs.copy()
    broken[4 * 17 + 1] = broken[4 * 17]
    result = compare("hop", "int8", outputs, broken, labels, task=KIND)
    # one entity of 50 is 1.3 points, and by chance alone there might have been none
    assert result.verdict == "not shown" and result.rows == 50 and result.worst_row == 17 and result.agreement == 0.995
    assert result.metric_reference == 1.0 and result.metric_candidate < 0.99
    assert result.bound.startswith("tags agree on 98% but for chance, no loss of more than 1.0 points of entity F1 is shown")
    broken[1 : 4 * 5 : 4] = broken[: 4 * 5 : 4]
    result = compare("hop", "int8", outputs, broken, labels, task=KIND)
    assert not result.passed and result.failed == ("metric",) and result.loss.at_least > 0.01
    broken[4 * 17 + 1] = np.nan
    assert compare("hop", "fp32", outputs, broken, labels, task=KIND).worst_row == 17


# --- losses ---

TAGS = torch.tensor([[-100, 1, 0, -100, 2, -100, 0, 0, -100], [0, -100, *[-100] * 7], [2, 2, -100, 1, *[-100] * 5]])


def by_hand(logits: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the words of each row, (rows,)."""
    return torch.stack(
        [functional.cross_entropy(one[tags >= 0], tags[tags >= 0]) for one, tags in zip(logits, TAGS, strict=True)]
    )


def test_a_row_counts_as_one_however_many_words_it_has():
    logits, teacher = (torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    rows = by_hand(logits)
    assert torch.allclose(KIND.loss(logits, TAGS), rows.mean()) and torch.allclose(KIND.loss(logits, TAGS, "sum"), rows.sum())
    assert torch.allclose(KIND.loss(logits[1:2], TAGS[1:2]), rows[1])
    soft = [
        functional.kl_div((one[tags >= 0] / 2).log_softmax(-1), (other[tags >= 0] / 2).softmax(-1), reduction="batchmean")
        for one, other, tags in zip(logits, teacher, TAGS, strict=True)
    ]
    expected = 0.5 * rows.mean() + 0.5 * 4 * torch.stack(soft).mean()
    assert torch.allclose(KIND.distillation(logits, teacher, TAGS), expected)
    hidden = teacher.clone()
    hidden[TAGS < 0] = 1e3
    assert torch.allclose(KIND.distillation(logits, hidden, TAGS), expected), "what has no label teaches nothing"


def test_a_live_teacher_and_scores_ask_the_same_loss():
    dense, student = (tiny("bert", auto=AutoModelForTokenClassification) for _ in range(2))
    with torch.no_grad():
        student.classifier.bias += torch.tensor([1.0, 0.0, -1.0])
    outputs, loss = HiddenTeacher(dense, student, logits=True).loss(student, dict(encoding()), TAGS, KIND)
    taught = dense(**encoding()).logits
    assert torch.isclose(loss, KIND.distillation(outputs.logits, taught, TAGS)), "its hidden states are the teacher's own"
    scores = loss_scores(student, "neurons", "taylor", [(encoding(), TAGS)], kind=KIND)
    alone = [({key: one[row : row + 1] for key, one in encoding().items()}, TAGS[row : row + 1]) for row in range(3)]
    apart = loss_scores(student, "neurons", "taylor", alone, kind=KIND)
    assert all(torch.allclose(one, other) and one.any() for one, other in zip(scores, apart, strict=True))


# --- models and files ---


@pytest.mark.parametrize("architecture", ENCODERS)
def test_a_pruned_and_tuned_model_lives_on_disk(architecture, tmp_path):
    """State, delta file and checkpoint carry a head on tokens, on every encoder; its cost is that of every token."""
    base = write_model(tmp_path / "base", architecture)
    model, found = build(base, NAMES, 3, TOKENS), resolve(str(base))
    assert compression_of(model).head_origin == "fresh" and type(model).__name__.endswith("ForTokenClassification")
    assert shape_of(weightless_model(base, NAMES, TOKENS)) == shape_of(model) and shape_of(model).token_macs >= 5 * 32
    assert shape_of(model).head_macs == 0
    apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query",), group="1"))
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(0.1)
    remove(model, {0: Removal([1], [0, 5, 7]), 1: Removal([0, 2], list(range(20)))})
    rows = {"input_ids": torch.tensor([[2, 5, 9, 3], [2, 7, 3, 0]]), "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]])}
    expected = model(**rows).logits
    assert expected.shape == (2, 4, 5)
    facts = {"base": str(base), "base_sha256": found.sha256, "label_names": NAMES}
    save_state(model, tmp_path / "state", **facts)
    delta_file.write(model, tmp_path / "delta.safetensors", **facts)
    save_checkpoint(merged_copy(model), tmp_path / "checkpoint", base)
    for again in (load(tmp_path / "state"), load(base, delta=tmp_path / "delta.safetensors"), load(tmp_path / "checkpoint")):
        assert torch.equal(again(**rows).logits, expected) and list(again.config.id2label.values()) == NAMES


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(ENCODERS)))
def test_what_reads_one_way_has_no_tags(architecture, tmp_path):
    base = write_model(tmp_path / "base", architecture)
    for make in (lambda: weightless_model(base, NAMES, TOKENS), lambda: build(base, NAMES, auto_class=TOKENS)):
        with pytest.raises(UserError, match=f"E309 .*a '{architecture}' has no token-classification head"):
            make()


def test_a_delta_of_words_is_not_put_on_a_model_of_sentences(tmp_path):
    """Their heads have the same names and sizes."""
    base = write_model(tmp_path / "base")
    found = resolve(str(base))
    words, sentences = (remember(build(base, NAMES, 0, *one), found.reference, found.sha256) for one in ([TOKENS], []))
    facts = {"base": str(base), "base_sha256": found.sha256, "label_names": NAMES}
    for name, model in (("words", words), ("sentences", sentences)):
        apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query",), group="1"))
        delta_file.write(model, tmp_path / name, **facts)
    for name, model in (("words", sentences), ("sentences", words)):
        with pytest.raises(UserError, match=r"E311 .*the live model is of AutoModelFor"):
            load(model, delta=tmp_path / name)
    assert load(words, delta=tmp_path / "words") is words
    delta_file.write(words, tmp_path / "body", **facts, head=False)
    assert load(sentences, delta=tmp_path / "body") is sentences, "without a head it is of neither"
    write_peft(words, tmp_path / "peft", base=str(base))
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["task_type"] == "TOKEN_CLS"


def test_an_auto_class_of_ours_or_none(tmp_path, monkeypatch):
    """A name in a file builds nothing else."""
    base = write_model(tmp_path / "base")
    model, found = build(base, NAMES), resolve(str(base))
    apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query",), group="1"))
    facts = {"base": str(base), "base_sha256": found.sha256, "label_names": NAMES}
    delta_file.write(model, tmp_path / "written", **facts)
    for name in ("Trainer", "AutoModelForMultipleChoice", 3, None):
        monkeypatch.setattr("compressor.checkpoint.class_facts", lambda model, name=name: {"auto_class": name})
        save_state(model, tmp_path / "state", **facts)
        sealed(tmp_path / "written", tmp_path / "delta", lambda one, name=name: {**one, "auto_class": name})
        for code, read in (("E305", lambda: load(tmp_path / "state")), ("E310", lambda: load(base, delta=tmp_path / "delta"))):
            with pytest.raises(UserError, match=f"{code} .*Auto class"):
                read()


def test_a_head_of_another_kind_and_name_is_told(tmp_path):
    """RoBERTa's classifier of sentences has two layers, that of words one: what is there is not silently gone."""
    base = write_model(tmp_path / "base", "roberta")
    save_checkpoint(build(base, NAMES), tmp_path / "tuned", base)
    assert compression_of(build(base, NAMES, 0, TOKENS)).head_origin == "fresh"
    assert compression_of(build(tmp_path / "tuned", NAMES, 0, TOKENS)).head_origin == "replaced"


def test_a_head_that_has_exactly_these_tags_is_kept(tmp_path):
    base = write_model(tmp_path / "base")
    save_checkpoint(build(base, NAMES, 5, TOKENS), tmp_path / "tuned", base)
    assert compression_of(build(tmp_path / "tuned", NAMES, 0, TOKENS)).head_origin == "kept"
    assert (
        compression_of(build(tmp_path / "tuned", NAMES)).head_origin
        == compression_of(build(tmp_path / "tuned", NAMES[:3], 0, TOKENS)).head_origin
        == "replaced"
    )


# --- the client's side ---


def test_a_client_is_told_a_tag_for_each_word():
    tokenizer = word_pieces()
    text = KIND.written("  Blackburn \n U.S.  eu ")
    encoding = tokenizer.backend_tokenizer.encode(text)
    logits = np.zeros((len(encoding.ids), 5))
    for place, tag in ((1, 3), (2, 1), (3, 1), (7, 2)):
        logits[place, tag] = 1.0
    told = KIND.prediction(NAMES, logits, text, encoding)
    assert (told.words, told.tags) == (("Blackburn", "U.S.", "eu"), ("B-PER", "B-LOC", "I-LOC"))
    assert str(told) == "Blackburn/B-PER U.S./B-LOC eu/I-LOC"
    with pytest.raises(UserError, match=r"E717 the tokenizer produces no token for word 2 of"):
        KIND.prediction(NAMES, logits, "u \x07", tokenizer.backend_tokenizer.encode("u \x07"))
    tokenizer.backend_tokenizer.enable_truncation(4)
    with pytest.raises(UserError, match=r"E717 'u blackburn' is longer than the model reads"):
        KIND.prediction(NAMES, logits, "u blackburn", tokenizer.backend_tokenizer.encode("u blackburn"))
    for wrong in (" ", ("a", "b")):
        with pytest.raises(UserError, match="E717"):
            KIND.written(wrong)
