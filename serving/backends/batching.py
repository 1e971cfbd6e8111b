"""Shared code of the backends that take tokens: requests that arrive together run as one batch, and a bad one fails alone.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

from collections import defaultdict

import numpy as np
import triton_python_backend_utils as pb_utils
from door import Door
from triton_requests import array_of, drop_cancelled, each_read, error_response, open_engine, read_config, response_of


class BatchingModel:
    """One model instance. A backend names its `engine_type`, which opens and runs the model file."""

    engine_type = None

    def initialize(self, args):
        """Open the model and compare the config with it. Raises TritonModelException, shown in Triton's log."""
        config, settings, version, facts = read_config(args)
        self.batched = config["max_batch_size"] > 0
        self.engine = open_engine(self.engine_type, args, config, settings, version, facts)
        self.inputs = check_tensors("input", config["input"], self.engine.inputs)
        self.outputs = check_tensors("output", config["output"], self.engine.outputs)
        self.door = Door(self.inputs, facts)

    def execute(self, requests):
        """One response per request, in order. Requests of equal shape run as one batch; a bad one fails alone."""
        feeds, responses = each_read(requests, self.read)
        drop_cancelled(requests, feeds, responses)
        for group in self.group(feeds):
            responses |= zip(group, self.respond([feeds[index] for index in group]), strict=True)
        return [responses[index] for index in range(len(requests))]

    def finalize(self):
        """Free the model."""
        self.engine = None

    def read(self, request):
        """The arrays of a request, by the name of the input. Raises Refused."""
        feed = {name: array_of(request, name) for name in self.inputs}
        self.door.check(feed)
        return feed

    def group(self, feeds):
        """Indices of the requests that can share a run: equal shapes after the batch axis."""
        groups = defaultdict(list)
        for index, feed in feeds.items():
            groups[tuple(array.shape[1:] for array in feed.values()) if self.batched else index].append(index)
        return groups.values()

    def respond(self, feeds):
        """Responses to requests that share a run."""
        try:
            results = self.engine.infer(self.outputs, {name: fuse([feed[name] for feed in feeds]) for name in self.inputs})
        except Exception as error:  # a runtime raises many types; each becomes an error response
            if len(feeds) > 1:
                return [response for feed in feeds for response in self.respond([feed])]
            return [error_response(error, self.engine.title)]
        if len(feeds) == 1:
            return [self.response(results)]
        ends = np.cumsum([len(feed[self.inputs[0]]) for feed in feeds])[:-1]
        return [self.response(parts) for parts in zip(*(np.split(result, ends) for result in results), strict=True)]

    def response(self, arrays):
        """The response with the model's outputs, in the config's order."""
        return response_of(dict(zip(self.outputs, arrays, strict=True)))


def check_tensors(kind, declared, actual):
    """Names of the config's tensors, after checking that the model has each with the same type. Raises TritonModelException."""
    for tensor in declared:
        name, type_ = tensor["name"], tensor["data_type"]
        if name not in actual:
            allowed = ", ".join(actual)
            raise pb_utils.TritonModelException(f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}")
        if type_ != actual[name]:
            raise pb_utils.TritonModelException(f"{kind} '{name}' is {type_} in the config and {actual[name]} in the model")
    return [tensor["name"] for tensor in declared]


def fuse(arrays):
    """The rows of several arrays in one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
