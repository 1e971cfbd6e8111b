"""ONNX Runtime as a python-based Triton backend: serves stock repositories (`backend: "onnxruntime"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/onnxruntime/ holds no libtriton_onnxruntime.so, so it imports nothing
of the project. Config keys mean what they mean to the native backend (its README, "Model Config Options").
"""

import onnxruntime as ort
import triton_python_backend_utils as pb_utils
from batching import BatchingModel, parameters

# -1 is basic, 1 adds fusions, 2 turns everything off, and without a level all optimizations are on
LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

TYPES = {
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(bool)": "TYPE_BOOL",
}


class TritonPythonModel(BatchingModel):
    """One model instance: one ONNX Runtime session."""

    runtime = "onnx runtime"
    file = "model.onnx"

    def open(self, path, config, args):
        self.session = ort.InferenceSession(str(path), session_options(config), providers=providers(args))
        if args["model_instance_kind"] == "GPU" and "CUDAExecutionProvider" not in self.session.get_providers():
            raise pb_utils.TritonModelException("this instance is for a GPU, and ONNX Runtime could not use CUDA")
        sides = (self.session.get_inputs(), self.session.get_outputs())
        return tuple({tensor.name: TYPES.get(tensor.type, tensor.type) for tensor in side} for side in sides)

    def infer(self, feeds):
        return self.session.run(self.outputs, feeds)

    def finalize(self):
        self.session = None


def session_options(config):
    """SessionOptions of a model config. Threads never spin: between requests the cores are free for others."""
    settings = parameters(config)
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(settings.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(settings.get("inter_op_thread_count", 0))
    options.execution_mode = ort.ExecutionMode(int(settings.get("execution_mode", 0)))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    if level not in LEVELS:
        raise pb_utils.TritonModelException(f"graph optimization level {level}, allowed levels are -1, 1 and 2")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    return options


def providers(args):
    """The execution provider of the instance, followed by the CPU for operators that CUDA lacks."""
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": args["model_instance_device_id"]}), "CPUExecutionProvider"]
