"""The machine and the package versions that results depend on: part of fingerprints and of run.json.

The doctor uses it where hardly any package is installed: it imports none.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from compressor.processor import processor
from export.runtimes.runtime_registry import ALTERNATIVES

if TYPE_CHECKING:
    from pipelines.engine.stage import Stage


def package_versions(stage: Stage, extras: Iterable[str] = ()) -> dict[str, str | None]:
    """Version of every distribution that the stage declares, and of `extras`; None where it is not installed."""
    return {name: distribution(name) for name in (*stage.packages, *extras)}


def distribution(name: str) -> str | None:
    """'numpy 1.26.4': the distribution that provides a package, and its version; None where it is not installed."""
    for candidate in (name, *ALTERNATIVES.get(name, ())):
        try:
            return f"{candidate} {importlib.metadata.version(candidate)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


PROJECT = "compress-pipeline"


def product() -> str:
    """'compress-pipeline 0.1.0': this program and its version."""
    return distribution(PROJECT) or f"{PROJECT}, not installed: run from its source"


@functools.cache
def accelerator() -> str | None:
    """Name of the first GPU that CUDA offers to this process, None without one.

    It is read from the driver, which respects CUDA_VISIBLE_DEVICES and needs no import of torch.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    # every call returns 0 on success
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, len(name), device):
        return None
    return name.value.decode()


def machine(stages: Iterable[Stage], threads: int | None, extras: Iterable[str] = ()) -> dict[str, Any]:
    """The machine on which seconds were measured, and the versions of the stages' declared packages and of `extras`.

    `accelerator` is present only with a GPU.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {name: version for stage in stages for name, version in package_versions(stage, extras).items()}
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
