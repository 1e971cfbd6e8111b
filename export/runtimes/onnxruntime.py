"""ONNX Runtime: fp32 with fused operators, dynamic int8, fp16 and bf16 for CUDA; also runs models that generate."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.arguments import require_all_of, require_one_of
from compressor.errors import UserError
from compressor.memory_faults import memory_fault
from compressor.processor import weight_bits
from export.runtimes.runtime import Device, PassProfile, Runtime, TensorSpec, encoder_of

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from onnxruntime import InferenceSession
    from torch import nn


@dataclass(frozen=True, kw_only=True, eq=False)
class OnnxRuntime(Runtime):
    """The row of ONNX Runtime with one execution provider for each device."""

    providers: Mapping[Device, str]

    def files(self, path: Path) -> dict[str, Path]:
        encoder = encoder_of(path)
        parts = {"model.onnx": path, **({"encoder.onnx": encoder} if encoder else {})}
        # a graph refers to its data file by name
        data = [part.with_name(f"{part.name}.data") for part in parts.values()]
        return parts | {beside.name: beside for beside in data if beside.is_file()}

    def write(
        self,
        graph: onnx.ModelProto,
        folder: Path,
        *,
        precisions: Sequence[str],
        rows: Sequence[dict[str, np.ndarray]] = (),
        excluded: Sequence[str] = (),
        fuse: bool = True,
    ) -> dict[str, Path]:
        return write_onnx(graph, folder, precisions=precisions, fuse=fuse, excluded=excluded, file_name=self.file_name)

    def open(self, path: Path, device: Device, threads: int | None, swapped: Mapping[str, np.ndarray]) -> InferenceSession:
        return open_session(path, device, self.providers[device], threads, swapped)

    def open_plain(self, path: Path) -> InferenceSession:
        return plain_session(path)

    def open_for_parity(self, path: Path, precision: str, threads: int | None) -> InferenceSession:
        return emulated_session(path) if precision in self.emulated else self.open(path, "cpu", threads, {})

    def bound(self, session: InferenceSession, feeds: dict[str, np.ndarray], device: Device) -> Callable[[], object]:
        return BoundBatch(session, feeds, device)

    def values(self, path: Path, encoding: dict[str, np.ndarray]) -> list[np.ndarray]:
        import numpy as np

        from export.graph.files import with_every_value
        from export.runtimes.feeds import feeds_of

        plain = plain_session(with_every_value(path))
        every = plain.run(None, feeds_of(plain, encoding))
        return [value for value in every if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 3]

    def profile(
        self, path: Path, encoding: dict[str, np.ndarray], threads: int | None, *, warm: int, passes: int
    ) -> PassProfile:
        from export.runtimes.onnxruntime_profile import profile_by_trace

        def opened(trace: Path) -> InferenceSession:
            return open_session(path, "cpu", self.providers["cpu"], threads, {}, trace)

        return profile_by_trace(opened, encoding, warm, passes)

    def failures(self) -> tuple[type[Exception], ...]:
        # they have no separate base module
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        return state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException, RuntimeError

    def computes_with(self, device: Device) -> str:
        return self.providers[device]

    def offers(self, device: Device) -> bool:
        from onnxruntime import get_available_providers

        return self.providers[device] in get_available_providers()

    def weight_bits(self) -> int:
        return weight_bits()

    def products(self, precision: str, size: int, threads: int) -> Iterator[tuple[str, Callable[[], object]]]:
        if precision in PRODUCTS and all(importlib.util.find_spec(package) for package in ("onnx", "onnxruntime")):
            yield f"ONNX Runtime's {PRODUCTS[precision][0]}", product(precision, size, threads)

    def can_fuse(self, model: nn.Module) -> bool:
        from export.graph.rewrite import can_fuse

        return can_fuse(model)

    def tensors(self, path: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
        import onnx
        from google.protobuf.message import DecodeError

        try:
            graph = onnx.load(path, load_external_data=False).graph
        except (OSError, DecodeError) as error:
            raise UserError("E721", f"not a readable ONNX file ({error})", "Export the model again", str(path)) from error
        initializers = {value.name for value in graph.initializer}
        inputs = [value for value in graph.input if value.name not in initializers]
        return [*map(_tensor_spec, inputs)], [*map(_tensor_spec, graph.output)]


RUNTIME = OnnxRuntime(
    key="onnxruntime",
    title="ONNX Runtime",
    label="ONNX",
    # CUDA has no kernel for DynamicQuantizeLinear, and ONNX Runtime silently places it on the CPU. Forbidding every node on
    # the CPU (session.disable_cpu_ep_fallback) does not work: the shape arithmetic of fp32 graphs belongs there
    precisions={"fp32": ("cpu", "cuda"), "int8": ("cpu",), "fp16": ("cuda",), "bf16": ("cuda",)},
    generating=("fp32", "int8", "int4"),
    packages=("onnxruntime",),
    alternatives={"onnxruntime": ("onnxruntime-gpu", "onnxruntime-openvino")},
    on_gpu=("onnxruntime-gpu[cuda,cudnn]",),
    extra="cpu",
    optimizes=True,
    emulated=("fp16", "bf16"),
    symbols={"fp32": "circle", "int8": "diamond"},
    backend="onnxruntime",
    threads_parameter="intra_op_thread_count",
    # threads that do not spin are woken for every operator, which costs small ones more than it brings
    instances=2,
    text_tokens=128,
    streams=True,
    providers={"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"},
)


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    from onnx import TensorProto, helper

    tensor = value.type.tensor_type
    name = TensorProto.DataType.Name(tensor.elem_type)
    type_ = name if name in ("UNDEFINED", "STRING") else helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return TensorSpec(value.name, type_, [axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor.shape.dim])


def write_onnx(
    graph: onnx.ModelProto,
    folder: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
    limit: int | None = None,
    excluded: Sequence[str] = (),
    weight_bits: int | None = None,
    file_name: Callable[[str], str] | None = None,
) -> dict[str, Path]:
    """Write FOLDER/model.onnx, model_int8.onnx, ... of a graph as `trace` gave it; returns precision -> path.

    fp32 and int8 are rewritten for the CPU; int8 has one scale a channel, and the nodes `excluded` (of `matrices`) stay fp32
    in it. Without `fuse`, no operator joins several of the model's. `limit` is as in `export.graph.files.save`,
    `weight_bits` (7 or 8) is that of this processor unless it is given (`compressor.processor`). Raises ValueError for unknown
    precisions, matrices or widths.
    """
    require_all_of("precisions", precisions, RUNTIME.precisions)
    bits = RUNTIME.weight_bits() if weight_bits is None else weight_bits
    require_one_of("weight_bits", bits, (7, 8))
    from export.graph.files import SINGLE_FILE_LIMIT, carry_over, save
    from export.graph.half import brain, half
    from export.graph.rewrite import for_cpu, fused, quantized_dynamic
    from export.graph.trace import require_matrices

    require_matrices(graph, excluded)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        "fp32": lambda: for_cpu(graph, join=fuse),
        "int8": lambda: quantized_dynamic(for_cpu(graph, excluded, join=fuse), excluded, bits),
        # CUDA's joined operators sum in fp32 inside; TensorRT does not support them: it has its own (runtimes/tensorrt.py)
        "fp16": lambda: half(fused(graph, "cuda") if fuse else graph),
        "bf16": lambda: brain(graph),
    }
    paths = {}
    for precision in precisions:
        paths[precision] = folder / (file_name or RUNTIME.file_name)(precision)
        made = writers[precision]()
        carry_over(graph, made)
        save(made, paths[precision], SINGLE_FILE_LIMIT if limit is None else limit)
    return paths


PROVIDER_OPTIONS: dict[Device, dict[str, str]] = {"cuda": {"use_tf32": "0"}}
"""fp32 is computed in fp32: by default ONNX Runtime multiplies it in TF32 on CUDA, with 11 of its 24 bits."""
NO_KERNELS_BY_SHAPE = ("ORT_ENABLE_CUDNN_FLASH_ATTENTION", "0")
"""The variable that keeps fused attention from cuDNN, which from compute capability 9.0 on builds its kernels for each shape:
80 to 140 ms on an H200 where a pass takes 1 (docs/results/quickstart_h200.md)."""


def open_session(
    path: Path,
    device: Device,
    provider: str,
    threads: int | None,
    swapped: Mapping[str, np.ndarray],
    trace: Path | None = None,
) -> InferenceSession:
    """A session with every graph optimization, by one execution provider or not at all. With `trace` it records the time of
    every operator, in a file whose path begins so. Raises UserError E602, E645, E904, E908."""
    import numpy as np
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    if device == "cuda":
        os.environ.setdefault(*NO_KERNELS_BY_SHAPE)
        # CUDA's libraries are in separate packages, which the loader does not search; it prints what it does not find
        with contextlib.redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # spinning idle threads would take cores from other sessions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if trace:
        options.enable_profiling, options.profile_file_prefix = True, str(trace)
    if threads:
        options.intra_op_num_threads = threads
    check_swapped(path, swapped)
    # they must live until the session is made
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for name, array in swapped.items()}
    for name, value in values.items():
        options.add_initializer(name, value)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, PROVIDER_OPTIONS.get(device, {}))])
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
        raise _unreadable(path, error) from error
    if session.get_providers()[0] != provider:
        # ONNX Runtime would silently fall back to the CPU
        raise UserError(
            "E904",
            f"{device} was requested, ONNX Runtime offers {', '.join(session.get_providers())}",
            "Install the extra gpu (and not cpu) with a driver that fits, or use device: cpu",
        )
    return session


def _unreadable(path: Path, error: Exception) -> UserError:
    """E602 with the cause, last in "[ONNXRuntimeError] : 7 : NAME : Load model from PATH failed:CAUSE"; E908 without memory."""
    cause = " ".join(str(error).split(" : ", 3)[-1].removeprefix(f"Load model from {path} failed:").split())[-160:].strip(" .")
    return memory_fault(error) or UserError("E602", f"not a readable ONNX file ({cause})", "Export the model again", str(path))


def check_swapped(path: Path, swapped: Mapping[str, np.ndarray]) -> None:
    """Raises UserError E645 where a file has no such weights: ONNX Runtime would silently use the file's own; E602."""
    if not swapped:
        return
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise _unreadable(path, error) from error
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for name, values in swapped.items():
        tensor = stored.get(name)
        if (
            tensor is None
            or tuple(tensor.dims) != values.shape
            or tensor.data_type != onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        ):
            what = f"the file has no weight '{name}' of {values.dtype} {list(values.shape)}"
            raise UserError("E645", what, "Give a delta of the same form, on a file with merge: false in fp32", str(path))


