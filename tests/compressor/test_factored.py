"""Deltas apart: every architecture computes the same with factors as with chains, and what has no factor is refused."""

import pytest
import torch

from compressor.cost import shape_of
from compressor.deltas.factored import FactoredLinear, apart_of, delta_macs, factor_all, factors_of, require_factorable
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import attach, chain, chains, merged_copy
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.modules import EVERYTHING, MODULES
from compressor.pruning.surgery import Removal, remove
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
    assert bare == sum(one.numel() for one in factors_of(model).values())


def test_the_count_is_the_closed_form():
    """Σ r (m + n) + |Ω|, over two matrices of each of 3 blocks with 5 places each."""
    model = tuned("bert")
    macs = sum(3 * (m + n) for _, m, n in shape_of(model).matrices(["query", "ffn_out"])) + 6 * 5
    assert apart_of(model) == delta_macs(model) == macs


def test_every_delta_of_the_blocks_is_a_multiply_add():
    """Of a second training, too, while values on embeddings, norms and biases are none."""
    model = tiny("bert")
    omega = {matrix.path: torch.arange(2, dtype=torch.int32) for matrix in matrices_of(model, EVERYTHING)}
    apply(model, "selective", Options(modules=EVERYTHING, omega=omega, group="1"))
    in_blocks = 2 * len(matrices_of(model, MODULES))
    assert delta_macs(model) == in_blocks < 2 * len(omega)
    for group, rank in (("2", 4), ("3", 1)):
        apply(model, "lora", Options(modules=("key",), rank=rank, group=group))
    assert delta_macs(model) == in_blocks + sum(5 * (m + n) for _, m, n in shape_of(model).matrices(["key"]))


def test_places_of_removed_units_are_no_multiply_adds():
    """Ω of every 10th weight, then half of the heads and of the neurons: as many as the cut matrices still have of them."""
    model = tiny("bert")
    omega = {matrix.path: torch.arange(0, matrix.original.numel(), 10) for matrix in matrices_of(model, MODULES)}
    apply(model, "selective", Options(modules=MODULES, omega=omega, group="1"))
    whole = delta_macs(model)
    halves = {name: list(range(layer.units(name) // 2)) for layer in layers_of(model)[:1] for name in ("heads", "neurons")}
    remove(model, {number: Removal(**halves) for number in range(3)})
    left = sum(len(chain(layer.linear(name))[0].support()) for layer in layers_of(model) for name in layer.names)
    assert delta_macs(model) == left < whole == sum(map(len, omega.values()))


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
