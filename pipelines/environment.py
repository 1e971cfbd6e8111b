"""The machine and the packages that results come from: they enter fingerprints and run.json."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.stage import Stage

ALTERNATIVES = {"onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino")}
"""Distributions that provide the same module under another name."""
INSTRUCTIONS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Of the processor's flags those that kernels of fp32, bf16 and int8 are chosen by, on x86 and on ARM."""


def package_versions(stage: Stage, extras: Iterable[str] = ()) -> dict[str, str | None]:
    """Version of every distribution that the stage declares, and of `extras`; None where it is not installed."""
    return {name: distribution(name) for name in (*stage.packages, *extras)}


def distribution(name: str) -> str | None:
    """'numpy 1.26.4': the distribution that provides a package, and its version; None where none is installed."""
    for one in (name, *ALTERNATIVES.get(name, ())):
        try:
            return f"{one} {importlib.metadata.version(one)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once: what torch takes by default."""
    allowed = os.sched_getaffinity(0)
    siblings = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in allowed]
    return len({path.read_text() for path in siblings}) if all(path.is_file() for path in siblings) else len(allowed)


@functools.cache
def accelerator() -> str | None:
    """Name of the first graphics card that CUDA offers to this process, None without one.

    The driver is asked, because it knows CUDA_VISIBLE_DEVICES and answers without an import of torch.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    # every call returns 0 where it succeeds
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, len(name), device):
        return None
    return name.value.decode()


def processor() -> dict[str, Any]:
    """What decides which of two files is the faster: the processor's name, its instructions that matter, its cores.

    A virtual machine may hide the name of the generation ("AMD EPYC"); the instructions tell it.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    told = {key.strip(): value.strip() for key, _, value in reversed([line.partition(":") for line in lines])}
    flags = told.get("flags", told.get("Features", "")).split()
    instructions = [name for name in INSTRUCTIONS if name in flags]
    return {"cpu": told.get("model name", platform.machine()), "instructions": instructions, "cores": physical_cores()}


def machine(stages: Iterable[Stage], threads: int | None, extras: Iterable[str] = ()) -> dict[str, Any]:
    """What seconds were measured on, and the versions of the packages that the stages declare, and of `extras`.

    `accelerator` is there only where a graphics card is.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: found for stage in stages for name, found in package_versions(stage, extras).items()}
    card = accelerator()
    return {
        **processor(),
        "threads": threads,
        "memory_bytes": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        **({"accelerator": card} if card else {}),
    }
