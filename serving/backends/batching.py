"""Shared code of the python-based backends: requests that arrive together run as one batch, and a bad one fails alone.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class BatchingModel:
    """One model instance. A backend defines how a file is opened (`open`) and run (`infer`), and its runtime's name."""

    runtime = ""
    file = ""

    def open(self, path, config, args):
        """Open `path`; returns {input name: type} and {output name: type}, Triton's type names. Raises TritonModelException."""
        raise NotImplementedError

    def infer(self, feeds):
        """The arrays of `self.outputs`, in order, from {input name: array}. Any exception is returned to the caller."""
        raise NotImplementedError

    def initialize(self, args):
        """Open the model and compare the config with it. Raises TritonModelException, shown in Triton's log."""
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"], args["model_version"], config.get("default_model_filename") or self.file)
        if not path.is_file():
            raise pb_utils.TritonModelException(f"no {path.name} in version {args['model_version']}")
        self.batched = config["max_batch_size"] > 0
        inputs, outputs = self.open(path, config, args)
        self.inputs = self.check_tensors("input", config["input"], inputs)
        self.outputs = self.check_tensors("output", config["output"], outputs)

    def check_tensors(self, kind, declared, actual):
        """Names of the config's tensors, after checking that the model has each with the same type."""
        for tensor in declared:
            name, type_ = tensor["name"], tensor["data_type"]
            if name not in actual:
                allowed = ", ".join(actual)
                raise pb_utils.TritonModelException(f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}")
            if type_ != actual[name]:
                raise pb_utils.TritonModelException(f"{kind} '{name}' is {type_} in the config and {actual[name]} in the model")
        return [tensor["name"] for tensor in declared]

    def execute(self, requests):
        """One response per request, in order. Requests of equal shape run as one batch; a bad one fails alone."""
        feeds = [[pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs] for request in requests]
        responses = [None] * len(requests)
        for group in self.group(feeds):
            for index, response in zip(group, self.respond([feeds[index] for index in group]), strict=True):
                responses[index] = response
        return responses

    def group(self, feeds):
        """Indices of the requests that can share a run: equal shapes after the batch axis."""
        groups = defaultdict(list)
        for index, feed in enumerate(feeds):
            groups[tuple(array.shape[1:] for array in feed) if self.batched else index].append(index)
        return groups.values()

    def respond(self, feeds):
        """Responses to requests that share a run."""
        try:
            results = self.infer(dict(zip(self.inputs, map(fuse, zip(*feeds, strict=True)), strict=True)))
        except Exception as error:  # a runtime raises many types; each becomes an error response
            if len(feeds) > 1:
                return [response for feed in feeds for response in self.respond([feed])]
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{self.runtime} error: {error}"))]
        if len(feeds) == 1:
            return [self.response(results)]
        ends = np.cumsum([feed[0].shape[0] for feed in feeds])[:-1]
        return [self.response(parts) for parts in zip(*(np.split(result, ends) for result in results), strict=True)]

    def response(self, arrays):
        tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in zip(self.outputs, arrays, strict=True)]
        return pb_utils.InferenceResponse(tensors)


def parameters(config):
    """The parameters of a model config as strings."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def fuse(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
