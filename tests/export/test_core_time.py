"""Timed processes that had to wait for a core say so. How long anything takes is not asserted."""

import os
import subprocess
import sys
import time

import pytest

from export.latency.core_time import BUSY, LEAST, CoreTime, disturbance, waited_by_most
from export.latency.measure import LatencyVariant, measure
from export.latency.passes import measure_passes, passes_of

SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@pytest.fixture
def core():
    """The one core on which this process, and what it starts, runs for the time of the test."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@pytest.fixture
def spinning(core):
    """Another process that never leaves that core alone."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_two_processes_on_one_core_wait_for_each_other(core, spinning):
    mine, other = CoreTime.of(os.getpid()), CoreTime.of(spinning.pid)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert mine.waited_until(CoreTime.of(os.getpid())) >= BUSY
    assert other.waited_until(CoreTime.of(spinning.pid)) >= BUSY


def test_what_counts_as_waiting():
    start = CoreTime(int(1e9), int(1e9))
    assert start.waited_until(CoreTime(int(4e9), int(2e9))) == 0.25
    assert start.waited_until(CoreTime(int(1e9), int(1e9 + LEAST) - 1)) == 0.0, "the moment in which a thread wakes up"
    assert start.waited_until(start) == 0.0
    assert CoreTime.of(2**22 + 1) == CoreTime(), "no such process, or a system that does not count"


@pytest.mark.parametrize(
    ("shares", "most"), [((0.45, 0, 0, 0), 0), ((0.45, 0), 0), ((0.45,), 0.45), ((0.75, 0.5, 0.75), 0.75), ((0.5, 0.75), 0.5)]
)
def test_a_process_that_waits_alone_is_not_disturbed_by_other_work(shares, most):
    after = [CoreTime(int((1 - share) * 1e9), int(share * 1e9)) for share in shares]
    assert waited_by_most([CoreTime()] * len(shares), after) == most


@pytest.mark.parametrize(("waited", "told"), [(0.0, ""), (BUSY - 0.001, ""), (0.437, "waited for a core 44% of their time")])
def test_only_much_waiting_is_told(waited, told):
    assert told in disturbance(waited) and bool(told) == bool(disturbance(waited))


@pytest.mark.slow
def test_measurements_beside_other_work_say_so(exported, spinning):
    variants = [LatencyVariant("onnx", "onnxruntime", exported("bert-dense").fp32, vocabulary=99)]
    [fixed] = measure(variants, [(64, 64)], 10, threads=2)
    rows = [{"input_ids": [2, *range(5, 50), 3], "attention_mask": [1] * 47, "token_type_ids": [0] * 47}] * 64
    [own_lengths] = measure_passes(variants, passes_of(rows, 0, [64])[:1], 10, threads=2)
    assert fixed.waited >= BUSY and own_lengths.waited >= BUSY
    assert fixed.to_json()["waited"] == fixed.waited and own_lengths.to_json()["waited"] == own_lengths.waited
