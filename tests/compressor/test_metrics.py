"""Metrics are those of scikit-learn, scipy and seqeval, and a task chooses one of them."""

from dataclasses import replace

import numpy as np
import pytest
import seqeval.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.kinds import classification, tokens
from compressor.tasks.metrics import (
    LEAST,
    MOST_TRIED,
    accuracy,
    decided_labels_agree,
    difference_interval,
    few_rows_move,
    interval,
    log_likelihood,
    margin_noise,
    output_distance,
    pearson,
    token_accuracy,
)
from compressor.tasks.predictions import IGNORED
from compressor.tasks.task_kind import kind_for, kind_of
from export.parity.bounds import BOUNDS, row_of
from export.parity.compare import compare, in_words, loss_of

FILES = {"train": "train.tsv", "validation": "dev.tsv"}


def kind(names=("no", "yes"), **keys):
    return kind_for(TaskConfig(**FILES, **keys), names)


def values(one, outputs, labels):
    """Every metric of a kind, by its key."""
    return {metric.key: metric.value(*one.metric_inputs(outputs, labels)) for metric in one.metrics}


@pytest.mark.filterwarnings("ignore:A single label was found")
@settings(max_examples=60, deadline=None)
@given(classes=st.integers(2, 4), rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_classes_are_judged_as_scikit_learn_judges_them(classes, rows):
    """Classes that are never true or never predicted, too: a resample of few rows has such."""
    true, predicted = (np.array(side) % classes for side in zip(*rows, strict=True))
    found = values(kind([*"abcd"[:classes]], metric="macro_f1"), np.eye(classes)[predicted], true)
    expected = {
        "macro_f1": sklearn.f1_score(true, predicted, average="macro", zero_division=0),
        "accuracy": sklearn.accuracy_score(true, predicted),
        "matthews": sklearn.matthews_corrcoef(true, predicted),
    }
    if classes == 2:
        expected["f1"] = sklearn.f1_score(true, predicted, zero_division=0)
        expected["accuracy_f1"] = (expected["f1"] + expected["accuracy"]) / 2
        other = values(kind(metric="f1", positive="no"), np.eye(2)[predicted], true)["f1"]
        assert other == pytest.approx(sklearn.f1_score(true, predicted, pos_label=0, zero_division=0))
    assert found == pytest.approx(expected)


def test_numbers_are_judged_as_scipy_judges_them():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 6, 200).astype(float)
    outputs = (labels + draw.normal(size=200))[:, None]
    ours = values(kind(["score"], kind="regression", metric="pearson_spearman"), outputs, labels)
    theirs = [getattr(stats, name)(outputs[:, 0], labels).statistic for name in ("pearsonr", "spearmanr")]
    assert ours == pytest.approx({"pearson_spearman": np.mean(theirs), "spearman": theirs[1], "pearson": theirs[0]})


@pytest.mark.parametrize("metric", ["f1", "accuracy"])
def test_tags_are_judged_as_seqeval_judges_them(metric):
    names, draw = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"], np.random.default_rng(0)
    labels = np.where(np.arange(9) < draw.integers(1, 9, 200)[:, None], draw.integers(0, 5, (200, 9)), IGNORED)
    known = labels != IGNORED
    predicted = np.where(draw.random(known.sum()) < 0.5, labels[known], draw.integers(0, 5, known.sum()))
    one = kind(names, kind="tokens", metric=metric)
    rows = np.split(predicted, known.sum(axis=1).cumsum()[:-1])
    said, true = ([[names[tag] for tag in row] for row in side] for side in (rows, [row[row >= 0] for row in labels]))
    expected = {"f1": seqeval.metrics.f1_score(true, said), "accuracy": seqeval.metrics.accuracy_score(true, said)}
    assert values(one, np.eye(5)[predicted], labels) == pytest.approx(expected) and one.metric.key == metric
    assert one.grain(labels) == (tokens.grain(labels) if metric == "f1" else 1 / known.sum())


