"""Deltas apart: every architecture computes the same with factors as with chains, and what has no factor is refused."""

import pytest
import torch

from compressor.cost import delta_macs, shape_of
from compressor.deltas.factored import FactoredLinear, apart_of, factor_all, factors_of, require_factorable
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import attach, chains, merged_copy
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from tests.compressor.conftest import TRIED, tiny


def tuned(name, sparse=True):
    """A tiny model (float64) with a low-rank and a sparse delta, both far from 0, on query and ffn_out of every block."""
    model, generator = tiny(name), torch.Generator().manual_seed(1)
    for layer in layers_of(model):
        for part in ("query", "ffn_out"):
            matrix = layer.matrix(part)
            shape = matrix.original.shape
            links = [LowRank.start(matrix.original, 3, 6.0)]
            with torch.no_grad():
                links[0].B.normal_(generator=generator)
            if sparse:
                omega = torch.randperm(shape.numel(), generator=generator)[:5].sort().values
                links.append(Sparse(omega, torch.randn(5, generator=generator, dtype=torch.float64)))
            for link in links:
                link.place = matrix.place
                attach(layer.linear(part), link)
    return model.eval()


@pytest.mark.parametrize("name", TRIED)
def test_factors_compute_what_the_chains_do(name):
    model, ids = tuned(name), torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    model.config.eos_token_id = None if "t5" not in name else model.config.eos_token_id
    if "t5" in name:
        ids[ids == model.config.eos_token_id] = 5
        ids[:, -1] = model.config.eos_token_id
    merged = merged_copy(model)
    with torch.no_grad():
        want, bare = merged(ids).logits, apart_of(model)
        got = factor_all(model)(ids).logits
    assert torch.allclose(got, want, atol=1e-12, rtol=0)
    assert not list(chains(model)) and sum(isinstance(one, FactoredLinear) for one in model.modules()) > 3
    assert bare.parameters == sum(one.numel() for one in factors_of(model).values())


def test_the_count_is_the_closed_form():
    model = tuned("bert")
    macs = delta_macs(shape_of(model), ["query", "ffn_out"], rank=3, places=6 * 5)
    assert apart_of(model).macs == apart_of(model).parameters == macs


def test_the_names_are_those_of_the_layers():
    names = list(factors_of(factor_all(tuned("bert"))))
    first = "bert.encoder.layer.0.attention.self.query.deltas."
    assert names[:3] == [f"{first}0.A", f"{first}0.B", f"{first}1.values"]


@pytest.mark.parametrize(
    ("link", "tensor", "kind"),
    [
        (lambda weight: Mask(torch.ones_like(weight, dtype=torch.bool)), "weight", "mask"),
        (lambda weight: Offset(torch.zeros_like(weight)), "weight", "offset"),
        (lambda bias: Offset(torch.zeros_like(bias)), "bias", "offset"),
        (lambda bias: Sparse(torch.tensor([1]), bias.new_zeros(1)), "bias", "sparse"),
    ],
)
def test_what_has_no_factor_is_refused(link, tensor, kind):
    model = tuned("bert")
    layer = layers_of(model)[1].linear("key")
    attach(layer, link(getattr(layer, tensor)), tensor)
    for trained in (True, False):
        with pytest.raises(UserError, match=rf"E644 .*'{kind}' on bert.encoder.layer.1.attention.self.key.{tensor}"):
            require_factorable(model, trained=trained)


def test_a_model_without_deltas_is_refused():
    with pytest.raises(UserError, match="E644 the model has no delta to keep separate"):
        factor_all(tiny("bert"))