class BoundBatch:
    """One batch on a session's device: each call computes it there, and nothing is copied to or from the host."""

    def __init__(self, session: InferenceSession, feeds: dict[str, np.ndarray], device: Device):
        import numpy as np
        from onnxruntime import OrtValue

        self.session, self.binding = session, session.io_binding()
        for name, values in feeds.items():
            self.binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values), device, 0))
        self.binding.bind_output("logits", device)

    def __call__(self) -> None:
        """Run one forward pass; it is finished when the call returns."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def logits(self) -> np.ndarray:
        """Logits (batch, classes) of the last call."""
        return self.binding.copy_outputs_to_cpu()[0]


PRODUCTS = {"fp32": ("MatMul", "float32", "float32", "float32"), "int8": ("MatMulInteger", "uint8", "int8", "int32")}
"""Precision -> the operator, and numpy's types of activations, weights and product: in int8 the fastest pair; in fp32 PyTorch's
product is half as fast on some processors of AMD."""


def product(precision: str, size: int, threads: int) -> Callable[[], object]:
    """One product of square matrices, activations and weights, of PRODUCTS."""
    import numpy as np
    import onnxruntime
    from onnx import helper, numpy_helper

    operator, *types = PRODUCTS[precision]
    of_input, of_weight, of_product = map(np.dtype, types)
    draw = np.random.default_rng(0)
    weight = numpy_helper.from_array(draw.integers(-100, 100, (size, size)).astype(of_weight), "weight")
    shown = {name: helper.np_dtype_to_tensor_dtype(kind) for name, kind in (("input", of_input), ("product", of_product))}
    inputs, outputs = ([helper.make_tensor_value_info(name, kind, [size, size])] for name, kind in shown.items())
    nodes = [helper.make_node(operator, ["input", "weight"], ["product"])]
    graph = helper.make_graph(nodes, "product", inputs, outputs, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    live = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"input": draw.integers(0, 200, (size, size)).astype(of_input)}
    return lambda: live.run(None, feeds)


def plain_session(model: Path | onnx.ModelProto) -> InferenceSession:
    """A CPU session that runs a graph without optimizations: to distinguish faults of the file from those of the optimizer.

    Raises what ONNX Runtime raises (`Runtime.failures`): it is for files that `session` has opened before.
    """
    import onnxruntime

    from export.graph.files import save

    if not isinstance(model, Path):
        with tempfile.TemporaryDirectory() as folder:  # a message would end at 2 GB
            save(model, Path(folder, "model.onnx"))
            return plain_session(Path(folder, "model.onnx"))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def emulated_session(path: Path) -> InferenceSession:
    """A session on the CPU that computes what a file in half precision says: ONNX Runtime does not there (`half.emulated`).
    Raises UserError E602 where the file is missing or damaged."""
    import onnx
    from google.protobuf.message import DecodeError

    from export.graph.half import emulated

    try:
        proto = emulated(onnx.load(path))
    except (OSError, ValueError, DecodeError, onnx.shape_inference.InferenceError) as error:
        raise _unreadable(path, error) from error
    try:
        return plain_session(proto)
    except RUNTIME.failures() as error:
        raise _unreadable(path, error) from error
