"""The machine a report is written on: processor, cores and the versions of the libraries that compute."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "onnxruntime", "onnxruntime-gpu")


def cpu_model() -> str:
    """The processor's name as Linux tells it, else what Python knows."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(device: str) -> dict:
    """Facts of this machine; the graphics card's name only where it was what was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "cpu": cpu_model(),
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
    }
    if device == "cuda":
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    return facts
