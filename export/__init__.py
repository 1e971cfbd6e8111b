"""A torch model -> files of a runtime, sessions of them, parity and latency."""

import sys

from export.runtimes.runtime_registry import RUNTIMES

# OpenVINO and NNCF report their use to Google Analytics without asking, and transformers' exporters import both where they are
# installed. They keep silent where the module that reports cannot be imported
for _runtime in RUNTIMES.values():
    for _module in _runtime.reporters:
        sys.modules.setdefault(_module, None)
