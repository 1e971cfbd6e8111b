"""Kinds of tasks with rows of their own form: what is read, what is wrong, what is learnt, and how quality is computed."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional

from compressor.errors import UserError, UserErrors
from compressor.models.build import build
from compressor.tasks import TaskConfig, features
from compressor.tasks.data import read_data, task_tokenizer, tensor_batches, tokenized
from compressor.tasks.features import length_of, model_rows, predict, tokens_of, torch_forward
from compressor.tasks.kinds.best_spans import MOST_TOKENS, answer_characters, best_span
from compressor.tasks.kinds.marked import place_of
from compressor.tasks.kinds.span_marks import has_read_marks
from compressor.tasks.kinds.spans import BEGINS, ENDS, MARKS, exact, normalized, span_of, word_f1
from compressor.tasks.predictions import IGNORED, by_row, spread
from compressor.tasks.reading import read_task
from compressor.tasks.task_kind import kind_of
from compressor.tasks.texts import new_texts, read_texts
from compressor.training.training_rows import Collator, TrainingRows
from export.parity.compare import in_other_batches
from serving.clients.by_choice import best_choices
from tests.tiny import WRITERS, write_model

GOOD = {
    "multilabel": [
        {"text": "fine and dull", "labels": ["joy", "anger"]},
        {"text": "fine", "labels": "joy"},
        {"text": "the story", "labels": []},
    ],
    "spans": [
        {"question": "who", "context": "a fine film", "answers": {"text": ["fine", "a fine"], "answer_start": [2, 0]}},
        {"question": "who", "context": "a fine film", "answers": [{"text": "film", "answer_start": 7, "id": 3}]},
        {"question": "what", "context": "dull", "answers": {"text": [], "answer_start": []}},
    ],
    "choices": [
        {"text": "the film", "choices": ["was fine", "was a very dull story"], "label": 0},
        {"text": "the plot", "choices": '["was dull", "was good"]', "label": "1"},
        {"text": "the scene", "choices": ["was bad", "was good"], "label": 1},
    ],
    "marked": [
        {"text": "Mark told him: He lost, he left.", "span1": "Mark", "span2": [6, "left"], "label": "no"},
        {"text": "Mark told him, he left.", "span1": [0, "Mark"], "span2": '[3, "he"]', "label": "yes"},
    ],
}
"""Kind -> rows without a mistake."""


def task(folder, kind, train, validation=None, **keys) -> TaskConfig:
    paths = {}
    for name, rows in (("train", train), ("validation", train if validation is None else validation)):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskConfig(**paths, kind=kind, **keys)


MISTAKES = [
    ("multilabel", {"labels": '["joy", "ang'}, "E220", "not a list of labels"),
    ("multilabel", {"labels": float("nan")}, "E220", "holds nan, not a list of labels"),
    ("multilabel", {"labels": None}, "E220", "holds nothing, not a list of labels"),
    ("multilabel", {"labels": ["joy", 0.5]}, "E220", "0.5 in column 'labels' is not a label"),
    ("multilabel", {"labels": "joy,, anger"}, "E220", "'' in column 'labels' is not a label"),
    ("multilabel", {"labels": "joy; joy"}, "E220", "label 'joy' appears twice"),
    ("multilabel", {"labels": "2, 02"}, "E235", "label '02' is the same number as '2'"),
    ("multilabel", {"text": " "}, "E206", "not text"),
    ("choices", {"choices": "was dull"}, "E223", "holds 'was dull', not a list of two choices"),
    ("choices", {"choices": ["was dull"]}, "E223", "not a list of two choices or more"),
    ("choices", {"choices": ["was dull", " "]}, "E206", "column 'choices' holds ' '"),
    ("choices", {"choices": None}, "E223", "holds nothing, not a list of two choices"),
    ("choices", {"label": None}, "E224", "holds nothing, not the number"),
    ("choices", {"label": 2}, "E224", "holds 2, not the number of one of 2 choices"),
    ("choices", {"label": float("nan")}, "E224", "holds nan"),
    ("choices", {"label": True}, "E224", "holds True"),
    ("marked", {"span1": "Peter"}, "E225", "'Peter' of column 'span1' occurs 0 times in the text, not once"),
    ("marked", {"span1": [1, "Mark"]}, "E225", "occurs 0 times in the text at word 1"),
    ("marked", {"span1": [99, "Mark"]}, "E225", "at word 99"),
    ("marked", {"span1": float("nan")}, "E225", "holds nan, not a span"),
    ("marked", {"span1": None}, "E225", "holds nothing, not a span"),
    ("marked", {"text": "he said he left, Mark"}, "E225", "at word 0"),
    ("marked", {"text": "Mark [his] he left", "span2": "he"}, "E226", "the text contains '[', which marks spans"),
    ("marked", {"span1": "told him", "span2": "him"}, "E226", "the spans overlap"),
    ("marked", {"label": " "}, "E207", "not a class"),
    ("marked", {"label": 1}, "E235", "holds an integer, 1, where line 1 holds text, 'no'"),
    ("spans", {"answers": float("nan")}, "E221", "holds nan, not answers"),
    ("spans", {"answers": None}, "E221", "holds nothing, not answers"),
    ("spans", {"answers": "fine"}, "E221", "holds 'fine', not answers"),
    ("spans", {"answers": ["fine"]}, "E221", "not answers"),
    ("spans", {"answers": {"text": ["fine"], "answer_start": []}}, "E221", "not answers"),
    ("spans", {"answers": {"text": [""], "answer_start": [0]}}, "E221", "not answers"),
    ("spans", {"answers": {"text": ["fine"], "answer_start": [True]}}, "E221", "not answers"),
    ("spans", {"answers": {"text": ["fine"], "answer_start": [3]}}, "E222", "'fine' is not in the context at character 3"),
    ("spans", {"context": None}, "E206", "column 'context' holds nothing, not text"),
]


@pytest.mark.parametrize(("kind", "change", "code", "said"), MISTAKES)
def test_a_mistake_in_a_row_is_told_with_its_line(kind, change, code, said, tmp_path):
    rows = GOOD[kind]
    with pytest.raises(UserErrors) as caught:
        read_task(task(tmp_path, kind, rows, [rows[0], {**rows[1], **change}, *rows[2:]]))
    (fault,) = caught.value.errors
    assert fault.code == code and said in fault.what and fault.where.endswith("validation.jsonl:2")


@pytest.mark.parametrize(
    ("kind", "train", "validation", "code", "said"),
    [
        ("multilabel", GOOD["multilabel"], [{"text": "a", "labels": "love"}], "E209", "'love' never occurs in training"),
        ("multilabel", GOOD["multilabel"], GOOD["multilabel"][2:], "E208", "no row has a label"),
        ("spans", GOOD["spans"], GOOD["spans"][2:], "E208", "no row with an answer"),
        ("choices", GOOD["choices"], [{"text": "a", "choices": ["b", "c", "d"], "label": 0}], "E223", "3 choices"),
        ("multilabel", GOOD["multilabel"][1:], None, "E208", "1 distinct labels in 2 rows"),
    ],
)
def test_files_that_cannot_be_learnt_or_measured(kind, train, validation, code, said, tmp_path):
    with pytest.raises(UserError, match=f"{code} .*{said}"):
        read_task(task(tmp_path, kind, train, validation))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def data_of(kind, tmp_path, folder, rows=24):
    config = WRITERS[kind](tmp_path, rows=rows)
    config |= {key: tmp_path / config[key] for key in ("train", "validation")}
    return read_data(folder, TaskConfig(**config)), TaskConfig(**config)


@pytest.mark.parametrize("kind", [*WRITERS])
def test_texts_that_are_tokenized_in_parts_give_the_same_rows(kind, tmp_path, folder, monkeypatch):
    if kind == "text2text":
        folder = write_model(tmp_path / "t5", "t5", auto="AutoModelForSeq2SeqLM")
    if kind == "generation":
        folder = write_model(tmp_path / "gpt2", "gpt2", auto="AutoModelForCausalLM")
    whole, calls = data_of(kind, tmp_path, folder)[0], []
    tokenizer = type(task_tokenizer(folder, whole.kind))
    call = tokenizer.__call__

    def counted(self, *columns, text_target=None, **options):
        given = text_target or columns[0]
        calls.append(len(given) if isinstance(given, list) else 1)
        return call(self, *columns, text_target=text_target, **options)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    monkeypatch.setattr(features, "PART", 400)
    parts = data_of(kind, tmp_path, folder)[0]
    for ours, theirs in ((parts.train, whole.train), (parts.validation, whole.validation)):
        assert ours.tokens == theirs.tokens and np.array_equal(ours.labels, theirs.labels)
    if kind == "spans":
        assert parts.validation.kind.metric_inputs == whole.validation.kind.metric_inputs
    assert len(calls) > 4 and max(calls) < len(whole.validation), "a part at a time"


@pytest.mark.parametrize("kind", [*GOOD, "text2text"])
def test_losses_are_means_over_rows_whatever_the_batch(kind, tmp_path, folder):
    """A batch of 8 gives the step of two of 4; a teacher equal to the student adds nothing."""
    if kind == "text2text":
        folder = write_model(tmp_path / "t5", "t5", auto="AutoModelForSeq2SeqLM")
    data, _ = data_of(kind, tmp_path, folder)
    model, row_kind = build(folder, data.label_names, auto_class=data.kind.auto_class).eval(), data.kind
    chosen = data.train.draw(8, 0)

    def outputs_of(rows):
        ((inputs, labels),) = tensor_batches(rows, data.pad_id, 8)
        return model(**inputs).logits, labels

    with torch.no_grad():
        outputs, labels = outputs_of(chosen)
        whole = row_kind.loss(outputs, labels)
        halves = [row_kind.loss(*outputs_of(chosen.at(part))) for part in (range(4), range(4, 8))]
        assert torch.isclose(whole, (halves[0] + halves[1]) / 2, atol=1e-5)
        assert torch.isclose(row_kind.loss(outputs, labels, reduction="sum"), 8 * whole, atol=1e-4)
        assert torch.isclose(row_kind.distillation(outputs, outputs, labels), whole / 2, atol=1e-5)
        assert abs(row_kind.imitation(outputs, outputs, labels)) < 1e-6
        assert row_kind.imitation(outputs, outputs * torch.arange(outputs.numel()).reshape(outputs.shape) / 9, labels) > 1e-4
    # as the trainer has a teacher's stored outputs: row by row, put together again for a batch
    stored = by_row(predict(torch_forward(model), chosen.tokens, data.pad_id, labels=chosen.labels), chosen.labels)
    batch = Collator(data.pad_id)([TrainingRows(chosen.tokens, chosen.labels, stored, row_kind)[place] for place in range(8)])
    teacher, labels = batch.pop("teacher"), batch.pop("labels")
    with torch.no_grad():
        outputs = model(**batch).logits
    assert torch.isclose(row_kind.distillation(outputs, teacher, labels), whole / 2, atol=1e-5)


@pytest.mark.parametrize("kind", GOOD)
def test_texts_without_labels_are_read_as_rows_are(kind, tmp_path, folder):
    data, config = data_of(kind, tmp_path, folder)
    (tmp_path / "more").mkdir()
    path = tmp_path / "more" / WRITERS[kind](tmp_path / "more", rows=300)["train"]
    texts = new_texts(read_texts(path, config), config, read_task(config), path)
    more = tokenized(folder, texts, config, path)
    joined = data.train.followed_by(more)
    assert len(joined) == len(data.train) + len(more) and len(more) > 0
    assert data.kind.unlabelled.loss(torch.ones(1, 2, 2), None) == 0


@pytest.mark.parametrize(("kind", "columns"), [("spans", "question"), ("choices", "text"), ("multilabel", ["a", "b", "c"])])
def test_a_wrong_number_of_columns_is_refused(kind, columns):
    with pytest.raises(ValidationError, match=r"reads 2 (to 21 )?columns|names one column, or two"):
        TaskConfig(train="a", validation="b", kind=kind, text=columns)


# --- answers to questions ---


def test_answers_are_compared_as_in_squad():
    """The examples of its evaluation script: case, punctuation, articles and spaces do not count."""
    assert normalized("The  'Cat', sat. on an A-frame") == ["cat", "sat", "on", "aframe"]
    assert exact("the Broncos!", "Broncos") == 1 and word_f1("Denver Broncos", "the broncos") == pytest.approx(2 / 3)
    assert word_f1("", "") == exact("", "the") == 1 and word_f1("", "x") == word_f1("x", "") == 0
    assert word_f1("a b b", "b b b") == pytest.approx(2 * 2 / (2 + 3)), (
        "the article a does not count; words count as often as both"
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_best_span_is_that_of_all_pairs(seed):
    logits = np.random.default_rng(seed).normal(size=(50, 2)) * 3
    pairs = [(0, 0), *((i, j) for i in range(1, 50) for j in range(i, min(50, i + MOST_TOKENS)))]
    expected = max(pairs, key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1])
    first, last, score = best_span(logits)
    chances = np.exp(logits) / np.exp(logits).sum(axis=0)
    assert (first, last) == expected and score == pytest.approx(chances[first, 0] * chances[last, 1])
    assert best_span(np.zeros((1, 2))) == (0, 0, 1.0)


def test_answers_are_marked_at_tokens_and_scored_by_their_text(tmp_path, folder):
    """A model that is right gets 1 whatever the order of the rows, and the best of several answers counts."""
    data = read_data(folder, task(tmp_path, "spans", GOOD["spans"]))
    rows = data.validation
    # [CLS] who [SEP] a fine film [SEP]
    assert rows.labels[0].tolist()[:7] == [0, IGNORED, IGNORED, 0, BEGINS + ENDS, 0, IGNORED]
    assert rows.labels[2].tolist()[:4] == [2 * MARKS + BEGINS + ENDS, IGNORED, IGNORED, 2 * MARKS]
    for order in ([0, 1, 2], [2, 0], [1]):
        labels = rows.labels[order]
        right = np.stack([(labels[labels != IGNORED] & mark > 0) * 9.0 for mark in (BEGINS, ENDS)], axis=1)
        assert data.kind.quality(*rows.kind.metric_inputs(right, labels))["exact_match"] == 1
        wrong = np.zeros_like(right)
        assert rows.kind.metric_inputs(wrong, labels)[0].tolist() == [[float(row == 2)] * 2 for row in order], "no answer"
    partly = np.zeros((4, 2))
    partly[1, 0] = partly[3, 1] = 5.0
    ((f1, match),) = rows.kind.metric_inputs(partly, rows.labels[:1])[0]
    assert f1 == pytest.approx(2 / 3) and match == 0, "'a fine film' for 'fine' or 'a fine'"


def test_an_answer_has_no_space_around_it():
    """Tokenizers of sentence pieces, and some of bytes, count the space before a word as part of its token."""
    words = ["[CLS]", "[SEP]", "[UNK]", "\u2581who", "\u2581a", "\u2581fine", "\u2581film"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    pair = "[CLS] $A [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(pair=pair, special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    encoding, logits = tokenizer.encode("who", "a fine film"), np.zeros((7, 2))
    logits[4, 0] = logits[5, 1] = 9.0
    assert encoding.offsets[4] == (1, 6)
    found = kind_of("spans").prediction(["start", "end"], logits, ("who", "a fine film"), encoding)
    assert (found.answer, found.start, found.end) == ("fine film", 2, 11)
    assert answer_characters("a  b", [(0, 0), (0, 1), (1, 2), (2, 4)], 2, 2) == (0, 0), "white space alone is no answer"


def test_an_answer_takes_no_token_that_touches_it():
    """In "a film." the answer film has neither the token that ends where it begins, nor the one that begins where it ends."""
    assert span_of((2, 6), [(0, 0), (0, 2), (2, 6), (6, 7)]) == (2, 2)


def test_a_row_that_would_be_cut_is_refused(tmp_path, folder):
    with pytest.raises(UserErrors, match=r"E213 .*2 of 3 rows are longer than max_length 6, the longest 7 tokens"):
        read_data(folder, task(tmp_path, "spans", GOOD["spans"], max_length=6))


# --- multiple choice ---


def test_columns_and_lists_of_choices_read_the_same(tmp_path):
    split = [{"text": row["text"], "a": "was dull", "b": "was good", "label": row["label"]} for row in GOOD["choices"][1:]]
    columns = read_task(task(tmp_path, "choices", split, text=["text", "a", "b"]))
    assert columns.train.texts[0] == ("the plot", "was dull", "was good") and columns.train.labels == [1, 1]
    assert columns.label_names == ["score of 2 choices"] == read_task(task(tmp_path, "choices", GOOD["choices"])).label_names


def test_a_row_is_its_pairs_in_every_forward_pass(tmp_path, folder):
    """Logits of a row are the scores of its pairs, whatever else is in the batch; a pair alone gets the same score."""
    config = task(tmp_path, "choices", GOOD["choices"])
    data = read_data(folder, config)
    model, rows = build(folder, data.label_names).eval(), data.validation
    forward = torch_forward(model)
    scores = predict(forward, rows.tokens, data.pad_id, labels=rows.labels)
    pairs = predict(forward, model_rows(rows.tokens), data.pad_id)
    assert scores.shape == (3, 2) and np.allclose(scores.ravel(), pairs.ravel(), atol=1e-6)
    for others in in_other_batches(forward, rows.tokens, data.pad_id, labels=rows.labels).values():
        assert np.allclose(np.sort(others, axis=0), np.sort(scores, axis=0), atol=1e-5)
    ((inputs, labels),) = tensor_batches(rows, data.pad_id, 8)
    outputs = model(**inputs).logits
    expected = functional.cross_entropy(outputs.reshape(3, 2), labels)
    assert outputs.shape == (6, 1) and torch.isclose(data.kind.loss(outputs, labels), expected)
    counts = tokens_of(task_tokenizer(folder, data.kind), read_task(config).validation, with_labels=False)
    assert [length_of(row) for row in rows.tokens] == counts == [10, 7, 7]


def test_texts_with_another_number_of_choices_are_refused(tmp_path, folder):
    config = task(tmp_path, "choices", GOOD["choices"])
    path = tmp_path / "more.jsonl"
    path.write_text(json.dumps({"text": "a", "choices": ["b", "c", "d"]}) + "\n")
    with pytest.raises(UserError, match=r"E223 .*more.jsonl:1: rows of 3 choices, the task has 2"):
        new_texts(read_texts(path, config), config, read_task(config), path)
    path.write_text(path.read_text() + json.dumps({"text": "a", "choices": ["b", "c"]}) + "\n")
    with pytest.raises(UserError, match=r"E223 .*more.jsonl:2: 2 choices, where the first row has 3"):
        tokenized(folder, read_texts(path, config), config, path)


def test_a_client_puts_the_pairs_of_a_row_together():
    (found,) = best_choices(lambda pairs: [float(pair == ("a film", "bad")) for pair in pairs], [("a film", "good", "bad")])
    assert (found.choice, found.number) == ("bad", 1) and found.scores == pytest.approx((0.2689, 0.7311), abs=1e-4)
    with pytest.raises(UserError, match=r"E717 .*has no choices"):
        best_choices(list, ["a film"])
    with pytest.raises(UserError, match=r"E717 .*has no choices"):
        best_choices(list, [("a film",)])


# --- marked spans ---


def test_spans_are_marked_where_they_are(tmp_path):
    """A span alone occurs once as a word; a number tells which of several; marks keep the first and the second apart."""
    data = read_task(task(tmp_path, "marked", GOOD["marked"]))
    assert [text for (text,) in data.train.texts] == [
        "[ Mark ] told him: He lost, he { left }.",
        "[ Mark ] told him, { he } left.",
    ]
    one = [{"text": "it rained", "span1": "it", "label": label} for label in ("a", "b")]
    assert read_task(task(tmp_path, "marked", one, text=["text", "span1"])).train.texts[0] == ("[ it ] rained",)


@pytest.mark.parametrize(
    ("text", "span", "start"),
    [
        ("李明告诉王强他输了。", "李明", 0),
        ("李明告诉王强他输了。", "他", 6),
        ("在NASA工作", "NASA", 1),
        ("민수는 졌다", "민수", 0),
    ],
)
def test_a_span_may_stand_between_letters_where_no_space_separates_words(text, span, start):
    assert place_of(span, text, "span1", "rows:1") == (start, start + len(span))


@pytest.mark.parametrize(
    ("text", "span", "times"), [("他说他输了", "他", 2), ("the other", "he", 0), ("Маркъ ушёл", "Марк", 0)]
)
def test_a_span_is_whole_words_and_there_once(text, span, times):
    with pytest.raises(UserError, match=f"E225 .*occurs {times} times"):
        place_of(span, text, "span1", "rows:1")


def test_a_text_is_cut_behind_its_marks_alone(tmp_path, folder):
    """[CLS] [ it ] rained ... [SEP] fits into 7 tokens; a mark behind them would be lost without a word."""
    late = {"text": "it rained and rained and rained so he left", "span1": "it", "label": "a"}
    rows = [late, {**late, "label": "b"}]
    config = task(tmp_path, "marked", rows, text=["text", "span1"], max_length=7)
    assert [length_of(row) for row in read_data(folder, config).train.tokens] == [7, 7]
    config = task(tmp_path, "marked", [*rows, {**late, "span1": "left"}], rows, text=["text", "span1"], max_length=7)
    with pytest.raises(
        UserErrors, match=r"E213 .*train.jsonl:3: max_length 7 cuts off a marked span of 1 of 3 rows.*Set"
    ) as told:
        read_data(folder, config)
    needed = int(told.value.errors[0].fix.split()[3])
    assert read_data(folder, config.model_copy(update={"max_length": needed})).train.labels.tolist() == [0, 1, 0]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(7)
    texts = ("[ it ] rained" + " it" * 9, "it " * 9 + "[ it ]")
    read, cut = ((["a", "b"], np.array([2.0, 1.0]), text, tokenizer.encode(text)) for text in texts)
    assert kind_of("marked").prediction(*read).label == "a"
    with pytest.raises(UserError, match=r"E717 the marked spans of .* lie behind what the model reads"):
        kind_of("marked").prediction(*cut)


def test_marks_that_are_cut_off_on_the_left_are_missed(tmp_path, folder):
    """A tokenizer with truncation_side: left keeps the end of a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(7, direction="left")
    for text, read in (("it " * 9 + "[ it ]", True), ("[ it ] rained" + " it" * 9, False), ("it " * 9, True)):
        assert has_read_marks(text, tokenizer.encode(text).offsets) is read
    two = "[ it ] rained" + " it" * 9 + " { it }"
    assert not has_read_marks(two, tokenizer.encode(two).offsets), "the second mark is read, and the first is not"


