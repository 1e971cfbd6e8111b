"""The one place that makes sessions, of ONNX Runtime and OpenVINO: device asserted, idle threads asleep, errors with a code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compressor.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime
    import openvino

Device = Literal["cpu", "cuda"]
Runtime = Literal["onnxruntime", "openvino"]
PAST = "past_key_values."
"""How the inputs begin that hold what a model that generates remembers."""
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def runtime_of(path: Path) -> Runtime:
    """Which runtime a model file is for."""
    return "openvino" if path.suffix == ".xml" else "onnxruntime"


def session(
    path: Path, *, device: Device = "cpu", threads: int | None = None, swapped: Mapping[str, np.ndarray] | None = None
) -> onnxruntime.InferenceSession | OpenVINOSession:
    """A session with every graph optimization; `threads` defaults to one a core. `path` is an .onnx, or OpenVINO's .xml.

    `swapped` takes the place of the file's own weights of those names, in ONNX Runtime: another delta on the same file, where
    deltas are apart.

    Raises UserError E602 (file missing or of another kind), E645 (`swapped` is not of this file), E904 (CUDA asked for and not
    there: ONNX Runtime would go on with the CPU without a word; OpenVINO has none) and E901 (OpenVINO is not installed).
    """
    if not path.is_file():
        raise UserError("E602", "no such model file", "Check the path, or export the model again", str(path))
    if runtime_of(path) == "onnxruntime":
        return onnx_session(path, device, threads, swapped or {})
    if swapped:
        raise UserError("E645", "OpenVINO takes no other weights for a file", "Use the ONNX file", str(path))
    return openvino_session(path, device, threads)


def onnx_session(
    path: Path, device: Device, threads: int | None, swapped: Mapping[str, np.ndarray]
) -> onnxruntime.InferenceSession:
    """ONNX Runtime's session of an existing file. Raises UserError as `session` does."""
    import numpy as np
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    if device == "cuda":
        # CUDA's libraries lie in packages of their own, where the loader does not look; it prints what it does not find
        with contextlib.redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # idle pools that spin take the cores from whatever runs beside this session
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    check_swapped(path, swapped)
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(one)) for name, one in swapped.items()}
    for name, value in values.items():
        options.add_initializer(name, value)
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
        UnicodeDecodeError,  # its message quotes a name in the file, which need not be UTF-8
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


def check_swapped(path: Path, swapped: Mapping[str, np.ndarray]) -> None:
    """Raises UserError E645 where a file has no such weights: ONNX Runtime would go on with the file's own without a word."""
    if not swapped:
        return
    import onnx

    stored = {tensor.name: tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    for name, values in swapped.items():
        here = stored.get(name)
        if (
            here is None
            or tuple(here.dims) != values.shape
            or here.data_type != onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        ):
            what = f"the file has no weight '{name}' of {values.dtype} {list(values.shape)}"
            raise UserError("E645", what, "Give a delta of the same form, on a file with merge: false in fp32", str(path))


@dataclass(frozen=True)
class Tensor:
    """Name and shape of an input or output, a free axis as None, under ONNX Runtime's words for them."""

    name: str
    shape: list[int | None]


class OpenVINOSession:
    """A compiled OpenVINO model with the face of ONNX Runtime's session. Not for several threads at a time.

    Ids outside the vocabulary are no error to OpenVINO: their embedding is 0.
    """

    def __init__(self, path: Path, options: dict[str, str]):
        self.path, self.options = path, options
        self._compile()

    def _compile(self) -> None:
        import openvino

        self.compiled = openvino.Core().compile_model(self.path, "CPU", self.options)
        self.request = self.compiled.create_infer_request()

    def get_inputs(self) -> list[Tensor]:
        return [_tensor(port) for port in self.compiled.inputs]

    def get_outputs(self) -> list[Tensor]:
        return [_tensor(port) for port in self.compiled.outputs]

    def run(self, outputs: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in order; they are copies, so the next run leaves them alone. Raises RuntimeError, also for a name that
        the model has not."""
        try:
            results = self.request.infer(feeds)
        except RuntimeError:
            # a run that fails leaves the compiled model broken: it would then refuse good rows too
            self._compile()
            raise
        try:
            return [results[name] for name in outputs]
        except KeyError as error:
            raise RuntimeError(f"the model has no output {error}") from None


def _tensor(port: openvino.ConstOutput) -> Tensor:
    return Tensor(port.get_any_name(), [None if axis.is_dynamic else axis.get_length() for axis in port.partial_shape])


def openvino_session(path: Path, device: Device, threads: int | None) -> OpenVINOSession:
    """OpenVINO's session of an existing file, computing in fp32 around the int8. Raises UserError as `session` does."""
    from export.runtimes.openvino import require_openvino

    require_openvino()
    import openvino

    if device != "cpu":
        raise UserError("E904", f"{device} was asked for, OpenVINO runs on the CPU here", "Use device: cpu, or onnxruntime")
    # one request at a time has all threads. f32: where the CPU has bf16 kernels, OpenVINO would use them even for a model
    # in fp32, and the same file would answer otherwise on another machine
    options = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    if threads:
        options["INFERENCE_NUM_THREADS"] = str(threads)
    try:
        live = OpenVINOSession(path, options)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][-160:].strip(" .")
        raise UserError("E602", f"not a readable OpenVINO model ({reason})", "Export the model again", str(path)) from error
    if live.compiled.get_property("INFERENCE_PRECISION_HINT") != openvino.Type.f32:
        raise UserError("E904", "OpenVINO does not compute in fp32 here", "Use the runtime onnxruntime")
    return live


def run(live: onnxruntime.InferenceSession | OpenVINOSession, encoding: dict[str, np.ndarray]) -> np.ndarray:
    """Logits (batch, classes) of int64 arrays (batch, length), or (batch, length, words) of a graph that generates."""
    return live.run(["logits"], taken(live, encoding))[0]


def taken(live: onnxruntime.InferenceSession | OpenVINOSession, encoding: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a graph is fed: inputs that it does not have are left out, and one that generates is given an empty past."""
    wanted = {value.name: value.shape for value in live.get_inputs()}
    feeds = {name: values for name, values in encoding.items() if name in wanted}
    if past := {name: shape for name, shape in wanted.items() if name.startswith(PAST)}:
        import numpy as np

        mask = encoding["attention_mask"]
        feeds |= {name: np.zeros((len(mask), shape[1], 0, shape[3]), np.float32) for name, shape in past.items()}
        # a position is the number of tokens before it, wherever the padding is
        feeds["position_ids"] = np.maximum(mask.cumsum(axis=1) - 1, 0)
    return feeds


class Bound:
    """An ONNX Runtime session with one batch on its device: each call computes it there, and nothing is copied to or fro."""

    def __init__(self, live: onnxruntime.InferenceSession, encoding: dict[str, np.ndarray], device: Device):
        import numpy as np
        from onnxruntime import OrtValue

        self.live, self.binding = live, live.io_binding()
        for name, values in taken(live, encoding).items():
            self.binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values), device, 0))
        self.binding.bind_output("logits", device)

    def __call__(self) -> None:
        """One pass, finished when it returns."""
        self.live.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def logits(self) -> np.ndarray:
        """Of the last call, (batch, classes)."""
        return self.binding.copy_outputs_to_cpu()[0]


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
    """What a runtime raises when a graph cannot be opened or does not run; ONNX Runtime's have no base of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException, RuntimeError
