"""Interleaved measuring with real workers; no assertion on a time."""

import itertools
import random
import signal
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from compressor.checkpoint import save_checkpoint
from compressor.errors import UserError
from export.latency import worker as latency_worker
from export.latency.measure import WARM_UP, LatencyVariant, measure, summarize, time_shape, workers


@pytest.mark.slow
def test_two_runtimes_are_measured_at_every_shape(tmp_path, exported):
    """MPNet takes no token_type_ids: each runtime is fed what it takes."""
    made = exported("mpnet-unequal")
    save_checkpoint(made.model, tmp_path / "checkpoint", tmp_path)
    variants = [
        LatencyVariant("torch", "pytorch", tmp_path / "checkpoint", vocabulary=99),
        LatencyVariant("onnx", "onnxruntime", made.fused, vocabulary=99),
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
    variants = [LatencyVariant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)]
    counts = []
    for threads in (1, 4):
        with workers(variants, threads) as [live]:
            counts.append(len(list(Path(f"/proc/{live.process.pid}/task").iterdir())))
    assert counts[1] - counts[0] == 3


def test_a_worker_that_cannot_load_is_one_clear_error(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"E603 'broken' cannot be measured: .*E602"):
        measure([LatencyVariant("broken", "onnxruntime", broken)], [(1, 4)], 1)


def test_a_worker_that_is_killed_says_so(exported):
    with workers([LatencyVariant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)], None) as [live]:
        live.process.kill()
        with pytest.raises(UserError, match=r"E603 'onnx' cannot be measured: .*killed by signal 9"):
            live.time(1, 4)


@pytest.mark.parametrize(("half", "dtype"), [(False, torch.float32), (True, torch.float16)])
def test_pytorch_runs_in_the_precision_that_is_asked_for(tmp_path, exported, half, dtype):
    made = exported("bert-dense")
    save_checkpoint(made.model, tmp_path, tmp_path)
    variant = {**asdict(LatencyVariant("x", "pytorch", tmp_path, vocabulary=99, half=half)), "threads": None}
    model = latency_worker.torch_model(variant)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert latency_worker.torch_timer(model, variant)(latency_worker.encoding(2, 8, 99)) > 0


def test_a_graph_is_captured_after_its_warm_up_and_holds_its_inputs(monkeypatch):
    """With a card that is not there; on a real one benchmarks/runtimes.py --device cuda runs it."""
    told, stream, graph = [], Mock(), Mock()
    cuda = Mock(
        Stream=lambda: stream, CUDAGraph=lambda: graph, current_stream=lambda: Mock(wait_stream=lambda one: told.append(one))
    )
    cuda.stream = lambda one: nullcontext()
    cuda.graph = lambda one: nullcontext(told.append(one))
    monkeypatch.setattr(torch, "cuda", cuda)
    replay = latency_worker.Replay(lambda: told.append("pass"))
    assert told == ["pass"] * 3 + [stream, graph, "pass"] and not graph.replay.called
    replay()
    replay()
    assert graph.replay.call_count == 2 and told[-1] == "pass" and len(told) == 6 and callable(replay.forward)


def test_an_error_ends_workers_that_are_busy(exported):
    """They are told to end at once, not asked to when they are done."""
    with (
        pytest.raises(KeyError),
        workers([LatencyVariant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)], None) as [one],
    ):
        one.start(1, 4)
        raise KeyError
    assert one.process.returncode == -signal.SIGTERM


def test_after_a_warm_up_all_take_turns_in_another_order_every_round():
    calls = []

    def worker(name):
        def noted(*_):
            calls.append(name)
            return 1.0

        still = SimpleNamespace(waited_until=lambda end: 0.0)
        variant = SimpleNamespace(name=name)
        return SimpleNamespace(variant=variant, start=noted, finish=lambda: None, time=noted, core_time=still)

    found = time_shape([*map(worker, "abc")], 1, 8, 20, random.Random(0))
    rounds = [tuple(calls[first : first + 3]) for first in range(3 * WARM_UP, len(calls), 3)]
    assert [len(one.samples_ms) for one in found] == [20] * 3 and len(rounds) == 20
    assert {*rounds} == {*itertools.permutations("abc")}


def test_summary_by_hand():
    summary = summarize("x", 8, 16, [1.0, 2.0, 3.0, 4.0])
    assert (summary.p50, summary.iqr, summary.throughput) == (2.5, 1.5, 3200.0)
    assert summary.p99 == pytest.approx(np.percentile([1, 2, 3, 4], 99)) and summary.p95 == pytest.approx(3.85)
