"""Passes over rows of their own lengths: what is timed, in which batches, and what is told of it. No assertion on a time."""

import numpy as np
import pytest

from export.latency.measure import LatencyVariant
from export.latency.passes import ROWS, Pass, measure_passes, passes_of, rows_of, summarize_pass

LENGTHS = [5, 3, 9, 3, 4, 7, 7]


def rows(lengths):
    return [{"input_ids": list(range(1, n + 1)), "attention_mask": [1] * n, "token_type_ids": [0] * n} for n in lengths]


def test_the_same_rows_come_as_they_are_and_sorted_by_length_padded_to_the_longest_of_each_batch():
    single, arrival, ordered = passes_of(rows(LENGTHS), 0, [1, 3])
    assert [(timed.order, timed.batch) for timed in (single, arrival, ordered)] == [
        ("arrival", 1),
        ("arrival", 3),
        ("sorted", 3),
    ]
    assert single.shapes == [(1, length) for length in LENGTHS]
    # the last row fills no batch
    assert arrival.shapes == [(3, 9), (3, 7)]
    assert ordered.shapes == [(3, 4), (3, 9)]
    assert arrival.batches[0]["input_ids"][1].tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert [timed.tokens for timed in (single, arrival, ordered)] == [sum(LENGTHS), sum(LENGTHS[:6]), sum(LENGTHS[:6])]
    assert [timed.facts()["padding"] for timed in (single, arrival)] == [0, 1 - sum(LENGTHS[:6]) / 48]


def test_the_rows_are_bounded_unless_a_batch_needs_more():
    many = rows([4] * 3 * ROWS)
    assert [timed.facts()["rows"] for timed in passes_of(many, 0, [8, 2 * ROWS])] == [ROWS, 2 * ROWS] * 2
    assert (rows_of(8), rows_of(2 * ROWS)) == (ROWS, 2 * ROWS)
    # a last batch of 16 rows would count as one of 48 in the mean batch
    assert [timed.shapes for timed in passes_of(many, 0, [48])] == [[(48, 4)] * 2] * 2


def test_no_pass_repeats_a_shape_that_one_of_a_smaller_batch_has_met():
    """They share their processes. Of fewer rows than a batch has, all are one."""
    for batches in ([1, 8], [4, 8]):
        small, large = (set(timed.shapes) for timed in passes_of(rows([5] * 12), 0, batches) if timed.order == "arrival")
        assert not small & large
    assert [timed.shapes for timed in passes_of(rows(LENGTHS), 0, [8])] == [[(7, 9)]] * 2


def test_the_first_time_of_each_shape_is_told_apart_from_the_later_ones():
    timed = Pass("arrival", 1, passes_of(rows([4, 6, 4]), 0, [1])[0].batches)
    assert timed.new == [True, True, False]
    told = summarize_pass("x", timed, [50.0, 70.0, 2.0], [[1.0, 3.0, 2.5], [2.0, 4.0, 2.0], [3.0, 5.0, 2.0]])
    assert told.fastest_ms == 6 < min(told.samples_ms)
    assert (told.first_ms, told.new_shape_ms, told.seen_shape_ms) == (122, 60, 3)
    assert (told.p50, told.iqr, told.rounds, told.samples_ms) == (8, 1.75, 3, (6.5, 8, 10))
    assert (told.rows_per_second, told.tokens_per_second) == (375, 1750)
    assert told.to_json()["shapes"] == 2 and "variant" not in told.to_json()


def test_every_variant_is_timed_on_every_pass(exported):
    made, done = exported("bert-dense"), []
    variants = [LatencyVariant(name, "onnxruntime", made.fp32, vocabulary=99) for name in ("first", "second")]
    passes = passes_of(rows([5, 3, 9, 3]), 0, [1, 2])
    results = measure_passes(variants, passes, 3, threads=1, on_round=lambda: done.append(1))
    assert [(row.variant, row.order, row.batch) for row in results] == [
        (name, timed.order, timed.batch) for timed in passes for name in ("first", "second")
    ]
    assert all(len(row.samples_ms) == 3 and row.first_ms > 0 for row in results) and len(done) == 4 * len(passes)


@pytest.mark.parametrize("cuda", [False, True])
def test_a_mask_is_left_out_on_a_gpu_only_where_nothing_is_padded(tmp_path, exported, monkeypatch, cuda):
    import torch

    from compressor.checkpoint import save_checkpoint
    from export.latency import worker

    save_checkpoint(exported("bert-dense").model, tmp_path, tmp_path)
    seen = []

    class Watched(torch.nn.Module):
        def forward(self, input_ids=None, attention_mask=None, token_type_ids=None):
            seen.append(attention_mask is not None)

        def to(self, *arguments):
            return self

    monkeypatch.setattr(worker, "torch_model", lambda variant: Watched())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    from_numpy = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: type("Array", (), {"to": lambda self, device: from_numpy(array)})())
    variant = {"runtime": "pytorch", "path": str(tmp_path), "device": "cuda" if cuda else "cpu", "threads": None, "half": False}
    timer = worker.torch_timer(Watched(), variant)
    whole = worker.encoding(2, 4, 99)
    timer(whole)
    timer({**whole, "attention_mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])})
    assert seen == [not cuda, True]
