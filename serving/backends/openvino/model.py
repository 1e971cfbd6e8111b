"""OpenVINO as a python-based Triton backend: serves stock repositories (`backend: "openvino"`) on the embedded server.

Triton runs this file in its Python stub when BACKENDS/openvino/ holds no libtriton_openvino.so, so it imports nothing of the
project. Config keys mean what they mean to the native backend (its README, "Parameters"), with one difference: without
HINT_BF16 it computes in fp32 on every CPU, where the native one leaves that to OpenVINO, which takes bf16 where the CPU has it.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import openvino
import triton_python_backend_utils as pb_utils

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
PARAMETERS = ("PERFORMANCE_HINT", "INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "NUM_STREAMS")


class TritonPythonModel:
    """One model instance: one compiled model and its request."""

    def initialize(self, args):
        """Compile the model and compare the config with it. Raises TritonModelException, shown in Triton's log."""
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], config.get("default_model_filename") or "model.xml")
        if not path.is_file():
            raise pb_utils.TritonModelException(f"no {path.name} in version {args['model_version']}")
        if args["model_instance_kind"] == "GPU":
            raise pb_utils.TritonModelException("this instance is for a GPU, and this backend runs OpenVINO on the CPU")
        self.batched = config["max_batch_size"] > 0
        self.path, self.options = path, options(config)
        compiled = self.compile()
        self.inputs = check_tensors("input", config["input"], compiled.inputs)
        self.outputs = check_tensors("output", config["output"], compiled.outputs)
        self.alike = len({tuple(tensor["dims"]) for tensor in config["input"]}) == 1

    def compile(self):
        """Compile the model and open the one request that all runs use."""
        compiled = openvino.Core().compile_model(self.path, "CPU", self.options)
        self.request = compiled.create_infer_request()
        return compiled

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
        # token ids and a mask of other lengths: OpenVINO may fail on them, or answer nonsense
        if self.alike and len({array.shape for array in feeds[0]}) > 1:
            return [failure("the inputs differ in shape") for _ in feeds]
        try:
            arrays = dict(zip(self.inputs, map(fuse, zip(*feeds, strict=True)), strict=True))
            found = self.request.infer(arrays)
            results = [found[name] for name in self.outputs]
        except Exception as error:  # OpenVINO raises several types, and each becomes an answer to the caller
            # a run that fails leaves the compiled model broken: it would then refuse good requests too
            self.compile()
            if len(feeds) > 1:
                return [response for feed in feeds for response in self.respond([feed])]
            return [failure(error)]
        if len(feeds) == 1:
            return [self.response(results)]
        ends = np.cumsum([feed[0].shape[0] for feed in feeds])[:-1]
        return [self.response(parts) for parts in zip(*(np.split(result, ends) for result in results), strict=True)]

    def response(self, arrays):
        tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in zip(self.outputs, arrays, strict=True)]
        return pb_utils.InferenceResponse(tensors)

    def finalize(self):
        self.request = None


def options(config):
    """OpenVINO's properties out of a model config: what it names, otherwise one request at a time with all threads."""
    given = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    found = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"} | {key: given[key] for key in PARAMETERS if key in given}
    return found | {"INFERENCE_PRECISION_HINT": "bf16" if given.get("HINT_BF16", "").upper() == "YES" else "f32"}


def check_tensors(kind, declared, actual):
    """Names of the config's tensors, once each is known to the model with the same type."""
    types = {port.get_any_name(): TYPES.get(port.element_type.get_type_name(), str(port.element_type)) for port in actual}
    for tensor in declared:
        name, type_ = tensor["name"], tensor["data_type"]
        if name not in types:
            allowed = ", ".join(types)
            raise pb_utils.TritonModelException(f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}")
        if type_ != types[name]:
            raise pb_utils.TritonModelException(f"{kind} '{name}' is {type_} in the config and {types[name]} in the model")
    return [tensor["name"] for tensor in declared]


def failure(reason):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"openvino error: {reason}"))


def fuse(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
