"""ONNX Runtime as a python-based Triton backend: serves stock repositories (`backend: "onnxruntime"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/onnxruntime/ holds no libtriton_onnxruntime.so, so it imports nothing
of the project. Config keys mean what they mean to the native backend (its README, "Model Config Options").
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

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
# -1 is basic, 1 adds fusions, 2 turns everything off, and without a level all optimizations are on
LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


class TritonPythonModel:
    """One model instance: one ONNX Runtime session."""

    def initialize(self, args):
        """Open the session and compare the config with the model. Raises TritonModelException, shown in Triton's log."""
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], config.get("default_model_filename") or "model.onnx")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"no {path.name} in version {args['model_version']}")
        self.batched = config["max_batch_size"] > 0
        self.session = ort.InferenceSession(str(path), session_options(config), providers=providers(args))
        if args["model_instance_kind"] == "GPU" and "CUDAExecutionProvider" not in self.session.get_providers():
            raise pb_utils.TritonModelException("this instance is for a GPU, and ONNX Runtime could not use CUDA")
        self.inputs = check_tensors("input", config["input"], self.session.get_inputs())
        self.outputs = check_tensors("output", config["output"], self.session.get_outputs())

    def execute(self, requests):
        """One response a request, in order. Requests of equal shape run as one batch; a bad one fails alone."""
        feeds = [[pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs] for request in requests]
        responses = [None] * len(requests)
        for group in self.group(feeds):
            for index, response in zip(group, self.respond([feeds[index] for index in group]), strict=True):
                responses[index] = response
        return responses

    def group(self, feeds):
        """Indices of the requests that can share a run: equal shapes behind the batch axis."""
        groups = defaultdict(list)
        for index, feed in enumerate(feeds):
            groups[tuple(array.shape[1:] for array in feed) if self.batched else index].append(index)
        return groups.values()

    def respond(self, feeds):
        """The responses to requests that share a run."""
        try:
            results = self.session.run(self.outputs, dict(zip(self.inputs, map(fuse, zip(*feeds, strict=True)), strict=True)))
        except Exception as error:  # ONNX Runtime raises many types, and each becomes an answer to the caller
            if len(feeds) > 1:
                return [response for feed in feeds for response in self.respond([feed])]
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(f"onnx runtime error: {error}"))]
        if len(feeds) == 1:
            return [self.response(results)]
        ends = np.cumsum([feed[0].shape[0] for feed in feeds])[:-1]
        return [self.response(parts) for parts in zip(*(np.split(result, ends) for result in results), strict=True)]

    def response(self, arrays):
        tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in zip(self.outputs, arrays, strict=True)]
        return pb_utils.InferenceResponse(tensors)

    def finalize(self):
        self.session = None


def session_options(config):
    """SessionOptions of a model config. Threads never spin: between requests the cores belong to others."""
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    options.execution_mode = ort.ExecutionMode(int(parameters.get("execution_mode", 0)))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    if level not in LEVELS:
        raise pb_utils.TritonModelException(f"graph optimization level {level}, allowed levels are -1, 1 and 2")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    return options


def providers(args):
    """The execution provider of the instance, CPU behind it for the operators that CUDA lacks."""
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": args["model_instance_device_id"]}), "CPUExecutionProvider"]


def check_tensors(kind, declared, actual):
    """Names of the config's tensors, once each is known to the model with the same type."""
    types = {tensor.name: TYPES.get(tensor.type, tensor.type) for tensor in actual}
    for tensor in declared:
        name, type_ = tensor["name"], tensor["data_type"]
        if name not in types:
            allowed = ", ".join(types)
            raise pb_utils.TritonModelException(f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}")
        if type_ != types[name]:
            raise pb_utils.TritonModelException(f"{kind} '{name}' is {type_} in the config and {types[name]} in the model")
    return [tensor["name"] for tensor in declared]


def fuse(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
