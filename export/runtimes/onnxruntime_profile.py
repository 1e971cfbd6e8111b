"""The time of an ONNX file's operators on the CPU, from the trace that ONNX Runtime writes of a session."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.runtimes.feeds import timed_runs
from export.runtimes.runtime import OperatorTimes, PassProfile, Work

if TYPE_CHECKING:
    import numpy as np
    from onnxruntime import InferenceSession

TYPES = {
    Work.PRODUCTS_FP32: ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Einsum"),
    # all but the first quantize their activations, too
    Work.PRODUCTS_INT8: ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"),
    Work.PRODUCTS_INT4: ("MatMulNBits",),
    Work.ATTENTION: ("MultiHeadAttention", "GroupQueryAttention"),
    # one operator with the products of query, key and value
    Work.PROJECTED_ATTENTION: ("Attention", "QAttention"),
    Work.SOFTMAX: ("Softmax", "LogSoftmax"),
    Work.NORMALIZATION: (
        *("LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization", "RMSNormalization"),
        *("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "LpNormalization"),
    ),
    Work.ACTIVATION: (
        *("Gelu", "BiasGelu", "FastGelu", "QuickGelu", "Erf", "Tanh", "Sigmoid", "Relu", "Silu", "Swish"),
        *("LeakyRelu", "Elu", "HardSigmoid", "Softplus"),
    ),
    Work.GATHER: ("Gather", "GatherElements", "GatherND", "GatherBlockQuantized"),
    Work.CONVERSION: ("DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear", "Cast", "ReorderInput", "ReorderOutput"),
    Work.LAYOUT: (
        *("Transpose", "Reshape", "Concat", "Split", "Slice", "Squeeze", "Unsqueeze", "Expand", "Flatten", "Tile", "Pad"),
        *("Shape", "Identity", "ConstantOfShape", "Range", "MemcpyFromHost", "MemcpyToHost"),
    ),
    Work.ELEMENTWISE: (
        *("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Abs", "Min", "Max", "Sum", "Reciprocal", "Exp", "Log", "Clip"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Where", "IsNaN", "Sign", "Mod"),
        *("ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum", "ReduceProd", "ArgMax", "CumSum", "Sin", "Cos"),
        *("Ceil", "Floor", "Round", "Trilu", "ScatterND", "ScatterElements", "RotaryEmbedding"),
    ),
}
"""The kinds of work, with ONNX Runtime's operator types."""
WORK = {name: work for work, names in TYPES.items() for name in names}
"""Operator type -> its kind of work; a type that is not here is `Work.OTHER`."""
KERNEL = "_kernel_time"
"""How the name of an operator's event ends."""


def profile_by_trace(
    opened: Callable[[Path], InferenceSession], encoding: dict[str, np.ndarray], warm: int, passes: int
) -> PassProfile:
    """The times of some passes, and of every operator in them. `opened` gives a session that traces to a path."""
    with tempfile.TemporaryDirectory() as scratch:
        session = opened(Path(scratch, "trace"))
        times = timed_runs(session, encoding, warm + passes)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return PassProfile(tuple(times[warm:]), tuple(operators_of(events, passes)))


def operators_of(events: Iterable[dict[str, Any]], passes: int) -> list[OperatorTimes]:
    """Every operator with its milliseconds in each of the last passes of a trace."""
    events = list(events)
    starts = sorted(event["ts"] for event in events if event["name"] == "model_run")[-passes:]
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(starts))
    for event in events:
        place = bisect(starts, event["ts"]) - 1
        if event["cat"] == "Node" and event["name"].endswith(KERNEL) and place >= 0:
            times[event["name"], event["args"]["op_name"]][place] += event["dur"] / 1000
    return [OperatorTimes(WORK.get(type_, Work.OTHER), type_, tuple(each)) for (_, type_), each in times.items()]
