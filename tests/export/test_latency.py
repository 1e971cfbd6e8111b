"""Interleaved measuring with real workers; no assertion on a time."""

from pathlib import Path

import numpy as np
import pytest

from compressor.checkpoint import save_checkpoint
from compressor.errors import UserError
from export.latency import Variant, measure, summarize, workers


def test_two_runtimes_are_measured_at_every_shape(tmp_path, exported):
    """MPNet takes no token_type_ids: each runtime is fed what it takes."""
    made = exported("mpnet-unequal")
    save_checkpoint(made.model, tmp_path / "checkpoint", tmp_path)
    variants = [
        Variant("torch", "pytorch", tmp_path / "checkpoint", vocabulary=99),
        Variant("onnx", "onnxruntime", made.fused, vocabulary=99),
    ]
    rounds = []
    results = measure(variants, [(1, 8), (2, 8)], 3, on_round=lambda: rounds.append(1))
    assert [(r.variant, r.batch, len(r.samples_ms)) for r in results] == [
        ("torch", 1, 3),
        ("onnx", 1, 3),
        ("torch", 2, 3),
        ("onnx", 2, 3),
    ]
    assert len(rounds) == 6 and all(0 < r.p50 <= r.p95 <= r.p99 for r in results)


def test_a_worker_takes_the_threads_it_is_given(exported):
    variants = [Variant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)]
    counts = []
    for threads in (1, 4):
        with workers(variants, threads) as [live]:
            counts.append(len(list(Path(f"/proc/{live.process.pid}/task").iterdir())))
    assert counts[1] - counts[0] == 3


def test_a_worker_that_cannot_load_is_one_clear_error(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"E603 'broken' cannot be measured: .*E602"):
        measure([Variant("broken", "onnxruntime", broken)], [(1, 4)], 1)


def test_a_worker_that_is_killed_says_so(exported):
    with workers([Variant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)], None) as [live]:
        live.process.kill()
        with pytest.raises(UserError, match=r"E603 'onnx' cannot be measured: .*killed by signal 9"):
            live.time(1, 4)


def test_summary_by_hand():
    summary = summarize("x", 8, 16, [1.0, 2.0, 3.0, 4.0])
    assert (summary.p50, summary.iqr, summary.throughput) == (2.5, 1.5, 3200.0)
    assert summary.p99 == pytest.approx(np.percentile([1, 2, 3, 4], 99))