# --- several labels ---


def test_lists_and_separated_texts_read_the_same(tmp_path):
    forms = [["joy", "anger"], '["joy", "anger"]', "joy, anger", "joy;anger", " joy | anger "]
    data = read_task(task(tmp_path, "multilabel", [{"text": "a", "labels": form} for form in forms] + GOOD["multilabel"][2:]))
    assert data.label_names == ["anger", "joy"] and data.train.labels == [(True, True)] * 5 + [(False, False)]
    numbers = read_task(task(tmp_path, "multilabel", [{"text": "a", "labels": [10, 2]}, {"text": "b", "labels": "2"}]))
    assert numbers.label_names == ["2", "10"] and numbers.train.labels[1] == (True, False)


def test_f1_of_several_labels_equals_the_definition():
    kind = kind_of("multilabel")
    logits = np.array([[2.0, -1, -3, -1], [1, 1, -1, -1], [-1, 3, -2, -1], [-1, -1, -1, -1]])
    labels = np.array([[1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)
    quality = kind.quality(*kind.metric_inputs(logits, labels))
    # right 3, predicted 4, true 4; by label: 1, 2/3, 0, and 0 for the one that is nowhere
    assert quality["micro_f1"] == 6 / 8 and quality["macro_f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert quality["exact_match"] == 3 / 4 and kind.unlearnt({"micro_f1": 0.0})
    assert kind.constant([(True, False), (True, False), (False, True)]) == pytest.approx(2 * 2 / (3 + 3))
    assert kind.with_metric("micro_f1").constant is kind.constant, "named or not, the main metric is the same"
    turned = np.where(np.abs(logits) == 1, -logits, logits)
    assert kind.agreement.measure(logits, turned) == 4 / 16
    assert kind.agreement.beyond(logits, turned, noise=1.0) == 1.0 > kind.agreement.beyond(logits, turned, noise=0.1)


@pytest.mark.parametrize("rows_a_label", [1, 2, 5])
def test_an_interval_of_macro_f1_holds_it_where_labels_are_rare(rows_a_label):
    """A draw lacks a label of k rows in e^-k of the cases: counted as 0 there, it would pull every draw below the value."""
    draw, labels = np.random.default_rng(0), np.zeros((400, 30), dtype=bool)
    for label in range(29):  # one is nowhere
        labels[draw.choice(400, rows_a_label, replace=False), label] = True
    predicted = labels & (draw.random(labels.shape) < 0.9)
    kind = kind_of("multilabel").with_metric("macro_f1")
    quality, worse = kind.quality(predicted, labels), predicted & (np.arange(30) > 7)
    low, high = quality["interval"]
    assert low < quality["macro_f1"] - 0.01 and quality["macro_f1"] + 0.005 < high < 1
    change = kind.metric.value(worse, labels) - quality["macro_f1"]
    low, high = kind.change(worse, predicted, labels)
    assert low < change - 0.01 and change + 0.01 < high < 0
    of_draw = kind.metric.resampled(predicted, labels)
    assert of_draw(np.arange(400)) == pytest.approx(quality["macro_f1"]) and of_draw(np.arange(0)) == 0


@pytest.mark.parametrize("key", ["micro_f1", "macro_f1", "exact_match"])
def test_one_decision_moves_a_metric_of_several_labels_by_its_grain_at_most(key):
    labels = np.zeros((100, 3), dtype=bool)
    labels[:50, 0] = labels[:60, 1] = labels[0, 2] = True
    kind = kind_of("multilabel").with_metric(key)
    for row, label in ((0, 0), (0, 2), (99, 1)):
        decisions = labels.copy()
        decisions[row, label] ^= True
        assert 1e-9 < 1 - kind.metric.value(decisions, labels) <= kind.grain(labels) + 1e-9 < 1


def test_the_loss_of_several_labels_is_the_binary_cross_entropy():
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.eye(3).bool()[[0, 1, 2, 0, 1]]
    expected = functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert torch.isclose(kind_of("multilabel").loss(logits, labels), expected)


def test_booleans_of_a_row_are_no_labels_of_tokens():
    """Two outputs a row and two labels a row: nothing is cut, nothing is left out."""
    labels, outputs = np.eye(2, dtype=bool)[[0, 1, 1]], np.arange(6.0).reshape(3, 2)
    assert by_row(outputs, labels) is outputs and np.array_equal(spread(list(outputs), labels), outputs)


@pytest.mark.parametrize("kind", GOOD)
def test_a_subset_without_a_row_is_refused(tmp_path, kind):
    given = task(tmp_path, kind, GOOD[kind], subset={"share": 0.1})
    with pytest.raises(UserError, match=r"E211 .*train.jsonl: the subset of 0 of \d rows"):
        read_task(given)