def test_the_chosen_metric_is_first_and_has_the_interval():
    draw = np.random.default_rng(0)
    labels = (draw.random(400) < 0.2).astype(int)
    logits = np.eye(2)[np.where(draw.random(400) < 0.8, labels, 1 - labels)]
    chosen = kind(metric="f1")
    quality = chosen.quality(logits, labels)
    assert list(quality) == ["f1", "interval", "accuracy", "matthews", "accuracy_f1", "macro_f1", "rows"]
    low, high = quality["interval"]
    assert low < quality["f1"] < high and quality["accuracy"] > high, "an interval of F1, not of the accuracy"
    true = labels.sum()
    assert chosen.constant(labels.tolist()) == pytest.approx(2 * true / (400 + true)), "all rows of the positive class"
    assert chosen.grain(labels) == 2 / true and kind(metric="accuracy").grain(labels) == 1 / 400
    of_three = kind(metric="macro_f1", names="abc").quality(np.eye(3)[labels], labels)
    assert of_three.keys() == quality.keys() - {"f1", "accuracy_f1"}
    assert list(kind().quality(logits, labels)) == ["accuracy", "interval", "matthews", "rows"], "as before there was a choice"


@pytest.mark.parametrize(
    ("name", "metric"),
    [(name, "accuracy") for name in ("classification", "choices", "marked")]
    + [("classification", key) for key in ("matthews", "f1", "accuracy_f1", "macro_f1")],
)
def test_intervals_are_drawn_over_decisions_with_the_same_bounds(name, metric):
    """Not over all logits of a row. Few rows: of many draws the last classes are absent."""
    draw, seen, classes = np.random.default_rng(0), [], 2 if "f1" in metric and metric != "macro_f1" else 5
    labels, logits = draw.integers(0, classes, 12), draw.normal(size=(12, classes))
    reference = logits + draw.normal(size=logits.shape)
    judge = kind_of(name).with_metric(metric, binary=classes == 2)
    value = judge.metric.value
    counted = replace(judge.metric, value=lambda outputs, true: seen.append(outputs.shape) or value(outputs, true))
    watched = replace(judge, metrics=(counted, *judge.metrics[1:]))
    assert watched.quality(logits, labels)["interval"] == list(interval(value, logits, labels))
    assert watched.change(logits, reference, labels, resamples=300) == difference_interval(
        value, logits, reference, labels, resamples=300
    )
    assert seen.count(logits.shape) == 1 and set(seen) == {logits.shape, labels.shape}
    assert value(logits.argmax(axis=1), labels) == value(logits, labels)


def f1_of_labels(predicted, labels):
    """F1 of every label, and whether it occurs."""
    right, total = (predicted & labels).sum(axis=0), predicted.sum(axis=0) + labels.sum(axis=0)
    return 2 * right / np.maximum(total, 1), total > 0


def macro_f1_where_labels_occur(predicted, labels, rows):
    by_label, occurs = f1_of_labels(predicted[rows], labels[rows])
    share = f1_of_labels(predicted, labels)[1].mean()
    return float(share * by_label[occurs].mean()) if occurs.any() else 0.0


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity less infinity
@pytest.mark.parametrize(
    ("name", "key"),
    [("multilabel", key) for key in ("micro_f1", "macro_f1", "exact_match")]
    + [("regression", key) for key in ("spearman", "pearson_spearman")],
)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.one_of(st.integers(1, 12), st.sampled_from([300, 5000])), values=st.integers(1, 9))
def test_draws_are_measured_to_the_last_bit_as_copies_of_their_rows_are(name, key, seed, count, values):
    """Ties, constant draws, labels that are nowhere, and numbers that are not finite, too."""
    draw, judged = np.random.default_rng(seed), kind_of(name).with_metric(key)
    if name == "multilabel":
        outputs, labels = draw.random((2, count, values)) < draw.choice([0.02, 0.3, 0.9])
    else:
        labels = draw.integers(0, values, count).astype(float)
        outputs = (labels + draw.choice([0, 1]) * draw.normal(size=count)).astype(np.float32)[:, None]
        outputs[draw.random(count) < draw.choice([0, 0.1])] = draw.choice([np.nan, np.inf, -np.inf])
    of_draw, value = judged.metric.resampled(outputs, labels), judged.metric.value
    for rows in (*draw.integers(0, count, (3, count)), np.arange(count), np.zeros(count, dtype=int)):
        plain = macro_f1_where_labels_occur(outputs, labels, rows) if key == "macro_f1" else value(outputs[rows], labels[rows])
        assert of_draw(rows) == plain


