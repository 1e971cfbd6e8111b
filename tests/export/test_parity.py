"""The gate: what passes, and above all what must not."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from compressor.errors import CheckError, UserError
from compressor.tasks import KINDS
from compressor.tasks.metrics import paired_changes, spearman
from compressor.tasks.task_kind import kind_of
from export.parity.bounds import BOUNDS, LEAST_UNLABELLED_ROWS, row_of
from export.parity.compare import (
    MORE_ROWS,
    RESAMPLES,
    Unlabelled,
    compare,
    failure,
    in_other_batches,
    loss_of,
    require,
    resolved_loss,
)
from export.parity.sides import runs
from export.parity.token_outputs import compare_tokens
from export.runtimes.sessions import failures
from pipelines.reporting.tables import parity
from pipelines.terminal.console_table import parity_cells

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(200, 3)).astype(np.float32)
LABELS = LOGITS.argmax(axis=1)


def kinds_for(task: str) -> list[str]:
    """The rows of the table that bound a difference, or the agreement of a kind of task."""
    return sorted(kind for kind, bound in BOUNDS.items() if bound.difference is not None or task in bound.agreement)


def test_every_kind_of_task_has_a_bound_for_int8():
    for task in map(kind_of, KINDS):
        assert task.name in BOUNDS[row_of("int8", task)].agreement


@pytest.mark.parametrize("kind", kinds_for("classification"))
def test_the_same_function_passes(kind):
    result = compare("hop", kind, LOGITS, LOGITS.copy(), LABELS)
    require(result)
    assert result.passed and result.max_difference == 0.0 and result.agreement == 1.0


def nan(logits):
    logits[17, 1] = np.nan


def infinite(logits):
    logits[17, 1] = np.inf


def swapped_rows(logits):
    logits[[17, 3]] = logits[[3, 17]]


def swapped_columns(logits):
    logits[:] = logits[:, ::-1]


def beyond_the_bound(logits):
    logits[17, 1] += 1.0


def constant(logits):
    logits[:] = 0.0


@pytest.mark.parametrize("kind", ["removed", "merged", "fp32", "served"])
@pytest.mark.parametrize("fault", [nan, infinite, swapped_rows, swapped_columns, beyond_the_bound, constant])
def test_every_fault_is_caught(kind, fault):
    broken = LOGITS.copy()
    fault(broken)
    result = compare("prune -> export", kind, LOGITS, broken, LABELS)
    assert not result.passed
    if fault in (nan, infinite, beyond_the_bound):
        assert result.worst_row == 17
    with pytest.raises(CheckError, match=r"E610 prune -> export.*row") as caught:
        require(result)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("fault", [nan, infinite])
def test_the_record_of_outputs_that_are_not_finite_is_json(kind, fault):
    """Python alone reads `Infinity`; the tables show that there is no number."""
    broken = LOGITS.copy()
    fault(broken)
    record = compare("quantize", kind, LOGITS, broken, LABELS).to_json()
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record and record["max_difference"] is None and record["mean_difference"] is None
    shown = parity_cells("export", json.loads(text))
    assert (shown[0], shown[2], shown[-1]) == ("export: quantize", "", "FAILED")
    report = {"parity": [{**record, "stage": "export"}], "metric": {"agreement": "labels", "title": "accuracy", "unit": " %"}}
    assert parity(report).rows[0][3] == "not finite"
    constant_reference = compare("quantize", "int8", 0 * LOGITS, LOGITS, LABELS, unlabelled=Unlabelled(rounded=LOGITS))
    json.dumps(constant_reference.to_json(), allow_nan=False)


@pytest.mark.parametrize("fault", [nan, infinite, swapped_columns, constant])
def test_int8_faults_are_caught(fault):
    broken = LOGITS.copy()
    fault(broken)
    assert not compare("quantize", "int8", LOGITS, broken, LABELS).passed


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_one_number_that_is_not_finite_is_caught_in_other_batches(kind):
    broken = LOGITS.copy()
    broken[3, LABELS[3]] = np.nan  # to numpy the largest: the label is the same
    assert not compare("quantize", kind, LOGITS, LOGITS, LABELS, batches=({"batch 1": LOGITS}, {"batch 1": broken})).passed


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("removed", 1e-4),
        ("fp32", 1e-4),
        ("served", 1e-5),
        ("served, fp16", 1e-2),
        ("served, bf16", 0.08),
        ("fp16", 2e-2),
        ("bf16", 0.16),
        ("removed, generated", 1e-4),
        ("fp32, generated", 1e-4),
        ("fp32 on random tokens", 1e-3),
    ],
)
def test_a_logit_may_move_so_far(kind, most):
    still = np.where(np.arange(200)[:, None] == 17, 0.0, LOGITS)
    moved = [still + np.where(np.arange(200)[:, None] == 17, share * most, 0) for share in (0.9, 1.1)]
    assert [compare("hop", kind, still, one, LABELS).passed for one in moved] == [True, False]


def test_what_is_rounded_further_must_agree_so_far():
    """As docs/export.md tells it."""
    rows = {kind: (bound.metric_loss, dict(bound.agreement)) for kind, bound in BOUNDS.items() if bound.difference is None}
    assert rows == {
        "int8": (
            0.01,
            {"regression": 0.99, "spans": 0.99, "tokens": 0.98, "multilabel": 0.98}
            | dict.fromkeys(("classification", "choices", "marked"), 0.97),
        ),
        "int8, generated": (0.05, dict.fromkeys(("generation", "text2text"), 0.9)),
        "int8 on random rows": (0.1, dict.fromkeys(("classification", "regression", "multilabel"), 0.9)),
        "int8 on random tokens": (0.1, {"classification": 0.9}),
        "int4 on random tokens": (0.5, {"classification": 0.5}),
    }
    assert LEAST_UNLABELLED_ROWS == 800


@pytest.mark.parametrize(("moved", "passes"), [(0.9e-5, True), (1.1e-5, False)])
def test_the_last_bits_of_a_merged_model_may_be_others_in_other_batches(moved, passes):
    batches = ({"batch 1": LOGITS}, {"batch 1": LOGITS.astype(np.float64) + moved})
    assert compare("merge", "merged", LOGITS, LOGITS, LABELS, batches=batches).passed == passes


def test_a_model_that_generates_may_move_by_the_largest_logit_of_the_same_row():
    """.05 is half of what a row of 1000 may move, and 500 times as much as one of 1; .0005 there is the worse fault."""
    reference, labels = np.array([[1.0, 0.0], [1000.0, 0.0]]), np.zeros(2, dtype=int)

    def moved(small, large):
        return compare("hop", "removed, generated", reference, reference + np.array([[0, small], [0, large]]), labels)

    assert moved(0.0, 0.05).passed and not moved(0.05, 0.0).passed
    worst = moved(0.0005, 0.05)
    assert worst.worst_row == 0 and worst.mean_difference == pytest.approx(0.0505 / 4)


def test_merge_must_be_exact():
    nearly = LOGITS.copy()
    nearly[0, 0] = np.nextafter(nearly[0, 0], np.float32(9))
    assert not compare("merge", "merged", LOGITS, nearly, LABELS).passed
    assert compare("merge", "removed", LOGITS, nearly, LABELS).passed


def turned(count, start=0):
    """LOGITS with another label in `count` rows."""
    other = LOGITS.copy()
    other[start : start + count] = np.roll(other[start : start + count], 1, axis=1)
    return other


@pytest.mark.parametrize(
    ("count", "verdict", "failed"),
    [
        (0, "not shown", ()),
        (1, "not shown", ()),
        (4, "not shown", ()),
        (10, "refused", ("metric",)),
        (20, "refused", ("agreement", "metric")),
    ],
)
def test_a_loss_is_refused_where_it_is_shown(count, verdict, failed):
    """Of 200 rows 4 that turn wrong are two points, which chance explains; 10 are five, which it does not; none of 200 is as
    likely as 5 % where one and a half points of all rows do."""
    result = compare("quantize", "int8", LOGITS, turned(count), LABELS)
    assert (result.verdict, result.failed) == (verdict, failed)
    assert result.loss.at_least <= result.loss.found <= result.loss.at_most
    assert bool(result.inconclusive) == (verdict == "not shown")


def test_rows_without_one_change_show_what_so_many_can():
    """Of 3 / N of all rows that change, none of N is seen in 5 % of samples."""
    rows = [(np.tile(LOGITS, (times, 1)), np.tile(LABELS, times)) for times in (1, 2)]
    few, many = (compare("quantize", "int8", logits, 1.0001 * logits, labels) for logits, labels in rows)
    assert (few.verdict, many.verdict) == ("not shown", "passed") and few.loss.found == 0 == few.loss.at_least
    assert few.loss.at_most == pytest.approx(3 / 200, rel=0.01) and many.loss.at_most == pytest.approx(3 / 400, rel=0.01)


@pytest.mark.parametrize("kinds", [("better",), ("to another wrong one",), ("better", "to another wrong one", "worse")])
def test_few_labels_that_turn_show_no_more_than_none(kinds):
    """A file that agrees on fewer rows is not told as the better one."""
    true = np.where(np.arange(200) < 10, (LABELS + 1) % 3, LABELS)
    candidate = LOGITS.copy()
    places = {"better": (0, true[0]), "to another wrong one": (1, (LABELS[1] + 2) % 3), "worse": (100, (LABELS[100] + 1) % 3)}
    for row, label in (places[kind] for kind in kinds):
        candidate[row] = np.roll(LOGITS[row], label - LABELS[row])
    result = compare("quantize", "int8", LOGITS, candidate, true)
    assert result.verdict == "not shown" and result.loss.at_most >= 1 - 0.05 ** (1 / 200)


def test_what_is_not_shown_is_told_with_the_loss_that_so_many_rows_resolve():
    result = compare("quantize", "int8", LOGITS, turned(4), LABELS)
    assert result.passed and 0.01 < result.loss.at_most < 0.06 < result.loss.resolved < 0.12
    assert "200 rows cannot rule out a loss of more than 1.0 points (-2.00 points, 90 % interval -" in result.inconclusive
    assert f"they would detect a loss of {100 * result.loss.resolved:.1f} points 9 times out of 10" in result.inconclusive
    task = kind_of("classification")
    (ours, labels), (theirs, _) = (task.metric_inputs(outputs, LABELS) for outputs in (LOGITS, turned(4)))
    losses = -paired_changes(task.gate.value, theirs, ours, labels, resamples=RESAMPLES)
    assert (result.loss.at_least, result.loss.at_most) == pytest.approx(np.percentile(losses, [5, 95])), "90 % lie in it"
    few, many = (resolved_loss(0.01, 0.005, rows) for rows in (400, 3000))
    assert 0.025 < many < few < 0.06


def test_the_metric_does_not_fall_where_wrong_labels_turn():
    elsewhere = np.where(np.arange(200) < 5, (LABELS + 1) % 3, LABELS)
    result = compare("quantize", "int8", LOGITS, turned(5), np.where(elsewhere == LABELS, LABELS, (LABELS + 2) % 3))
    assert result.passed and result.agreement == 0.975 and result.loss.found <= 0


NOISY = np.random.default_rng(2)
PAIRS = NOISY.normal(size=(1000, 2))
TRUE = PAIRS.argmax(axis=1)


def shaken(scale, seed=3):
    """PAIRS with noise in every logit."""
    return PAIRS + np.random.default_rng(seed).normal(scale=scale, size=PAIRS.shape)


def test_labels_that_rounding_turns_do_not_count():
    """Noise of a tenth turns 4 % of the labels, all near the boundary: rounding alone turns as many."""
    rounded, candidate = shaken(0.12), shaken(0.12, seed=4)
    plain = compare("quantize", "int8", PAIRS, candidate, candidate.argmax(axis=1))
    assert not plain.passed and plain.failed == ("agreement",) and plain.agreement < 0.96
    batches = ({"batch 1": PAIRS}, {"batch 1": candidate})
    how = {"unlabelled": Unlabelled(rounded=rounded), "batches": batches}
    result = compare("quantize", "int8", PAIRS, candidate, candidate.argmax(axis=1), **how)
    assert result.passed and result.agreement == plain.agreement and result.agreement_beyond_noise > 0.99
    assert 0.9 < result.distance / result.rounding < 1.1


@pytest.mark.parametrize(("scale", "failed", "times"), [(0.06, ("rounding",), "2.0"), (0.3, ("rounding", "agreement"), "10.2")])
def test_outputs_that_move_further_than_by_rounding_are_refused(scale, failed, times):
    """No label tells: those of the candidate stand for the true ones, and only the distance sees that it is twice as far. Where
    it is ten times as far, labels turn, too, beyond the noise of rounding, if not beyond its own."""
    rounded, candidate = shaken(0.03), shaken(scale, seed=4)
    result = compare("quantize", "int8", PAIRS, candidate, candidate.argmax(axis=1), unlabelled=Unlabelled(rounded=rounded))
    assert result.failed == failed
    assert f"outputs move {times} times as far as rounding moves them" in str(failure(result))


def test_outputs_may_move_1_35_times_as_far_as_by_rounding():
    rounded = shaken(0.03)
    far = [PAIRS + times * (rounded - PAIRS) for times in (1.3, 1.4)]
    found = [compare("hop", "int8", PAIRS, one, TRUE, unlabelled=Unlabelled(rounded=rounded)) for one in far]
    assert [one.failed for one in found] == [(), ("rounding",)]


def test_a_shift_of_all_logits_is_none_of_labels_of_one_softmax_and_one_of_independent_labels():
    """A multi-label model decides each label by the sign of its own logit."""
    shifted, noisy = (
        LOGITS + np.float32(0.02),
        LOGITS + np.random.default_rng(4).normal(0, 0.005, LOGITS.shape).astype(np.float32),
    )
    several = LOGITS > 0
    of_one, of_each = (
        compare("quantize", "int8", LOGITS, shifted, labels, task=kind_of(name), unlabelled=Unlabelled(rounded=noisy))
        for name, labels in (("classification", LABELS), ("multilabel", several))
    )
    assert of_one.distance < 1e-6 and not of_one.failed
    assert of_each.distance == pytest.approx(0.02 / LOGITS.std(), rel=0.02) and of_each.failed == ("rounding",)


def test_static_int8_may_move_further_within_a_small_part_of_the_spread():
    """It rounds by calibrated ranges, products of activations too, which rounding in PyTorch does not follow."""
    rounded, near, far = shaken(0.01), shaken(0.025, seed=4), shaken(0.1, seed=4)
    refused = [
        compare(
            "quantize", "int8", PAIRS, one, one.argmax(axis=1), unlabelled=Unlabelled(rounded=rounded, static=static)
        ).failed
        for one, static in ((near, False), (near, True), (far, True))
    ]
    assert refused == [("rounding",), (), ("rounding",)]


def test_a_fault_in_few_rows_is_no_noise():
    """Rounding turns nothing that is decided; a tenth of the rows turned upside down does not hide behind it."""
    broken = shaken(0.03)
    broken[:100] = broken[:100, ::-1]
    result = compare("quantize", "int8", PAIRS, broken, TRUE, unlabelled=Unlabelled(rounded=shaken(0.03, seed=4)))
    assert set(result.failed) == {"rounding", "agreement", "metric"}


def test_training_rows_join_where_no_labels_are_needed():
    """20 rows cannot tell that 8 % of the labels turn; with 980 more it is plain."""
    candidate = PAIRS.copy()
    candidate[::12] = candidate[::12, ::-1]
    few = compare("quantize", "int8", PAIRS[:20], candidate[:20], candidate[:20].argmax(axis=1))
    assert few.passed and few.answers == 20
    joined = Unlabelled(PAIRS[20:], candidate[20:])
    result = compare("quantize", "int8", PAIRS[:20], candidate[:20], candidate[:20].argmax(axis=1), unlabelled=joined)
    assert result.failed == ("agreement",) and result.answers == 1000 and result.rows == 20


def test_the_log_likelihood_of_a_model_that_generates_is_bounded():
    """A likelihood of .2 % cannot fall by a point: 6 tokens in a hundred nats are lost all the same."""
    task, words = kind_of("generation"), RNG.normal(size=(400, 500)).astype(np.float32)
    labels = RNG.integers(0, 500, size=(40, 10))
    worse = words.copy()
    worse[np.arange(400), labels.ravel()] -= 0.3
    result = compare("quantize", "int8", words, worse, labels, task=task)
    assert result.failed == ("metric",) and result.metric_reference < 0.01 and 0.25 < result.loss.found < 0.31
    assert "-0.30 nats a token" in str(failure(result)) and result.loss.unit == "nats a token"
    worse = words.copy()
    worse[np.arange(400), labels.ravel()] -= 0.02
    assert compare("quantize", "int8", words, worse, labels, task=task).passed


def test_a_file_that_is_only_compared_with_is_not_refused():
    result = replace(compare("quantize", "int8", LOGITS, turned(20), LABELS), gated=False)
    assert not result.passed and result.verdict == "beyond its bound" and result.to_json()["verdict"] == result.verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "flips", "least", "most"), [(0, 0.02, 0, 0.001), (0.0025, 0.022, 0, 0.002), (0.03, 0.045, 0.8, 1)]
)
def test_how_often_a_true_loss_is_refused(loss, flips, least, most):
    """At 800 rows: a sound file hardly ever, one that loses three points four times out of five (benchmarks/gate.py)."""
    draw, refused, times = np.random.default_rng(0), 0, 3000 if most < 0.1 else 200
    reference = np.tile([1.0, 0.0], (800, 1))
    for _ in range(times):
        kind = draw.choice(3, size=800, p=[1 - flips, (flips + loss) / 2, (flips - loss) / 2])
        candidate = np.where((kind > 0)[:, None], reference[:, ::-1], reference)
        labels = np.where(kind == 2, 1, 0)
        refused += compare("quantize", "int8", reference, candidate, labels).loss.too_large
    assert least <= refused / times <= most


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_what_cannot_be_compared_is_told_without_figures(kind):
    """Neither agreement nor metric is 0 because one row is not finite."""
    broken = LOGITS.copy()
    nan(broken)
    found = [(broken, "outputs that are not finite, first in row 17 of 200"), (LOGITS[:-1], "outputs of another shape")]
    for candidate, told in found:
        told_of = str(failure(compare("hop", kind, LOGITS, candidate, LABELS)))
        assert f"found: {told}" in told_of and not [word for word in ("metric", "agreement", "inf,") if word in told_of]


def test_a_different_shape_and_no_rows_fail():
    assert not compare("hop", "int8", LOGITS, LOGITS[:-1], LABELS).passed
    assert not compare("hop", "int8", LOGITS[:0], LOGITS[:0], LABELS[:0]).passed


@pytest.mark.parametrize(("kind", "relative"), [("fp32", True), ("removed", True), ("served", False)])
def test_large_logits_get_a_relative_bound_where_other_kernels_compute_them(kind, relative):
    large = LOGITS * 1000
    assert compare("hop", kind, large, large * (1 + 5e-5), LABELS).passed == relative
    assert not compare("hop", kind, large, large * (1 + 5e-4), LABELS).passed
    assert not compare("hop", kind, LOGITS, LOGITS + np.float32(1e-2), LABELS).passed


def test_the_interval_is_of_the_paired_difference():
    """Of 200 rows 10 that were right turn wrong: 5 points, and an interval around them; equal models differ by nothing."""
    broken = LOGITS.copy()
    broken[:10] = np.roll(broken[:10], 1, axis=1)
    low, high = compare("hop", "int8", LOGITS, broken, LABELS).metric_interval
    assert -0.09 < low < -0.05 < high < -0.01
    assert compare("hop", "int8", LOGITS, LOGITS.copy(), LABELS).metric_interval == (0.0, 0.0)


ROWS = [{"input_ids": [row] * (1 + row % 9), "attention_mask": [1] * (1 + row % 9)} for row in range(1, 201)]


def model(encoding):
    """Sums the tokens of a row: right whatever shares its batch."""
    total = (encoding["input_ids"] * encoding["attention_mask"]).sum(axis=1)
    return np.stack([total, -total], axis=1).astype(np.float64)


def alone(encoding):
    """Wrong for one row at a time only."""
    return model(encoding) + (len(encoding["input_ids"]) == 1)


def mixing(encoding):
    """Looks at the other rows of its batch."""
    return model(encoding) + model(encoding).mean(axis=0)


def left(encoding):
    """Takes the padding to be on the left."""
    return model(encoding | {"attention_mask": encoding["attention_mask"][:, ::-1]})


@pytest.mark.parametrize("fault", [alone, mixing, left])
def test_what_other_batches_show(fault):
    """The same logits in one batch composition prove nothing about another."""
    right, wrong = (in_other_batches(one, ROWS, 0) for one in (model, fault))
    reference = compare("hop", "fp32", LOGITS, LOGITS, LABELS, batches=(right, right))
    assert reference.passed and list(reference.batches) == ["batch 1", "batch 32, mixed lengths"]
    result = compare("hop", "fp32", LOGITS, LOGITS, LABELS, batches=(right, wrong))
    expected = {alone: ("batch 1",), mixing: tuple(reference.batches), left: ("batch 32, mixed lengths",)}
    assert not result.passed and result.failed_batches == expected[fault]
    with pytest.raises(CheckError, match=f"{result.failed_batches[0]}: |Δlogit|"):
        require(result)


@pytest.mark.parametrize("kind", ["int8 on random tokens", "int4 on random tokens"])
def test_flips_of_tokens_count_where_the_likeliest_class_is_also_the_largest(kind):
    """As in most decoders, and in taggers that are sure: one class decides in several ways, and is compared once."""
    reference = RNG.normal(size=(600, 50))
    reference[np.arange(600), RNG.integers(0, 50, 600)] += 10
    near, junk = reference + RNG.normal(scale=0.01, size=reference.shape), RNG.permutation(reference)
    other = {"on a past": reference}
    assert compare_tokens("hop", kind, reference, near, batches=(other, {"on a past": near})).passed
    assert compare_tokens("hop", kind, reference, near, batches=(other, {"on a past": junk})).failed_batches == ("on a past",)
    broken = compare_tokens("hop", kind, reference, junk)
    assert "agreement" in broken.failed and broken.agreement_beyond_noise < 0.1 and "rounding" not in broken.bound


@pytest.mark.parametrize(("flips", "passes"), [(0, True), (4, True), (7, True), (8, False), (20, False)])
def test_few_rows_leave_room_for_chance(flips, passes):
    """A file that agrees on 97 % of all rows may well disagree on 5 % of these."""
    there = np.tile([0.0, 1.0], (MORE_ROWS, 1))
    wrong = there.copy()
    wrong[:flips] = wrong[:flips, ::-1]
    result = compare("quantize", "int8", LOGITS, LOGITS, LABELS, batches=({"batch 1": there}, {"batch 1": wrong}))
    assert result.passed == passes and result.agreement_in_batches == {"batch 1": 1 - flips / MORE_ROWS}
    assert passes or f"batch 1: |Δlogit| 1, agreement {1 - flips / MORE_ROWS:.1%}" in str(failure(result))


def test_every_other_batch_has_short_and_long_rows():
    seen = []

    def watch(encoding):
        seen.append(encoding["attention_mask"].sum(axis=1))
        return model(encoding)

    in_other_batches(watch, ROWS, 0)
    singles, mixed = seen[:MORE_ROWS], seen[MORE_ROWS:]
    assert {len(one) for one in singles} == {1} and len(mixed) == 4
    assert all(lengths.min() < 3 and lengths.max() == 9 for lengths in mixed)


REGRESSION = kind_of("regression")
SCORES = RNG.integers(0, 6, size=300).astype(float)
NUMBERS = (SCORES[:, None] + RNG.normal(scale=0.5, size=(300, 1))).astype(np.float32)


def shifted(numbers):
    numbers += 0.5


def drawn_together(numbers):
    numbers[:] = 2.5 + 0.8 * (numbers - 2.5)


def upside_down(numbers):
    numbers[:] = 5 - numbers


def shuffled(numbers):
    numbers[:] = numbers[::-1]


def cut_off(numbers):
    np.clip(numbers, 1.5, 3.5, out=numbers)


def noisy(numbers):
    numbers += np.random.default_rng(1).normal(scale=0.4, size=numbers.shape)


@pytest.fixture
def few_draws(monkeypatch):
    """Correlations take long to resample; here the concordance decides, not their interval."""
    monkeypatch.setattr("export.parity.compare.RESAMPLES", 100)


FAULTS = [nan, infinite, shifted, drawn_together, upside_down, shuffled, cut_off, noisy, constant]


# tokens are classes, never numbers
@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("kind", kinds_for("regression"))
def test_the_same_numbers_pass(kind):
    result = compare("hop", kind, NUMBERS, NUMBERS.copy(), SCORES, task=REGRESSION)
    require(result)
    assert result.agreement == 1.0 and result.metric_reference == spearman(NUMBERS, SCORES)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_numbers_are_caught(kind, fault):
    """What keeps the order (all higher, drawn together) does not keep the concordance."""
    broken = np.column_stack([NUMBERS, NUMBERS]) if fault in (nan, infinite) else NUMBERS.copy()
    fault(broken)
    result = compare("quantize", kind, NUMBERS, broken[:, -1:], SCORES, task=REGRESSION)
    assert not result.passed
    with pytest.raises(CheckError, match="concordance 99%" if kind == "int8" and np.isfinite(broken).all() else "E610"):
        require(result)


ROUNDED = {"fp32": np.float32, "served": np.float32, "removed": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
"""Kind of check -> the type that its outputs are rounded to."""
SPREAD = np.random.default_rng(5).uniform(size=(300, 1))


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("kind", [*ROUNDED, "served, fp16", "served, bf16"])
@pytest.mark.parametrize(("least", "most"), [(0, 0.3), (0, 0.03), (36, 37), (0, 6)])
def test_numbers_of_any_scale_are_told_from_their_mean(kind, least, most):
    """The mean in place of each number is within a bound of half precision, whose scale is that of logits."""
    numbers = least + (most - least) * SPREAD
    rounded = numbers.astype(ROUNDED[kind.removeprefix("served, ")]).astype(np.float64)
    require(compare("hop", kind, numbers, rounded, numbers[:, 0], task=REGRESSION))
    mean = compare("hop", kind, numbers, 0 * numbers + numbers.mean(), numbers[:, 0], task=REGRESSION)
    assert mean.failed in (("difference",), ("agreement",)) and mean.bound.endswith(", concordance 99% beyond rounding")
    with pytest.raises(CheckError, match=r"agreement 0\.0%"):
        require(mean)
    batches = ({"batch 1": numbers[:50]}, {"batch 1": 0 * numbers[:50] + numbers.mean()})
    alone = compare("hop", kind, numbers, numbers, numbers[:, 0], task=REGRESSION, batches=batches)
    assert alone.failed_batches == ("batch 1",)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(("kind", "moved"), [("fp32", 1e-6), ("served", 1e-7), ("fp16", 5e-4), ("bf16", 2e-3)])
def test_nearly_equal_numbers_may_move_by_rounding(kind, moved):
    """Of a model that learnt nothing, whose numbers vary less than rounding moves them; and a single row has no spread."""
    noise = np.random.default_rng(6).uniform(-moved, moved, size=SPREAD.shape)
    for numbers in (0.15 + moved * SPREAD, 0.15 + 0 * SPREAD):
        require(compare("hop", kind, numbers, numbers + noise, SPREAD[:, 0], task=REGRESSION))
    one = np.array([[3.0]])
    require(compare("hop", kind, one, one + BOUNDS[kind].difference / 2, np.array([3.0]), task=REGRESSION))


@pytest.mark.usefixtures("few_draws")
def test_int8_may_move_numbers_a_little():
    nearly = NUMBERS + RNG.normal(scale=0.05, size=NUMBERS.shape)
    result = compare("quantize", "int8", NUMBERS, nearly, SCORES, task=REGRESSION)
    assert result.passed and 0.99 < result.agreement < 1.0
    low, high = result.metric_interval
    assert low <= result.metric_candidate - result.metric_reference <= high and low < high
    assert not compare("export", "fp32", NUMBERS, nearly, SCORES, task=REGRESSION).passed


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("metric", ["spearman", "pearson", "pearson_spearman"])
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_of_a_few_close_numbers_a_loss_is_ruled_out_by_their_draws(noise, metric):
    """A row moves ranks only where it passes another's. Those of 3 / N of all rows, all lost, are no bound of a correlation."""
    numbers, scores = NUMBERS[:40].astype(np.float64), SCORES[:40]
    nearly = numbers + noise * np.random.default_rng(0).normal(size=numbers.shape)
    result = compare("quantize", "int8", numbers, nearly, scores, task=REGRESSION.with_metric(metric))
    assert result.verdict == "passed" and result.loss.at_most < 0.01


