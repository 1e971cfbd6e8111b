"""A compiled OpenVINO model that pads rows where that is faster: to multiples of `BLOCK` tokens.

Masked tokens on the right change no logits. OpenVINO computes 48 tokens faster than 47, and it compiles kernels for every new
shape, many of them in an int8 file (docs/export.md gives the figures). Padding depends on the shape alone: equal requests have
equal bits, whatever came before.

Used by the session here and by the Triton backend, which it is copied beside: so it imports nothing of this project.
"""

import math
import platform
from pathlib import Path

import numpy as np
import openvino

BLOCK = 16
"""Lengths are padded to a multiple of it: what OpenVINO's kernels compute at a time."""
SHARES = {"fp32": 1 / 16, "bf16": 1 / 3, "int8": 1 / 3}
"""Rows whose padding would be a larger share of the padded length are run as they are. fp32 compiles faster and computes slower
than the others."""
CPUINFO = Path("/proc/cpuinfo")
HINT = "INFERENCE_PRECISION_HINT"
INPUTS = {"input_ids", "attention_mask", "token_type_ids"}


class PaddedModel:
    """A compiled model and its one inference request. Not for several threads at a time."""

    def __init__(self, path, options):
        self.path, self.options = path, options
        self.shortest_failed = math.inf
        self.compile()

    def compile(self):
        """Compile the file, and create the request that all runs use."""
        core = openvino.Core()
        model = core.read_model(self.path)
        self.filler = filler_of(model)
        self.inputs = {port.get_any_name() for port in model.inputs}
        kinds = [node.get_type_name() for node in model.get_ops()]
        precision = "int8" if "FakeQuantize" in kinds else "bf16" if self.options.get(HINT) == "bf16" else "fp32"
        self.share = share_of(precision)
        self.compiled = core.compile_model(model, "CPU", self.options)
        self.request = self.compiled.create_infer_request()

    def infer(self, names, feeds):
        """The outputs `names`, in order; they are copies, so the next run does not change them.

        Raises RuntimeError where the model does not take these feeds, and KeyError for an unknown output.
        """
        padded = self.padded(feeds)
        try:
            self.given(padded)
        except RuntimeError:
            # a failed inference leaves the compiled model broken: it would then refuse valid rows, too
            self.compile()
            if padded is feeds:
                raise
            # rows that fit into the model's positions may not fit once they are padded
            before, self.shortest_failed = self.shortest_failed, min(self.shortest_failed, padded["input_ids"].shape[1])
            try:
                return self.infer(names, feeds)
            except RuntimeError:
                self.shortest_failed = before  # it was not the length: later rows are padded as ever
                raise
        results = self.request.results
        arrays = [np.array(results[name]) for name in names]
        if padded is feeds:
            return arrays
        length = feeds["input_ids"].shape[1]
        # logits of every token are cut to the tokens that were given
        return [np.ascontiguousarray(array[:, :length]) if array.ndim == 3 else array for array in arrays]

    def given(self, feeds):
        """Run on these feeds as they are. Raises RuntimeError where the model does not take them."""
        if missing := self.inputs - feeds.keys():  # OpenVINO would take what the last run gave
            raise RuntimeError(f"Required inputs are missing: {', '.join(sorted(missing))}")
        # `infer` raises nothing where OpenVINO computes on one thread, and leaves the outputs of the last run
        self.request.start_async(feeds)
        self.request.wait()

    def padded(self, feeds):
        """The feeds with masked tokens on the right; the same object where nothing is to be padded."""
        shapes = {array.shape for array in feeds.values()}
        if self.filler is None or len(shapes) != 1 or len(next(iter(shapes))) != 2 or "input_ids" not in feeds:
            return feeds
        ((_, length),) = shapes
        more = -length % BLOCK
        if not more or length + more >= self.shortest_failed or more > self.share * (length + more):
            return feeds
        fillers = {"input_ids": self.filler}
        widths = ((0, 0), (0, more))
        return {name: np.pad(array, widths, constant_values=fillers.get(name, 0)) for name, array in feeds.items()}


def share_of(precision):
    """The share of a precision here. Without VNNI int8 compiles faster and computes slower, as fp32 does: padding to a multiple
    of 16 then costs a tenth of every later pass."""
    return SHARES["fp32" if precision == "int8" and not multiplies_int8() else precision]


def multiplies_int8():
    """Whether this processor has products of int8; what is no x86, or says nothing of itself, counts as one that has."""
    try:
        flags = set(CPUINFO.read_text().split())
    except OSError:
        return True
    return platform.machine().lower() not in ("x86_64", "amd64") or bool(flags & {"avx512_vnni", "avx_vnni"})


def filler_of(model):
    """The token id that rows of `model` may be padded with where the mask is 0; None where padding could change its logits.

    Any id will do (0) if the ids are only looked up in the embeddings. If they are also compared, as "!=" with a constant
    (RoBERTa counts positions so), that constant is the padding id. Models that do anything else with ids, such as looking for
    the end of a sentence, have outputs other than logits, or mix neighbouring tokens whatever the mask says (ConvBERT,
    MobileBERT), are not padded.
    """
    inputs = {port.get_any_name(): port for port in model.inputs}
    if not {"input_ids", "attention_mask"} <= set(inputs) <= INPUTS or not all(map(_has_free_length, model.inputs)):
        return None
    if not all(_is_logits(port) for port in model.outputs):
        return None
    if all(node.get_type_name() == "ShapeOf" for node, _ in _readers(inputs["attention_mask"])):
        return None
    if any(map(_mixes_neighbours, model.get_ops())):
        return None
    fillers = set()
    for node, place in _readers(inputs["input_ids"]):
        kind = node.get_type_name()
        if kind == "Equal":
            constant = node.input_value(1 - place).get_node()
            if constant.get_type_name() != "Constant" or constant.data.size != 1:
                return None
            if any(reader.get_type_name() != "LogicalNot" for reader, _ in _readers(node.output(0))):
                return None
            fillers.add(int(constant.data.item()))
        elif kind != "ShapeOf" and (kind, place) != ("Gather", 1):
            return None
    return None if len(fillers) > 1 else next(iter(fillers), 0)


def _mixes_neighbours(node):
    """Whether a node moves values along the tokens, or may: a convolution of more than one of them, or a shift."""
    kind = node.get_type_name()
    if not kind.endswith("Convolution"):
        return kind == "Pad"
    weights = node.input_value(1).get_partial_shape()
    return weights.is_dynamic or weights.to_shape()[-1] != 1


def _has_free_length(port):
    shape = port.partial_shape
    return shape.rank.is_static and len(shape) == 2 and shape[1].is_dynamic


def _is_logits(port):
    """Whether an output is (batch, classes), or (batch, length, classes)."""
    shape = port.partial_shape
    if shape.rank.is_dynamic or len(shape) not in (2, 3) or shape[len(shape) - 1].is_dynamic:
        return False
    return len(shape) == 2 or shape[1].is_dynamic


def _readers(port):
    """(node, number of its input) of everything that reads a value, behind conversions of its type."""
    for target in port.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() == "Convert":
            yield from _readers(node.output(0))
        else:
            yield node, target.get_index()
