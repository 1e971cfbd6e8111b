"""The time of an OpenVINO file's operators, from the performance counters of a compiled model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from export.runtimes.feeds import timed_runs
from export.runtimes.runtime import OperatorTimes, PassProfile, Work

if TYPE_CHECKING:
    import openvino

    from export.runtimes.padded_model import PaddedModel
    from export.runtimes.runtime import Session

TYPES = {
    Work.ATTENTION: ("ScaledDotProductAttention", "ScaledDotProductAttentionWithKVCache", "PagedAttention"),
    Work.SOFTMAX: ("Softmax", "SoftMax", "LogSoftmax"),
    Work.NORMALIZATION: ("MVN", "RMS", "RMSNorm", "NormalizeL2"),
    Work.ACTIVATION: ("Gelu", "Tanh", "Erf", "Sigmoid", "Relu", "Swish", "Elu", "HSwish", "Mish", "SoftPlus"),
    Work.GATHER: ("Gather", "GatherElements", "GatherND", "GatherCompressed"),
    Work.CONVERSION: ("Convert", "FakeQuantize", "Reorder"),
    Work.LAYOUT: (
        *("Transpose", "Reshape", "Concat", "Split", "VariadicSplit", "StridedSlice", "Slice", "Squeeze", "Unsqueeze", "Tile"),
        *("Broadcast", "ShapeOf", "Pad", "Range"),
    ),
    Work.ELEMENTWISE: (
        *("Add", "Subtract", "Multiply", "MulAdd", "Divide", "Power", "PowerStatic", "Sqrt", "Abs", "Negative", "Clamp", "Exp"),
        *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
        *("Select", "Maximum", "Minimum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum", "ReduceProd", "CumSum"),
        *("Sin", "Cos", "Log", "RoPE", "TopK", "Mod", "FloorMod", "SquaredDifference", "ScatterNDUpdate", "Eltwise"),
    ),
}
"""The kinds of work, with OpenVINO's operator types; products and subgraphs are told by `work_of`."""
WORK = {name: work for work, names in TYPES.items() for name in names}
"""Operator type -> its kind of work; a type that is not here is `Work.OTHER`."""
PRODUCTS = ("FullyConnected", "FullyConnectedQuantized", "FullyConnectedQuantizedLegacy", "FullyConnectedCompressed", "MatMul")
"""Types of matrix products, which may include a bias, an activation and the quantization of their result."""
PRODUCT_TYPES = {
    "f32": Work.PRODUCTS_FP32,
    "bf16": Work.PRODUCTS_BF16,
    "i8": Work.PRODUCTS_INT8,
    "u8": Work.PRODUCTS_INT8,
}
"""How the kernel's name of a matrix product ends -> what it is."""
SUBGRAPH = "Subgraph"
"""Type of several operators that OpenVINO compiled as one."""


def profile_by_counters(
    session: Session, model: PaddedModel, encoding: dict[str, np.ndarray], warm: int, passes: int
) -> PassProfile:
    """The times of some passes, and of every operator in them, in a session of a model that counts."""
    timed_runs(session, encoding, warm)
    request, times = model.request, []
    totals = [totals_of(request.profiling_info, warm)]
    for number in range(warm + 1, warm + passes + 1):
        times += timed_runs(session, encoding, 1)
        totals.append(totals_of(request.profiling_info, number))
    softmax, operators = names_with_softmax(model.compiled), []
    for entry, ms in zip(request.profiling_info, np.diff(totals, axis=0).T.tolist(), strict=True):
        work = work_of(entry.node_type, entry.exec_type, with_softmax=entry.node_name in softmax)
        operators.append(OperatorTimes(work, entry.node_type, tuple(ms)))
    return PassProfile(tuple(times), tuple(operator for operator in operators if any(operator.ms)))


def totals_of(counters: Iterable[openvino.ProfilingInfo], runs: int) -> list[float]:
    """Milliseconds of every operator over all runs: a counter is their mean since the file was compiled, in whole
    microseconds."""
    return [1000 * runs * counter.real_time.total_seconds() for counter in counters]


def names_with_softmax(compiled: openvino.CompiledModel) -> set[str]:
    """Names of the operators that a softmax was joined into."""
    nodes = ((node.get_friendly_name(), node.get_rt_info()) for node in compiled.get_runtime_model().get_ops())
    return {name for name, info in nodes if has_softmax(info["originalLayersNames"].astype(str).split(","))}


def has_softmax(names: Iterable[str]) -> bool:
    """Whether one of the names is that of a softmax; nodes that were given no name are called by their type."""
    return any("softmax" in name.lower() for name in names)


def work_of(type_: str, kernel: str, *, with_softmax: bool) -> Work:
    """The kind of work of an operator of a type that a kernel computes."""
    if type_ in PRODUCTS:
        return PRODUCT_TYPES.get(kernel.rsplit("_", 1)[-1].lower(), Work.OTHER)
    if type_ == SUBGRAPH:
        return Work.ATTENTION if with_softmax else Work.ELEMENTWISE
    return WORK.get(type_, Work.OTHER)
