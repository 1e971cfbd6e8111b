"""The one place that makes ONNX Runtime sessions: provider asserted, idle threads asleep, errors with a code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compressor.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime

Device = Literal["cpu", "cuda"]
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def session(path: Path, *, device: Device = "cpu", threads: int | None = None) -> onnxruntime.InferenceSession:
    """A session with every graph optimization; `threads` defaults to one a core.

    Raises UserError E602 (file missing or not ONNX) and E904 (CUDA asked for and not there: ONNX Runtime would go on
    with the CPU without a word).
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    if not path.is_file():
        raise UserError("E602", "no such ONNX file", "Check the path, or export the model again", str(path))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # idle pools that spin take the cores from whatever runs beside this session
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    try:
        live = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDERS[device]])
    except (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
    ) as error:
        # "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from PATH failed:REASON", the cause last
        reason = str(error).split(" : ", 3)[-1].removeprefix(f"Load model from {path} failed:")[-160:].strip(" .")
        raise UserError("E602", f"not a readable ONNX file ({reason})", "Export the model again", str(path)) from error
    if live.get_providers()[0] != PROVIDERS[device]:
        raise UserError(
            "E904",
            f"{device} was asked for, ONNX Runtime offers {', '.join(live.get_providers())}",
            "Install the extra gpu (and not cpu) with a driver that fits, or use device: cpu",
        )
    return live


def run(live: onnxruntime.InferenceSession, encoding: dict[str, np.ndarray]) -> np.ndarray:
    """Logits (batch, classes) of int64 arrays (batch, length); inputs that the graph does not have are left out."""
    wanted = {value.name for value in live.get_inputs()}
    return live.run(["logits"], {name: values for name, values in encoding.items() if name in wanted})[0]


def plain_session(model: Path | bytes) -> onnxruntime.InferenceSession:
    """A session on the CPU that runs a graph as it is written: to tell a fault of the file from one of the optimizer.

    Raises what ONNX Runtime raises (`failures`): it is for files that `session` has opened before.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    given = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(given, options, providers=[PROVIDERS["cpu"]])


def failures() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises when a graph cannot be opened or does not run; they have no base of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException
