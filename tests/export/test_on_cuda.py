"""Files on a GPU: what ONNX Runtime computes there, in every precision, and how PyTorch is timed. Skipped without one."""

import random

import numpy as np
import pytest
import torch

from compressor.checkpoint import save_checkpoint
from compressor.pruning.surgery import remove
from compressor.tasks.features import torch_forward
from export.graph.rewrite import can_fuse
from export.graph.trace import trace
from export.latency.measure import LatencyVariant, time_shape, workers
from export.parity.compare import compare
from export.runtimes.onnxruntime import RUNTIME, write_onnx
from export.runtimes.sessions import run, session
from tests.compressor.conftest import CUTS, GATED, TRIED, tiny
from tests.export.conftest import encoding

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and RUNTIME.offers("cuda")), reason="needs a GPU, PyTorch and ONNX Runtime for CUDA"
)
PRECISIONS = [precision for precision, devices in RUNTIME.precisions.items() if "cuda" in devices]
TEXT = [name for name in TRIED if name[:2] != "t5" and name != GATED]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(architecture, cut) -> (model, its files by precision), made on first use."""
    found = {}

    def make(name: str, cut: str):
        if (name, cut) not in found:
            model = tiny(name, torch.float32)
            remove(model, CUTS[cut](name))
            graph = trace(model, encoding(2, 9))
            folder = tmp_path_factory.mktemp(name)
            found[name, cut] = model, write_onnx(graph, folder, precisions=PRECISIONS, fuse=can_fuse(model))
        return found[name, cut]

    return make


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", TEXT)
def test_files_compute_the_model(made, name, cut, precision):
    model, files = made(name, cut)
    live = session(files[precision], device="cuda")
    assert live.get_providers()[0] == "CUDAExecutionProvider"
    for rows in (encoding(4, 12), encoding(1, 5), encoding(3, 31)):
        want, got = torch_forward(model)(rows), run(live, rows)
        assert compare("cuda", precision, want, got, want.argmax(axis=1)).passed
        bound = RUNTIME.bound(live, rows, "cuda")
        bound()
        np.testing.assert_allclose(bound.logits(), got, rtol=1e-3, atol=1e-3)


def test_every_way_to_run_a_checkpoint_is_timed(made, tmp_path):
    model, files = made("bert", next(iter(CUTS)))
    save_checkpoint(model, tmp_path, tmp_path)
    ways = [("pytorch", False), ("pytorch", True), ("torch.compile", True), ("cuda graphs", True)]
    variants = [LatencyVariant(f"{way} {half}", way, tmp_path, "cuda", half, vocabulary=99) for way, half in ways]
    variants.append(LatencyVariant("onnx", "onnxruntime", files["fp16"], "cuda", vocabulary=99))
    with workers(variants, None) as live:
        rows = time_shape(live, 2, 8, 5, random.Random(0))
    assert [row.variant for row in rows] == [one.name for one in variants] and all(row.p50 > 0 for row in rows)
