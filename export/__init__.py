"""A torch model -> files of a runtime, sessions of them, parity and latency."""

import sys

from export.runtimes.runtime_registry import RUNTIMES

# OpenVINO and NNCF send usage data to Google Analytics by default, and transformers' exporters import both if they are
# installed. They send nothing if the reporting module cannot be imported
for _runtime in RUNTIMES.values():
    for _module in _runtime.reporters:
        sys.modules.setdefault(_module, None)
