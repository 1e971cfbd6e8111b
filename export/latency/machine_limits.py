"""The limits of this machine: the rates of its matrix products and its memory, and the least time a model could take.

`python -m export.latency.machine_limits THREADS` measures them in its own process and prints JSON; with THREADS 0 the libraries
choose.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.processor import allowed_cores, free_memory
from export.latency.programs import private_stdout, result_of
from export.runtimes.runtime_registry import RUNTIMES

TYPE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Type of a file's matrix products on the CPU, which is its precision -> bytes of a weight."""
SIZES = (1024, 1536, 2048)
"""Rows and columns of the square matrices that are multiplied; the fastest size counts."""
ROUNDS, SECONDS = 3, 0.04
"""Rounds over all kernels and sizes, and the time of each in a round: at least one call."""
PATIENCE = 1.0
"""Seconds from which on a first call is called no more, nor the same product of larger matrices: PyTorch's int8 takes a minute
where it has no kernel for the processor."""
BUFFER, TIMES_THE_CACHES = 128 * 2**20, 4
"""Least bytes of the copied buffer, and how many times as large as the caches it is."""
CACHES = Path("/sys/devices/system/cpu")
"""The folder with a description of every core's caches."""
TIMEOUT = 60.0
"""Seconds after which the measurement is given up."""


@dataclass(frozen=True)
class Limits:
    """FLOPs a second by type (a multiply-add is two), bytes a second of a memory copy (read and written), and what computed
    them."""

    rates: Mapping[str, float]
    memory: float
    how: Mapping[str, str]

    def share(self, precision: str, flops: Sequence[float], weights: int, ms: float) -> dict[str, Any]:
        """`limit_share` of calls that took `ms` together: the least time for the FLOPs of each, or for reading the `weights` (a
        number) from memory where that is longer, over the measured time; `limit` is what decides most of it. Empty where the
        rate of the type is unknown.

        All FLOPs are taken at the rate of the precision. A dynamic int8 file computes the products inside attention in fp32,
        so its least time is a lower bound.
        """
        if precision not in self.rates:
            return {}
        reading = weights * TYPE_BYTES[precision] / self.memory
        least = {"compute": 0.0, "memory": 0.0}
        for computing in (one / self.rates[precision] for one in flops):
            least["memory" if reading > computing else "compute"] += max(computing, reading)
        return {"limit_share": 1000 * sum(least.values()) / ms, "limit": max(least, key=least.get)}

    def to_json(self) -> dict[str, Any]:
        """The entry `limits` of measurements.json."""
        return {**self.rates, "memory": self.memory, "how": dict(self.how)}


def measure_limits(threads: int | None) -> Limits | None:
    """The limits of this machine's CPU with so many threads, in about four seconds; None where they cannot be measured."""
    measured = result_of("export.latency.machine_limits", str(threads or 0), timeout=TIMEOUT)
    try:
        return Limits(**measured)
    except TypeError:  # None, or no such entries
        return None


def types() -> list[str]:
    """The types in which some runtime computes on the CPU here."""
    rows = [row for row in RUNTIMES.values() if row.runs]
    return [name for name in TYPE_BYTES if any("cpu" in row.precisions.get(name, ()) and row.computes(name) for row in rows)]


@dataclass(frozen=True)
class Kernel:
    """One call whose time gives a rate: a product of two square matrices of a type, or a copy."""

    what: str
    how: str
    work: float
    """FLOPs, or bytes, of a call."""
    call: Callable[[], object]


def fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of the calls that `SECONDS` allow."""
    times, end = [], time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


Product = tuple[str, Callable[[], object]]
"""What computes, and one call of it."""


def torch_products(name: str, size: int) -> Iterator[Product]:
    """PyTorch's product of two square matrices of a type."""
    import torch

    if name == "int8":
        # not public: a PyTorch without it is left out
        if multiply := getattr(torch, "_int_mm", None):
            left, right = (torch.randint(-100, 100, (size, size), dtype=torch.int8) for _ in range(2))
            yield "torch._int_mm", lambda: multiply(left, right)
        return
    left, right = (torch.randn(size, size).to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[name])) for _ in range(2))
    out = torch.empty_like(left)
    yield "torch.mm", lambda: torch.mm(left, right, out=out)


def buffer_bytes(threads: int, caches: Iterable[int], free: int) -> int:
    """Bytes of the copied buffer: `BUFFER`, or so many times what `threads` threads keep in the largest of the caches (bytes of
    each), one a thread, as hardly anything is read from them; with its copy a quarter of the `free` memory at most."""
    return max(BUFFER, min(TIMES_THE_CACHES * sum(sorted(caches)[-threads:]), free // 8))


def last_level_caches(root: Path = CACHES) -> list[int]:
    """Bytes of every cache of the third level that a core of this process uses; none where the system does not tell."""
    found = {}
    for core in allowed_cores():
        folder = root / f"cpu{core}/cache/index3"
        with contextlib.suppress(OSError, ValueError):
            size = (folder / "size").read_text().strip()  # '32768K'
            found[(folder / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * 1024
    return list(found.values())


def kernels(threads: int) -> Iterator[Kernel]:
    """Every product of every type at every size, and a copy, which reads and writes each byte."""
    import torch

    for name, size in itertools.product(types(), SIZES):
        by_runtimes = (product for row in RUNTIMES.values() if row.runs for product in row.products(name, size, threads))
        for how, call in (*torch_products(name, size), *by_runtimes):
            yield Kernel(name, f"{how}, {size} x {size}", 2 * size**3, call)
    size = buffer_bytes(threads or torch.get_num_threads(), last_level_caches(), free_memory())
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    yield Kernel("memory", f"copy of {size // 2**20} MiB", 2 * size, lambda: target.copy_(source))


def rates_of(measured: Iterable[Kernel]) -> dict[str, tuple[float, str]]:
    """FLOPs or bytes a second of the fastest kernel of each type, and which it is, types as `measured` has them; in rounds, as
    other work comes and goes."""
    live, slow, found, order = [], set(), [], {}
    for kernel in measured:
        order.setdefault(kernel.what)
        program = (kernel.what, kernel.how.rpartition(",")[0])
        if program in slow:
            continue
        start = time.perf_counter()
        kernel.call()
        if (seconds := time.perf_counter() - start) < PATIENCE:
            live.append(kernel)
            continue
        slow.add(program)
        found.append((kernel.what, kernel.work / seconds, kernel.how))
    found += [(kernel.what, kernel.work / fastest(kernel.call), kernel.how) for kernel in live * ROUNDS]
    best = {what: (rate, how) for what, rate, how in sorted(found)}  # the fastest of a type is its last
    return {what: best[what] for what in order}


def main() -> None:
    import torch

    replies = private_stdout()
    if threads := int(sys.argv[1]):
        torch.set_num_threads(threads)
    with torch.inference_mode():
        best = rates_of(kernels(threads))
    rates, how = ({name: pair[place] for name, pair in best.items()} for place in (0, 1))
    replies.write(json.dumps({"memory": rates.pop("memory"), "rates": rates, "how": how}) + "\n")
    replies.close()


if __name__ == "__main__":
    main()
