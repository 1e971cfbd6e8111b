"""OpenVINO as a python-based Triton backend: serves stock repositories (`backend: "openvino"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/openvino/ holds no libtriton_openvino.so, so it imports nothing of the
project but the two files that the server copies beside it. Config keys mean what they mean to the native backend (its README,
"Parameters"), with one difference: without HINT_BF16 it computes in fp32 on every CPU, while the native backend leaves that to
OpenVINO, which uses bf16 if the CPU supports it.
"""

import triton_python_backend_utils as pb_utils
from batching import BatchingModel, parameters
from padded_model import PaddedModel

NAMED = ("PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "NUM_STREAMS")

TYPES = {
    "f16": "TYPE_FP16",
    "f32": "TYPE_FP32",
    "f64": "TYPE_FP64",
    "i8": "TYPE_INT8",
    "i32": "TYPE_INT32",
    "i64": "TYPE_INT64",
    "u8": "TYPE_UINT8",
    "boolean": "TYPE_BOOL",
}


class TritonPythonModel(BatchingModel):
    """One model instance: one compiled model and its inference request."""

    runtime = "openvino"
    file = "model.xml"

    def open(self, path, config, args):
        if args["model_instance_kind"] == "GPU":
            raise pb_utils.TritonModelException("this instance is for a GPU, and this backend runs OpenVINO on the CPU")
        self.model = PaddedModel(path, options(config))
        self.alike = len({tuple(tensor["dims"]) for tensor in config["input"]}) == 1
        sides = (self.model.compiled.inputs, self.model.compiled.outputs)
        return tuple({port.get_any_name(): type_of(port) for port in side} for side in sides)

    def infer(self, feeds):
        # token ids and a mask of different lengths: OpenVINO may fail on them, or return garbage
        if self.alike and len({array.shape for array in feeds.values()}) > 1:
            raise ValueError("the inputs differ in shape")
        return self.model.infer(self.outputs, feeds)

    def finalize(self):
        self.model = None


def type_of(port):
    """Triton's name for the element type of an input or output."""
    return TYPES.get(port.element_type.get_type_name(), str(port.element_type))


def options(config):
    """OpenVINO's properties from a model config; by default one request at a time with all threads."""
    settings = parameters(config)
    properties = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"} | {key: settings[key] for key in NAMED if key in settings}
    return properties | {"INFERENCE_PRECISION_HINT": "bf16" if settings.get("HINT_BF16", "").upper() == "YES" else "f32"}
