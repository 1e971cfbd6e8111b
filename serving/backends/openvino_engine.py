"""OpenVINO's compiled model of a served file, with the settings of its model config.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project. Config keys
mean what they mean to the native backend (its README, "Parameters"), with one difference: without HINT_BF16 it computes in
fp32 on every CPU, while the native backend leaves that to OpenVINO, which uses bf16 if the CPU supports it.
"""

from cpu_threads import threads_of
from padded_model import PaddedModel

NAMED = ("PERFORMANCE_HINT", "COMPILATION_NUM_THREADS", "NUM_STREAMS")
THREADS = "INFERENCE_NUM_THREADS"

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


class Engine:
    """One compiled model. Any exception of `infer` is the runtime's; ValueError where the config cannot be followed."""

    title = "openvino"
    file = "model.xml"
    streams = 1
    """Runs at the same time: its threads share the work of one run well, and a failed one would break the others."""

    def __init__(self, path, config, args, settings, facts):
        if args["model_instance_kind"] == "GPU":
            raise ValueError("this instance is for a GPU, and this backend runs OpenVINO on the CPU")
        if settings.get("streams", "1") != "1":
            raise ValueError(f"streams is {settings['streams']}, and this backend computes one batch of OpenVINO at a time")
        self.model = PaddedModel(path, options(config, settings, facts))
        if facts.get("positions"):
            # rows are never padded beyond it: a failed run would compile the model again
            self.model.shortest_failed = facts["positions"] + 1
        sides = (self.model.compiled.inputs, self.model.compiled.outputs)
        self.inputs, self.outputs = ({port.get_any_name(): type_of(port) for port in side} for side in sides)

    def infer(self, names, feeds):
        """The arrays of the outputs `names`, in order, from {input name: array}."""
        return self.model.infer(names, feeds)


def type_of(port):
    """Triton's name for the element type of an input or output."""
    return TYPES.get(port.element_type.get_type_name(), str(port.element_type))


def options(config, settings, facts):
    """OpenVINO's properties from a model config; by default one request at a time with all the instance's threads."""
    properties = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", THREADS: str(threads_of(config, settings, THREADS))}
    properties |= {key: settings[key] for key in NAMED if key in settings}
    narrow = settings.get("HINT_BF16", "").upper() == "YES" or facts.get("precision") == "bf16"
    return properties | {"INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32"}
