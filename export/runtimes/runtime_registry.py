"""The runtimes, one row each: what is here can be exported to, compared, timed, served and reported, with no change elsewhere.

Loading the rows imports only the standard library: `compress doctor` runs without any package, and pipeline files are checked
and reports drawn without torch or a runtime.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from export.runtimes.runtime import Runtime

NAMES = ("onnxruntime", "openvino", "tensorrt")
"""The files of this folder that have a `RUNTIME`; the first is the default."""
RUNTIMES: dict[str, Runtime] = {name: importlib.import_module(f"export.runtimes.{name}").RUNTIME for name in NAMES}
"""Every runtime by its name."""
# OpenVINO and NNCF send usage data to Google Analytics by default, and transformers' exporters import both if they are
# installed. They send nothing if the reporting module cannot be imported. Here rather than in export/__init__.py, which does
# not run where `python -m` or `python -c` finds a plain folder `export` in the current one
for _runtime in RUNTIMES.values():
    for _module in _runtime.reporters:
        sys.modules.setdefault(_module, None)
RUNNABLE = tuple(name for name, runtime in RUNTIMES.items() if runtime.runs)
"""Names of those whose files are compared and timed here: what a pipeline may name."""
CPU_RUNTIMES = tuple(name for name in RUNNABLE if "cpu" in RUNTIMES[name].devices())
"""Those with files for the CPU: what a pipeline can serve and prune for."""
DEFAULT = RUNTIMES[NAMES[0]]
"""Used if no runtime is named."""
GENERATING = next(RUNTIMES[name] for name in RUNNABLE if RUNTIMES[name].generating)
"""The runtime of models that generate."""
PRECISIONS = tuple(dict.fromkeys(precision for name in RUNNABLE for precision in RUNTIMES[name].precisions))
"""Every precision that a runtime of RUNNABLE writes."""
CPU_PRECISIONS = tuple(
    precision for precision in PRECISIONS if any("cpu" in RUNTIMES[name].precisions.get(precision, ()) for name in RUNNABLE)
)
"""Precisions of files for the CPU: these are served here, and `precision: auto` chooses from them."""
# for a package of several runtimes, the first one counts
EXTRAS = {package: row.extra for row in reversed(RUNTIMES.values()) for package in (*row.packages, *row.writers)}
"""Package of a runtime -> the extra of this project that installs it."""
ALTERNATIVES = {package: others for row in reversed(RUNTIMES.values()) for package, others in row.alternatives.items()}
"""Package -> distributions that provide the same module under another name."""


def packages_of(names: Iterable[str], *, writing: bool = False) -> tuple[str, ...]:
    """The packages that running files of some runtimes needs, or `writing` them; words that are no runtime are left out."""
    rows = [RUNTIMES[name] for name in dict.fromkeys(names) if name in RUNTIMES]
    packages = [name for row in rows for name in (*row.packages, *(row.writers if writing else ()))]
    return tuple(dict.fromkeys(packages))


def runtime_of(path: Path) -> Runtime:
    """The runtime that a model file is opened in where none is named: the first whose files end so, else the default."""
    return next((RUNTIMES[name] for name in RUNNABLE if RUNTIMES[name].suffix == path.suffix), DEFAULT)


def hop_of(model: str, runtime: str, precision: str) -> str:
    """The name of the comparison of a file with the PyTorch model called `model`."""
    row = RUNTIMES[runtime]
    emulated = " (the CPU has no kernels: in fp32, each result rounded)" if precision in row.emulated else ""
    return f"{model}: PyTorch -> {row.label} {precision}{emulated}"