def test_the_best_constant_class_takes_no_logits_of_all_classes():
    """Of 200 classes they would be 200 numbers a row, for each class."""
    draw, seen = np.random.default_rng(0), set()
    for key, classes in [("matthews", 5), ("f1", 2), ("accuracy_f1", 2), ("macro_f1", 5), ("macro_f1", 1)]:
        labels = draw.integers(0, classes, 40)
        metric = kind_of("classification").with_metric(key).metric
        watched = replace(metric, value=lambda outputs, true, of=metric.value: seen.add(outputs.shape) or of(outputs, true))
        logits = np.eye(max(2, classes))[:, None].repeat(40, axis=1)
        assert classification.constant_of(watched, labels.tolist()) == max(metric.value(one, labels) for one in logits)
    assert seen == {(40,)}


def test_a_difference_is_not_shown_by_five_rows():
    """All for the worse: by the sign test 2 / 2^5 = 0.06, and 0.03 of six. A bootstrap alone would call one row worse."""
    labels, draw = np.zeros(1000, dtype=int), np.random.default_rng(0)
    right = np.eye(2)[labels]
    for count in (1, 4, 5, 6):
        worse = right + 0.01 * draw.random(right.shape)  # other outputs with the same predictions
        worse[:count] = [0, 1]
        low, high = kind().change(worse, right, labels)
        assert low < -count / 1000 / 2 and (high < 0) == (count == 6)
    assert kind().change(right[:1, ::-1], right[:1], labels[:1]) == (-1.0, 0.0)


@pytest.mark.parametrize(("worse", "shown"), [(4, False), (5, False), (6, True)])
def test_a_difference_is_not_shown_by_rows_that_turn_from_one_wrong_class_to_another(worse, shown):
    labels = np.arange(400) % 10
    reference = np.eye(10)[np.where(np.arange(400) < 100, labels + 1, labels) % 10]
    candidate = reference.copy()
    turned = [*range(10), *range(200, 200 + worse)]
    candidate[turned] = np.roll(reference[turned], 1, axis=1)
    of_ten = kind(names="abcdefghij")
    low, high = of_ten.change(candidate, reference, labels)
    assert low < -worse / 400 / 2 and (high < 0) == shown
    assert of_ten.change(reference, candidate, labels) == (-high, -low), "which of the two is the reference does not matter"


@pytest.mark.parametrize(("better", "shown"), [(4, False), (6, True)])
def test_a_difference_of_entities_is_not_shown_by_rows_of_which_only_words_are_others(better, shown):
    labels = np.tile([2, 10], (300, 1))  # entities and words of each row
    reference = np.tile([1, 2, 8], (300, 1))  # right and predicted entities, right words
    candidate = reference.copy()
    candidate[:10, 2] -= 1
    candidate[100 : 100 + better, 0] += 1
    low, high = tokens.KIND.change(candidate, reference, labels)
    assert (low > 0) == shown and high > better / 300 / 2


@pytest.mark.parametrize(("worse", "few"), [(0, True), (5, True), (20, True), (24, False)])
def test_of_many_rows_that_changed_some_tell_whether_few_move_a_metric(worse, few):
    """A quarter of 4,000 is tried, which holds a quarter of those that turned wrong; six of these must move it."""
    count, seen = 4 * MOST_TRIED, []
    labels, reference, candidate = (np.repeat([first, 0], count) for first in (0, 1, 2))
    reference[:worse] = 0

    def counted(outputs, true):
        seen.append(len(true))
        return accuracy(outputs, true)

    assert few_rows_move(counted, candidate, reference, labels) is few and len(seen) <= 2 + 2 * MOST_TRIED


def test_a_positive_class_that_is_a_truth_value_has_the_name_that_labels_have():
    """YAML's `false` is the class of JSON's false, not the class 0."""
    labels, predicted = np.array([0, 0, 1]), np.eye(2)[[0, 1, 1]]
    judged = kind(("False", "True"), metric="f1", positive=False)
    assert judged.metric.value(predicted, labels) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="E218 no class is called 'False'"):
        kind(("0", "1"), metric="f1", positive=False)


