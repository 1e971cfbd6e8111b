"""The gate: what passes, and above all what must not."""

import numpy as np
import pytest

from compressor.errors import CheckError
from compressor.tasks.kinds import kind_of
from compressor.tasks.metrics import spearman
from export.parity import BOUNDS, MORE_ROWS, compare, failure, in_other_batches, require

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(200, 3)).astype(np.float32)
LABELS = LOGITS.argmax(axis=1)


@pytest.mark.parametrize("kind", sorted(BOUNDS))
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


@pytest.mark.parametrize("kind", ["removed", "merged", "onnx", "served"])
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


@pytest.mark.parametrize("fault", [nan, infinite, swapped_columns, constant])
def test_int8_faults_are_caught(fault):
    broken = LOGITS.copy()
    fault(broken)
    assert not compare("quantize", "int8", LOGITS, broken, LABELS).passed


def test_merge_must_be_exact():
    nearly = LOGITS.copy()
    nearly[0, 0] = np.nextafter(nearly[0, 0], np.float32(9))
    assert not compare("merge", "merged", LOGITS, nearly, LABELS).passed
    assert compare("merge", "removed", LOGITS, nearly, LABELS).passed


def test_int8_bounds_agreement_and_metric_apart():
    """5 of 200 rows with another label agree on 97.5 %; wrong in the metric too, that is 2.5 points: refused."""
    broken = LOGITS.copy()
    broken[:5] = np.roll(broken[:5], 1, axis=1)
    assert not compare("quantize", "int8", LOGITS, broken, LABELS).passed
    elsewhere = (LABELS + 1) % 3
    mixed = np.where(np.arange(200) < 5, elsewhere, LABELS)
    # the rows that changed were wrong before: the metric does not fall
    assert compare("quantize", "int8", LOGITS, broken, np.where(mixed == LABELS, LABELS, (LABELS + 2) % 3)).agreement == 0.975


def test_a_different_shape_and_no_rows_fail():
    assert not compare("hop", "int8", LOGITS, LOGITS[:-1], LABELS).passed
    assert not compare("hop", "int8", LOGITS[:0], LOGITS[:0], LABELS[:0]).passed


def test_large_logits_get_a_relative_bound():
    large = LOGITS * 1000
    shifted = large * (1 + 5e-5)
    assert compare("export", "onnx", large, shifted, LABELS).passed
    assert not compare("export", "removed", large, shifted, LABELS).passed


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
    reference = compare("hop", "onnx", LOGITS, LOGITS, LABELS, batches=(right, right))
    assert reference.passed and list(reference.batches) == ["batch 1", "batch 32, mixed lengths"]
    result = compare("hop", "onnx", LOGITS, LOGITS, LABELS, batches=(right, wrong))
    expected = {alone: ("batch 1",), mixing: tuple(reference.batches), left: ("batch 32, mixed lengths",)}
    assert not result.passed and result.failed_batches == expected[fault]
    with pytest.raises(CheckError, match=f"{result.failed_batches[0]}: |Δlogit|"):
        require(result)


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


FAULTS = [nan, infinite, shifted, drawn_together, upside_down, shuffled, cut_off, noisy, constant]


# tokens are classes, never numbers
@pytest.mark.parametrize("kind", sorted(kind for kind in BOUNDS if not kind.endswith("tokens")))
def test_the_same_numbers_pass(kind):
    result = compare("hop", kind, NUMBERS, NUMBERS.copy(), SCORES, task=REGRESSION)
    require(result)
    assert result.agreement == 1.0 and result.metric_reference == spearman(NUMBERS, SCORES)


@pytest.mark.parametrize("kind", ["onnx", "int8"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_numbers_are_caught(kind, fault):
    """What keeps the order (all higher, drawn together) does not keep the concordance."""
    broken = np.column_stack([NUMBERS, NUMBERS]) if fault in (nan, infinite) else NUMBERS.copy()
    fault(broken)
    result = compare("quantize", kind, NUMBERS, broken[:, -1:], SCORES, task=REGRESSION)
    assert not result.passed
    with pytest.raises(CheckError, match="concordance 99%" if kind == "int8" and np.isfinite(broken).all() else "E610"):
        require(result)


def test_int8_may_move_numbers_a_little():
    nearly = NUMBERS + RNG.normal(scale=0.05, size=NUMBERS.shape)
    result = compare("quantize", "int8", NUMBERS, nearly, SCORES, task=REGRESSION)
    assert result.passed and 0.99 < result.agreement < 1.0
    low, high = result.metric_interval
    assert low <= result.metric_candidate - result.metric_reference <= high and low < high
    assert not compare("export", "onnx", NUMBERS, nearly, SCORES, task=REGRESSION).passed


def test_numbers_in_other_batches_are_held_to_the_same_bound():
    batches = {"batch 1": NUMBERS[:50]}
    shifted_there = {"batch 1": NUMBERS[:50] + 1}
    assert compare("hop", "int8", NUMBERS, NUMBERS, SCORES, task=REGRESSION, batches=(batches, batches)).passed
    result = compare("hop", "int8", NUMBERS, NUMBERS, SCORES, task=REGRESSION, batches=(batches, shifted_there))
    assert result.failed_batches == ("batch 1",) and not result.passed
