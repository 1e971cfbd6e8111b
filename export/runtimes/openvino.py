"""OpenVINO on the CPU: fp32, bf16, and static int8 by NNCF, calibrated on real rows. The files are model.xml with model.bin.

A graph with int8 weights and calibrated activations is the fastest way to run a dense encoder on a CPU with VNNI.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.arguments import require_all_of
from compressor.errors import UserError
from compressor.memory_faults import memory_fault
from compressor.processor import weight_bits
from export.runtimes.runtime import Device, PassProfile, Runtime, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import openvino
    from tritonclient.grpc.model_config_pb2 import ModelConfig

ELEMENT_TYPES = {
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "boolean": "bool",
}
"""OpenVINO's element types -> numpy's. (OpenVINO's own `to_dtype` maps bf16 to float16.)"""
COMPUTED_IN = ["compress", "computed_in"]
"""Path in a file's rt_info of the type that it is computed in; fp32 where it is missing."""
WITHOUT = "/WithoutBiases"
"""End of the name of a Gemm's product, beside the sum that has the Gemm's name."""
AUTOMATIC_NAME = re.compile(r"\w+_\d+")
"""OpenVINO's generated name of an unnamed node: Type_NUMBER, counted throughout the process."""


class OpenVINO(Runtime):
    """The row of OpenVINO."""

    def files(self, path: Path) -> dict[str, Path]:
        return {"model.xml": path, "model.bin": path.with_suffix(".bin")}

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
        return export_openvino(graph, folder, precisions=precisions, rows=rows, excluded=excluded)

    def weight_bits(self) -> int:
        return weight_bits()

    def attentions_apart(self, path: Path) -> int:
        import openvino

        from export.runtimes.openvino_attention import attentions_apart

        return attentions_apart(openvino.Core().read_model(path))

    def open(self, path: Path, device: Device, threads: int | None, swapped: Mapping[str, np.ndarray]) -> OpenVINOSession:
        if swapped:
            raise UserError("E645", "OpenVINO takes no other weights for a file", "Use the ONNX file", str(path))
        return open_session(path, device, threads)

    def profile(
        self, path: Path, encoding: dict[str, np.ndarray], threads: int | None, *, warm: int, passes: int
    ) -> PassProfile:
        from export.runtimes.openvino_profile import profile_by_counters

        session = open_session(path, "cpu", threads, counters=True)
        return profile_by_counters(session, session.model, encoding, warm, passes)

    def computes_with(self, device: Device) -> str:
        return "CPU, bf16 in bf16 files, fp32 in the others and around int8"

    def tensors(self, path: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
        self.require()
        import openvino

        try:
            model = openvino.Core().read_model(path)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            what = f"not a readable OpenVINO model ({reason})"
            raise UserError("E721", what, "Export the model again", str(path)) from error
        return [*map(_tensor_spec, model.inputs)], [*map(_tensor_spec, model.outputs)]

    def configure(self, config: ModelConfig, path: Path) -> None:
        if computed_in(path) == "bf16":
            config.parameters["HINT_BF16"].string_value = "YES"
        if config.max_batch_size > 0:
            # the native backend compiles for max_batch_size rows, and without this refuses every smaller request
            config.parameters["ENABLE_BATCH_PADDING"].string_value = "YES"


RUNTIME = OpenVINO(
    key="openvino",
    title="OpenVINO",
    label="OpenVINO",
    precisions={"fp32": ("cpu",), "int8": ("cpu",), "bf16": ("cpu",)},
    suffix=".xml",
    packages=("openvino",),
    writers=("nncf",),
    extra="openvino",
    reporters=("openvino_telemetry",),
    instructions={"bf16": ("amx_bf16", "avx512_bf16")},
    tiles={"int8": 64, "bf16": 32},
    int8_wants_vnni=True,
    calibrated=True,
    symbols={"fp32": "circle-open", "int8": "diamond-open", "bf16": "square-open"},
    backend="openvino",
    threads_parameter="INFERENCE_NUM_THREADS",
)


def _tensor_spec(port: openvino.Output) -> TensorSpec:
    name = port.get_element_type().get_type_name()
    shape = [-1 if axis.is_dynamic else axis.get_length() for axis in port.partial_shape]
    return TensorSpec(port.get_any_name(), ELEMENT_TYPES.get(name, name), shape)


def export_openvino(
    graph: onnx.ModelProto,
    folder: Path,
    *,
    precisions: Sequence[str],
    rows: Sequence[dict[str, np.ndarray]] = (),
    excluded: Sequence[str] = (),
) -> dict[str, Path]:
    """Write FOLDER/model.xml, model_int8.xml and model_bf16.xml, as in `precisions`; returns precision -> path.

    `graph` is the unfused fp32 graph (`export.graph.trace.trace`): the fused operators exist in ONNX Runtime only. `rows`
    are padded batches, int64 (batch, length), that int8 is calibrated on; the matrices `excluded` (names of
    `export.graph.trace.matrices`) stay fp32 in it, as does an attention of which one gives queries or keys, and its weights
    have the bits of this processor (`compressor.processor`). Equal inputs give equal bytes.
    Raises UserError E901 (extra missing), E605 (int8 without rows); ValueError for unknown precisions or matrices.
    """
    RUNTIME.require(writing=True)
    require_all_of("precisions", precisions, RUNTIME.precisions)
    folder = Path(folder)
    if "int8" in precisions and not rows:
        raise UserError("E605", "static int8 needs rows to calibrate on", "Give training rows, or leave out int8")
    import openvino

    from export.graph.files import save
    from export.graph.trace import require_matrices
    from export.runtimes.openvino_attention import attention_left, join_attention, keep_axes, postpone_guards

    require_matrices(graph, excluded)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with tempfile.TemporaryDirectory() as scratch:
        # a file and not bytes: above 2 GB the weights lie beside the graph. Weights stay mapped from it until they are saved
        save(graph, Path(scratch, "model.onnx"))
        for precision in precisions:
            model = openvino.Core().read_model(Path(scratch, "model.onnx"))
            keep_axes(model)
            join_attention(model)
            if precision == "int8":
                left = attention_left(graph, excluded)
                model = quantized_static(model, rows, excluded, left, RUNTIME.weight_bits())
            # after NNCF, which corrects only a bias that is added to its product at once
            postpone_guards(model)
            if precision == "bf16":
                round_weights(model)
                model.set_rt_info("bf16", COMPUTED_IN)
            name_nodes(model)
            paths[precision] = folder / RUNTIME.file_name(precision)
            # without the argument fp32 weights are stored as fp16
            openvino.save_model(model, paths[precision], compress_to_fp16=False)
    return paths


def quantized_static(
    model: openvino.Model,
    rows: Sequence[dict[str, np.ndarray]],
    excluded: Sequence[str] = (),
    attention: Sequence[str] = (),
    weight_bits: int = 8,
) -> openvino.Model:
    """int8 weights (one scale per channel) and activations with calibrated scales, by NNCF: SmoothQuant, then bias correction.
    Embeddings are int8 too. The products of the modules `excluded`, and the nodes called `attention`, are not quantized. With
    `weight_bits` of 7 the weights of products take half of the range, so that no pair of products overflows without VNNI, and
    products of two activations stay fp32, whose ranges are not halved."""
    from export.graph.trace import products_of

    names = [value.get_any_name() for value in model.inputs]
    # it prints progress bars and log to stdout
    with contextlib.redirect_stdout(io.StringIO()):
        import nncf

        dataset = nncf.Dataset(rows, lambda row: {name: row[name] for name in names})
        options = {"subset_size": len(rows), "model_type": nncf.ModelType.TRANSFORMER}
        if weight_bits == 7:
            options["advanced_parameters"] = nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
        # a Gemm becomes the nodes NAME/WithoutBiases and NAME; and a missing name was fused away, not misspelt
        named = {node.get_friendly_name().removesuffix(WITHOUT) for node in model.get_ops()}
        left = [name for node in products_of(excluded, sorted(named)) for name in (node, f"{node}{WITHOUT}")]
        left += attention
        if weight_bits == 7:
            left += activation_products(model)
        return nncf.quantize(model, dataset, ignored_scope=nncf.IgnoredScope(names=left, validate=False), **options)


def activation_products(model: openvino.Model) -> list[str]:
    """Names of the products that no matrix of weights enters alone: every input of them depends on the model's inputs."""
    dependent, names = set(), []
    for node in model.get_ordered_ops():
        inputs = [value.get_node().get_name() in dependent for value in node.input_values()]
        if any(inputs) or node.get_type_name() == "Parameter":
            dependent.add(node.get_name())
        if node.get_type_name() == "MatMul" and all(inputs):
            names.append(node.get_friendly_name())
    return names


def round_weights(model: openvino.Model) -> None:
    """Store the fp32 weights of a graph in bf16, in place: half the bytes. Computing in bf16 would round them in any case."""
    import ml_dtypes
    import numpy as np
    import openvino
    from openvino import op
    from openvino import opset13 as ops

    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != openvino.Type.f32 or node.get_data().ndim < 2:
            continue
        rounded = node.get_data().astype(ml_dtypes.bfloat16).view(np.uint16)
        # copied: a shared tensor would not outlive the array
        stored = op.Constant(openvino.Tensor(rounded, list(rounded.shape), openvino.Type.bf16), shared_memory=False)
        stored.set_friendly_name(node.get_friendly_name())
        widened = ops.convert(stored, "f32")
        widened.set_friendly_name(f"{node.get_friendly_name()}/widened")
        node.output(0).replace(widened.output(0))
    model.validate_nodes_and_infer_types()


def computed_in(path: Path) -> str:
    """The type that a file is computed in: fp32 or bf16. Raises RuntimeError where it cannot be read."""
    import openvino

    model = openvino.Core().read_model(path)
    return str(model.get_rt_info(COMPUTED_IN).astype(str)) if model.has_rt_info(COMPUTED_IN) else "fp32"


def name_nodes(model: openvino.Model) -> None:
    """Number automatically named nodes from 0, so that equal models give equal bytes."""
    for number, node in enumerate(model.get_ordered_ops()):
        if AUTOMATIC_NAME.fullmatch(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{number}")


@dataclass(frozen=True)
class Tensor:
    """Name and shape of an input or output, a free axis as None, as ONNX Runtime's session gives them."""

    name: str
    shape: list[int | None]


class OpenVINOSession:
    """A compiled OpenVINO model with the interface of ONNX Runtime's session. Not for several threads at a time.

    Ids outside the vocabulary are not an error in OpenVINO: their embedding is 0.
    """

    def __init__(self, path: Path, options: dict[str, str]):
        from export.runtimes.padded_model import PaddedModel

        self.model = PaddedModel(path, options)

    @property
    def compiled(self) -> openvino.CompiledModel:
        return self.model.compiled

    def get_inputs(self) -> list[Tensor]:
        return [_tensor(port) for port in self.compiled.inputs]

    def get_outputs(self) -> list[Tensor]:
        return [_tensor(port) for port in self.compiled.outputs]

    def run(self, outputs: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in order; they are copies, so the next run does not change them. Raises RuntimeError, also for an unknown
        output name."""
        try:
            return self.model.infer(outputs, feeds)
        except KeyError as error:
            raise RuntimeError(f"the model has no output {error}") from None


def _tensor(port: openvino.ConstOutput) -> Tensor:
    return Tensor(port.get_any_name(), [None if axis.is_dynamic else axis.get_length() for axis in port.partial_shape])


def open_session(path: Path, device: Device, threads: int | None, *, counters: bool = False) -> OpenVINOSession:
    """OpenVINO's session of an existing file, computing in the file's type; with `counters` it counts the time of every
    operator. Raises UserError E602, E901, E904, E908."""
    RUNTIME.require()
    import openvino

    if device != "cpu":
        raise UserError("E904", f"{device} was requested, OpenVINO runs on the CPU here", "Use device: cpu, or onnxruntime")
    # one request at a time uses all threads
    options = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    if threads:
        options["INFERENCE_NUM_THREADS"] = str(threads)
    if counters:
        options["PERF_COUNT"] = "YES"
    try:
        # f32: if the CPU has bf16 kernels, OpenVINO would use them even for a model in fp32, and the same file would give
        # other outputs on another machine
        narrow = computed_in(path) == "bf16"
        session = OpenVINOSession(path, options | {"INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32"})
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1][-160:].strip(" .")
        fault = UserError("E602", f"not a readable OpenVINO model ({reason})", "Export the model again", str(path))
        raise (memory_fault(error) or fault) from error
    computed = session.compiled.get_property("INFERENCE_PRECISION_HINT")
    if narrow and computed != openvino.Type.bf16:
        RUNTIME.require_instructions("bf16")
    if computed != (openvino.Type.bf16 if narrow else openvino.Type.f32):
        what = f"OpenVINO computes this file in {computed.get_type_name()} here, not in {'bf16' if narrow else 'fp32'}"
        raise UserError("E904", what, "Use the fp32 file, or the runtime onnxruntime", str(path))
    return session