def test_macro_f1_moves_by_a_row_of_the_rarest_class_over_all_classes():
    labels = np.concatenate([np.repeat(np.arange(19), 20), [19, 19]])
    turned = labels.copy()
    turned[-1] = 0
    chosen = kind(metric="macro_f1", names="abcdefghijklmnopqrst")
    moved = chosen.quality(np.eye(20)[labels], labels)["macro_f1"] - chosen.quality(np.eye(20)[turned], labels)["macro_f1"]
    assert 0 < moved <= chosen.grain(labels) == 2 / (2 * 20)


def test_noise_and_distance_of_outputs_are_in_standard_deviations():
    """That of a margin is of two logits; every output has its own mean, which is no part of the spread."""
    draw = np.random.default_rng(0)
    reference = draw.normal((0, 10), size=(5000, 2))
    noisy = reference + 0.1 * draw.normal(size=(5000, 2))
    assert margin_noise(reference, noisy) == pytest.approx(0.1 * 2**0.5, rel=0.05)
    assert output_distance(reference, noisy, softmax=False) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("noise", "agreement"), [(0.4, 0.9), (0.6, 1.0)])
def test_a_label_within_twice_the_noise_is_undecided(noise, agreement):
    """By the margin of the reference, 1; that of the candidate, .1, says nothing of what rounding turns."""
    reference = np.array([[1.0, 0.0]] * 10)
    turned = np.where(np.arange(10)[:, None] == 0, [0.0, 0.1], reference)
    assert decided_labels_agree(reference, turned, noise) == pytest.approx(agreement)


def test_tokens_are_judged_together_whatever_the_length_of_their_texts():
    """Sums and numbers of tokens of each text; what is not finite has the least likelihood, and no correlation."""
    sums, counts = np.array([[-4.0, 3.0], [-2.0, 1.0]]), np.array([[4], [2]])
    assert (log_likelihood(sums, counts), token_accuracy(sums, counts)) == (-1.0, pytest.approx(4 / 6))
    assert log_likelihood(np.array([[np.nan, 0.0]]), counts[:1]) == LEAST
    assert [pearson(np.array([[1.0], [odd]]), np.array([1.0, 2.0])) for odd in (np.nan, np.inf)] == [0.0, 0.0]


def test_the_gate_of_an_export_is_of_the_chosen_metric():
    """40 rows of the rare class turned in 2,000: two points of accuracy, and far more of F1."""
    labels = np.repeat([0, 1], [1900, 100])
    reference = 4.0 * np.eye(2)[labels]
    worse = reference.copy()
    worse[1900:1940] = worse[1900:1940, ::-1]
    result = compare("dense -> int8", "int8", reference, worse, labels, task=kind(metric="f1"))
    assert (result.metric_reference, result.metric_candidate) == (1.0, pytest.approx(120 / 160))
    assert result.loss.found == pytest.approx(0.25) and "metric" in result.failed and "1.0 points of F1" in result.bound
    assert loss_of(BOUNDS["int8"], kind(), reference, worse, labels).found == pytest.approx(0.02)
    one = kind_of("generation").with_metric("accuracy")
    assert (one.metric.key, one.gate.key) == ("accuracy", "log_likelihood")
    assert "nats" in in_words(BOUNDS[row_of("int8", one)], one)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"metric": "bleu"}, "E119 'bleu' is not a metric of a classification. Metrics: accuracy, matthews, f1"),
        (
            {"metric": "bleu", "kind": "generation"},
            "E119 the metric bleu is of generated texts, and decode does not compute it. Add it to metrics of decode:",
        ),
        ({"metric": "perplexity", "kind": "generation"}, "E119 'perplexity' is not a metric of a generation"),
        ({"metric": "matthews", "positive": "yes"}, "E119 positive is not used by the metric matthews. Remove positive, or"),
        ({"positive": "yes"}, "E119 positive is not used by the metric accuracy"),
        ({"metric": "f1", "names": "abc"}, "E217 metric f1 is of two classes, and training has 3. Choose another"),
        ({"metric": "accuracy_f1", "positive": 1}, "E218 no class is called '1', as positive says. Classes: no, yes"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(keys, says):
    with pytest.raises(UserError) as error:
        kind(**keys)
    assert str(error.value).startswith(says)
