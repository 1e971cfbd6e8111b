"""A torch model -> files of a runtime, sessions of them, parity and latency."""

# imported with the package, because transformers' exporters import runtimes whose usage reports the registry turns off
from export.runtimes import runtime_registry as runtime_registry
