"""VeRA: what peft computes, from a seed and two vectors a matrix."""

import copy

import pytest
import torch

from compressor.checkpoint import load_state, save_state
from compressor.cost import shape_of
from compressor.deltas.kinds.vera import Drawn, Vera
from compressor.deltas.links import chain, chains
from compressor.errors import UserError
from compressor.methods import Options, apply, method, trainable_counts
from compressor.models.anatomy import matrices_of
from compressor.pruning.surgery import Removal, remove
from compressor.storage.changes import prototypes_of
from pipelines.stages.training_plan import check_rank
from tests.compressor.conftest import encoding, logits, tiny, tuned

MODULES = ("query", "value")


def links_of(model):
    return [link for _, layer, name in chains(model) for link in chain(layer, name)]


def test_it_is_what_peft_computes():
    """The same key: bit-equal random matrices, the same number of parameters, the same logits once b and d are."""
    peft = pytest.importorskip("peft")
    model = tuned(tiny("bert", torch.float32), "vera", MODULES)
    first = links_of(model)[0]
    config = peft.VeraConfig(r=first.drawn.rank, target_modules=MODULES, projection_prng_key=first.drawn.seed)
    theirs = peft.get_peft_model(tiny("bert", torch.float32), config)
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == trainable_counts(model)["body"]
    layers = [module for module in theirs.modules() if isinstance(module, peft.tuners.vera.layer.VeraLayer)]
    for layer, link in zip(layers, links_of(model), strict=True):
        assert torch.equal(layer.vera_A["default"], link.A) and torch.equal(layer.vera_B["default"], link.B)
        assert (layer.vera_lambda_d["default"] == 0.1).all() and not layer.vera_lambda_b["default"].any()
        layer.vera_lambda_b["default"].data.copy_(link.b)
        layer.vera_lambda_d["default"].data.copy_(link.d)
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(**encoding()).logits, logits(model), atol=1e-5)
    assert (logits(tiny("bert", torch.float32)) - logits(model)).abs().max() > 1e-3


def test_matrices_of_one_shape_share_what_is_drawn():
    model = tiny("bert")
    apply(model, "vera", Options(modules=("query", "value", "ffn_in"), rank=40))
    assert [prototype.shape for prototype in prototypes_of(model)] == [(32, 32), (20, 32)]
    assert len({id(link.drawn) for link in links_of(copy.deepcopy(model))}) == 2
    assert not any("drawn" in name for name in model.state_dict())


def test_the_same_seed_draws_the_same_on_every_machine():
    drawn = Drawn("p", seed=7, rank=2, out=2, into=3)
    expected = torch.tensor([[0.0987759, -0.8519132, 0.4503187], [0.4437527, -0.7558644, -0.2119583]])
    assert torch.allclose(drawn.A, expected, atol=1e-6)


@pytest.mark.parametrize(
    "sizes", [{"rank": 0}, {"into": 0}, {"out": 0}, {"rank": 2**20, "out": 2**20}, {"rank": -1, "into": -5}]
)
def test_sizes_that_no_model_has_are_not_drawn(sizes):
    with pytest.raises(ValueError, match="random matrices"):
        Drawn("p", seed=0, **{"rank": 2, "out": 4, "into": 4, **sizes})


def test_what_is_cut_comes_back_from_its_seed(tmp_path, monkeypatch):
    """Rows of B and columns of A are chosen, and chosen again by a second pruning; the file names them."""
    base = tiny("bert", torch.float32)
    model = tuned(tiny("bert", torch.float32), "vera", (*MODULES, "output"))
    whole = {matrix.path: matrix.delta for matrix in matrices_of(model, (*MODULES, "output"))}
    remove(model, {0: Removal([1])})
    remove(model, {0: Removal([0])})
    kept = torch.arange(16, 32)
    for matrix in matrices_of(model, (*MODULES, "output"))[:3]:
        before = whole[matrix.path]
        expected = before[:, kept] if matrix.name == "output" else before[kept]
        assert torch.allclose(matrix.delta, expected, atol=1e-6)
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


@pytest.mark.parametrize(
    "wrong", [{"b": torch.zeros(3)}, {"d": torch.zeros(3)}, {"rows": torch.tensor([0, 1, 2, 9], dtype=torch.int32)}]
)
def test_what_does_not_fit_the_matrix_is_told(wrong):
    drawn, weight = Drawn("p", seed=0, rank=2, out=4, into=5), torch.zeros(4, 5)
    assert Vera.start(weight, drawn).fits(weight)
    assert not Vera(drawn, **{"b": torch.zeros(4), "d": torch.zeros(2), **wrong}).fits(weight)


def test_its_rank_may_be_above_the_sides_of_a_matrix():
    """What is trained is a number for each random direction: more of them are never in vain, unlike LoRA's."""
    shape, options = shape_of(tiny("bert")), Options(modules=MODULES, rank=64)
    check_rank(method("vera"), options, shape)
    with pytest.raises(UserError, match="E104 rank 64"):
        check_rank(method("lora"), options, shape)
