"""The machine's own rates, and the share of them that a latency reaches; no assertion on a time."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from compressor.child_program import program
from export.latency import machine_limits
from export.latency import measure as latency
from export.latency.machine_limits import Limits, buffer_bytes, last_level_caches, measure_limits, types
from export.latency.programs import result_of, worker_environment
from export.runtimes.onnxruntime import PRODUCTS, weight_bits
from export.runtimes.runtime_registry import RUNTIMES

RATES = Limits({"fp32": 1e9, "int8": 4e9}, 2e9, {"fp32": "torch.mm"})
SMALL = """
import sys
from export.latency import machine_limits as measured
measured.SIZES, measured.buffer_bytes, measured.ROUNDS, measured.SECONDS = (32, 48), lambda *given: 4096, 1, 0.0
sys.argv.append("1")
measured.main()
"""


def test_no_file_of_the_current_folder_takes_the_place_of_a_package(tmp_path, monkeypatch):
    """A user's own export.py would run in every process that is timed, which would then find no package of that name."""
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the current folder ran')")
    monkeypatch.chdir(tmp_path)
    assert result_of("json.tool", given='{"a": 1}', timeout=60) == {"a": 1}
    assert latency.program is program, "timed models start by the same command"


@pytest.mark.parametrize("precision", PRODUCTS)
def test_onnx_runtimes_products_are_products(precision):
    (how, call), *_ = RUNTIMES["onnxruntime"].products(precision, 64, 1)
    [found] = call()
    assert how.startswith("ONNX Runtime's MatMul") and found.shape == (64, 64)
    draw = np.random.default_rng(0)
    weight, given = draw.integers(-100, 100, (64, 64)), draw.integers(0, 200, (64, 64))
    if precision == "fp32" or weight_bits() == 8:  # without VNNI, pairs of 8-bit products overflow
        np.testing.assert_array_equal(found, given @ weight)


def test_the_limit_is_the_longer_of_computing_and_of_reading_the_weights():
    """8e6 FLOPs take 8 ms in fp32 and 2 ms in int8; a million weights of 4 bytes 2 ms, of 1 byte half of one."""
    assert RATES.share("fp32", [8e6], 10**6, ms=16.0) == {"limit_share": 0.5, "limit": "compute"}
    assert RATES.share("fp32", [1e6], 10**6, ms=16.0) == {"limit_share": 0.125, "limit": "memory"}
    assert RATES.share("int8", [8e6], 10**6, ms=16.0) == {"limit_share": 0.125, "limit": "compute"}
    # of several calls each has its own limit, and 2 + 2 + 8 of 16 ms are the least
    assert RATES.share("fp32", [1e6, 1e6, 8e6], 10**6, ms=16.0) == {"limit_share": 0.75, "limit": "compute"}
    read_by_most = RATES.share("fp32", [1e6] * 5 + [8e6], 10**6, ms=36.0)
    assert read_by_most == {"limit_share": pytest.approx(0.5), "limit": "memory"}


def test_a_product_is_two_operations_a_cell_and_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(machine_limits, "SIZES", (32,))
    monkeypatch.setattr(machine_limits, "buffer_bytes", lambda *_: 4096)
    work = {(kernel.what, kernel.work) for kernel in machine_limits.kernels(1)}
    assert work == {*((name, 2 * 32**3) for name in types()), ("memory", 2 * 4096)}


def test_a_type_without_a_rate_has_no_share():
    assert RATES.share("bf16", [8e6], 10**6, ms=16.0) == {}


def test_every_type_that_is_computed_here_has_a_positive_rate():
    """As the process that measures prints them."""
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, env=worker_environment(), check=True)
    measured = Limits(**json.loads(done.stdout))
    assert list(measured.rates) == types() and {"fp32", "int8"} <= set(types())
    assert all(rate > 0 and math.isfinite(rate) for rate in (*measured.rates.values(), measured.memory))
    assert set(measured.how) == {*types(), "memory"} == set(measured.to_json()) - {"how"}


@pytest.mark.parametrize("program", ["false", "true", "missing"])
def test_without_a_measurement_there_are_no_limits(monkeypatch, program):
    monkeypatch.setattr("sys.executable", program)
    assert measure_limits(2) is None


def test_only_a_processor_with_bf16_is_measured_in_it(monkeypatch):
    monkeypatch.setattr("export.runtimes.runtime.processor", lambda: {"instructions": ["avx2"]})
    assert types() == ["fp32", "int8"]
    monkeypatch.setattr("export.runtimes.runtime.processor", lambda: {"instructions": ["avx2", "amx_bf16"]})
    assert types() == ["fp32", "bf16", "int8"]


def test_a_slow_product_is_called_once_and_holds_up_no_other(monkeypatch):
    """Without VNNI PyTorch's int8 took so long that no rate of the machine was known."""
    monkeypatch.setattr(machine_limits, "PATIENCE", 0.0)
    calls = []
    every = [
        machine_limits.Kernel("int8", f"{how}, {size} x {size}", work, lambda how=how, size=size: calls.append((how, size)))
        for size, work in ((2, 1.0), (3, 1e9))
        for how in ("slow", "slower")
    ]
    assert machine_limits.rates_of(iter(every))["int8"][1].endswith("2 x 2") and calls == [("slow", 2), ("slower", 2)]
    monkeypatch.setattr(machine_limits, "PATIENCE", 60.0)
    assert machine_limits.rates_of(iter(every))["int8"][1].endswith("3 x 3")


def test_rates_stand_in_the_order_of_types(monkeypatch):
    """On a processor with bf16, too, where the order of measuring is not that of the alphabet."""
    monkeypatch.setattr(machine_limits, "SECONDS", 0.0)
    order = ["fp32", "bf16", "int8", "memory"]
    assert list(machine_limits.rates_of(machine_limits.Kernel(what, what, 1.0, lambda: None) for what in order)) == order


@pytest.mark.parametrize(
    ("threads", "caches", "free", "mib"),
    [
        (2, [], 2**40, 128),
        (2, [32], 2**40, 128),
        (2, [32, 96, 96], 2**40, 768),  # each thread may have a cache of its own
        (64, [32] * 12, 2**40, 1536),
        (64, [32] * 12, 2**32, 512),
        (64, [32] * 12, 2**20, 128),
    ],
)
def test_a_buffer_is_larger_than_the_caches_of_all_threads(threads, caches, free, mib):
    """Else the rate of a copy is that of the caches, and no latency on a large server is near the limit."""
    assert buffer_bytes(threads, [size * 2**20 for size in caches], free) == mib * 2**20


def test_caches_that_cores_share_count_once(tmp_path, monkeypatch):
    for core, shared, size in ((0, "0,2", "32768K"), (1, "1,3", "16384K"), (2, "0,2", "32768K"), (3, "1,3", "16384K")):
        folder = tmp_path / f"cpu{core}/cache/index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(machine_limits, "allowed_cores", lambda: [0, 1, 2, 4])  # of the last nothing is told
    assert sorted(last_level_caches(tmp_path)) == [2**24, 2**25]
