"""A graph with deltas of its own: the same function in every runtime, and another delta in the same file."""

import numpy as np
import onnx
import pytest
import torch

from compressor.deltas.factored import factor_all, factors_of
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import attach, merged_copy
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.tasks.features import torch_forward
from export.graph.trace import trace
from export.runtimes.onnxruntime import write_onnx
from export.runtimes.sessions import run, session
from tests.compressor.conftest import tiny
from tests.export.conftest import encoding

pytestmark = pytest.mark.slow

SHAPES = [(1, 1), (1, 7), (3, 33), (8, 20)]


def tuned(seed, rank=3):
    """One base with deltas of this seed on query and ffn_out; Ω is the same whatever the seed."""
    model, generator = tiny("bert", torch.float32), torch.Generator().manual_seed(seed)
    for layer in layers_of(model):
        for part in ("query", "ffn_out"):
            weight = layer.linear(part).weight
            low = LowRank.start(weight, rank, 6.0)
            low.source.B.data.normal_(generator=generator)
            for link in (low, Sparse(torch.tensor([3, 40, 41, 300]), torch.randn(4, generator=generator))):
                attach(layer.linear(part), link)
    return model.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the merged reference, the factored model, its graph, its files)."""
    model = tuned(1)
    reference, apart = merged_copy(model), factor_all(model)
    graph = trace(apart, encoding(2, 9))
    paths = write_onnx(graph, tmp_path_factory.mktemp("apart"), fuse=False)
    return reference, apart, graph, paths


def test_the_graph_is_the_merged_model(made):
    reference, _, _, paths = made
    live, forward = session(paths["fp32"]), torch_forward(reference)
    for shape in SHAPES:
        batch = encoding(*shape)
        want = forward(batch)
        assert abs(run(live, batch) - want).max() <= 1e-4 * np.maximum(1, abs(want)).max()


def test_openvino_computes_it_too(made, tmp_path):
    pytest.importorskip("nncf", reason="the extra openvino is not installed")
    from export.runtimes.openvino import export_openvino

    reference, _, graph, _ = made
    live = session(export_openvino(graph, tmp_path, precisions=["fp32"])["fp32"])
    for shape in SHAPES:
        assert abs(run(live, encoding(*shape)) - torch_forward(reference)(encoding(*shape))).max() < 1e-4


def test_deltas_stand_in_the_file_by_their_names(made):
    _, apart, _, paths = made
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(paths["fp32"]).graph.initializer}
    for name, tensor in factors_of(apart).items():
        assert np.array_equal(stored[name], tensor.numpy())


def test_another_delta_in_the_same_file_is_another_model(made):
    _, _, _, paths = made
    other, batch = tuned(2), encoding(4, 12)
    want = torch_forward(merged_copy(other))(batch)
    factors = {name: one.numpy() for name, one in factors_of(factor_all(other)).items()}
    assert abs(run(session(paths["fp32"]), batch) - want).max() > 0.01
    assert abs(run(session(paths["fp32"], swapped=factors), batch) - want).max() < 1e-4


def test_a_delta_of_another_form_is_refused(made, tmp_path):
    _, _, _, paths = made
    factors = {name: one.numpy() for name, one in factors_of(factor_all(tuned(2, rank=2))).items()}
    first = next(iter(factors))
    with pytest.raises(UserError, match=rf"E645 .*no weight '{first}' of float32 \[32, 2\]"):
        session(paths["fp32"], swapped=factors)
    with pytest.raises(UserError, match=r"E645 .*no weight 'nothing'"):
        session(paths["fp32"], swapped={"nothing": np.zeros(2, np.float32)})
    (tmp_path / "broken.onnx").write_bytes(b"garbage" * 20)
    with pytest.raises(UserError, match=r"E602 .*not a readable ONNX file"):
        session(tmp_path / "broken.onnx", swapped=factors)
    (tmp_path / "model.xml").write_text("<net>")
    with pytest.raises(UserError, match=r"E645 .*OpenVINO takes no other weights"):
        session(tmp_path / "model.xml", swapped=factors)


def test_int8_is_close(made):
    reference, _, _, paths = made
    batch = encoding(8, 20)
    want = torch_forward(reference)(batch)
    assert abs(run(session(paths["int8"]), batch) - want).mean() < 0.1 * abs(want).max()
