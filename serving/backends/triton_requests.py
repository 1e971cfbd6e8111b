"""What all backends do with Triton's requests: the model config, reading inputs, responses and refusals.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from door import Refused, read_facts


def read_config(args):
    """(config, its parameters as strings, the version folder, its serving.json) from Triton's arguments of `initialize`."""
    config = json.loads(args["model_config"])
    version = Path(args["model_repository"], args["model_version"])
    settings = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    return config, settings, version, read_facts(version)


def open_engine(engine_type, args, config, settings, version, facts, file=None):
    """An engine on the model file of a version, or on another `file` of it. Raises TritonModelException, shown in Triton's
    log."""
    path = version / (file or config.get("default_model_filename") or engine_type.file)
    if not path.is_file():
        raise pb_utils.TritonModelException(f"no {path.name} in version {version.name}")
    try:
        return engine_type(path, config, args, settings, facts)
    except ValueError as error:
        raise pb_utils.TritonModelException(str(error)) from error


def each_read(requests, read):
    """(inputs of the readable requests by index, the responses to the others by index); `read` gives a request's inputs."""
    inputs, responses = {}, {}
    for index, request in enumerate(requests):
        try:
            inputs[index] = read(request)
        except Exception as error:
            responses[index] = error_response(error)
    return inputs, responses


def drop_cancelled(requests, inputs, responses):
    """Move those of the `inputs` whose callers have withdrawn them to the `responses`.

    Triton's own process is asked, which takes 0.1 ms a request.
    """
    for index in [index for index in inputs if requests[index].is_cancelled()]:
        del inputs[index]
        responses[index] = _error("the request was cancelled", pb_utils.TritonError.CANCELLED)


def array_of(request, name):
    """An input of a request as an array."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def response_of(arrays):
    """The response with the outputs {name: array}."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()])


def error_response(error, title=""):
    """The response to a request that failed: 400 where the caller must correct it, else an internal error."""
    if isinstance(error, Refused):
        return _error(str(error), pb_utils.TritonError.INVALID_ARG)
    return _error(f"{title} error: {error}".strip(), pb_utils.TritonError.INTERNAL)


def _error(message, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