def test_of_a_few_texts_a_share_of_rows_is_no_loss_in_nats():
    tokens = np.full((5, 1), 10)
    ours = np.tile([-20.0, 5.0], (5, 1))
    theirs = ours - np.outer([0.01, 0.02, 0.005, 0.01, 0.02], [1, 0])
    loss = loss_of(BOUNDS["int8, generated"], kind_of("generation"), ours, theirs, tokens)
    assert loss.small_enough and 0.001 < loss.found < loss.at_most < 0.002


@pytest.mark.usefixtures("few_draws")
def test_numbers_in_other_batches_are_held_to_the_same_bound():
    batches = {"batch 1": NUMBERS[:50]}
    shifted_there = {"batch 1": NUMBERS[:50] + 1}
    assert compare("hop", "int8", NUMBERS, NUMBERS, SCORES, task=REGRESSION, batches=(batches, batches)).passed
    result = compare("hop", "int8", NUMBERS, NUMBERS, SCORES, task=REGRESSION, batches=(batches, shifted_there))
    assert result.failed_batches == ("batch 1",) and not result.passed


@pytest.mark.parametrize(
    ("reason", "kind", "code"), [("bad allocation", UserError, "E908"), ("mat1 and mat2 have other shapes", CheckError, "E611")]
)
@pytest.mark.parametrize("error", failures())
def test_memory_that_is_used_up_is_no_fault_of_a_graph(error, reason, kind, code):
    with pytest.raises(kind, match=f"^{code} "), runs("the file"):
        raise error(reason)
