"""One harness for every kind of link: what each says of itself is what torch finds. A new kind is one row of LINKS."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from compressor.checkpoint import load_state, save_state
from compressor.cost import INSERTS
from compressor.deltas.inserts import Insert
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.mask import Mask, WeightMask
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.kinds.vera import Drawn, Vera
from compressor.deltas.links import Delta, Place, attach, delta_of, merge_all, merged_copy
from compressor.deltas.registry import KINDS
from compressor.deltas.sources import PlainTensors, Shared
from compressor.storage.changes import describe_changes, rebuild, record
from tests.compressor.conftest import logits, tiny, tuned

OUT, IN = 6, 10


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LINKS = {
    "low_rank": lambda: LowRank(PlainTensors({"A": drawn(2, IN), "B": drawn(OUT, 2)}), 1.5, "g"),
    "sparse": lambda: Sparse(torch.tensor([0, 7, 31, 59]), drawn(4), "g"),
    "offset": lambda: Offset(drawn(OUT, IN), "g"),
    "refit": lambda: Refit(drawn(OUT, IN), "g"),
    "mask": lambda: Mask(drawn(OUT, IN) > 0, group="g"),
    "weight_mask": lambda: WeightMask(drawn(OUT, IN) > 0, group="g"),
    "vera": lambda: Vera(Drawn("p", "g", seed=0, rank=2, out=OUT, into=IN), drawn(OUT), drawn(2), group="g"),
}
PLACES = {"whole": Place(), "transposed": Place(transposed=True), "rows": Place(rows=(3, 3 + OUT))}


@pytest.fixture(params=LINKS)
def link(request) -> Delta:
    return LINKS[request.param]()


def dense(link) -> torch.Tensor:
    """ΔW (out, in) by its forward."""
    with torch.no_grad():
        return link.change(torch.zeros(OUT, IN, dtype=torch.float64))


def test_every_kind_has_a_row():
    assert set(LINKS) == {kind for kind, cls in KINDS.items() if issubclass(cls, Delta)}
    assert set(INSERTS) == {kind for kind, cls in KINDS.items() if issubclass(cls, Insert)}


@pytest.mark.parametrize("place", PLACES)
def test_it_comes_back_from_its_tensors(link, place):
    link.place = PLACES[place]
    settings, tensors = record(link)
    shared = {} if link.prototype_name is None else {link.prototype_name: Shared(link.drawn)}
    again = rebuild(settings, tensors, shared)
    weight = drawn(OUT, IN) if place == "whole" else drawn(IN, OUT) if place == "transposed" else drawn(OUT + 5, IN)
    assert again.place == link.place and again.group == "g" and torch.equal(again(weight), link(weight))
    assert again.fits(weight) and not again.fits(weight[:, :-1]) and not again.fits(weight[:-3])
    assert isinstance(link, Mask) or not again.fits(weight.float())


def test_what_is_cut_is_what_is_left(link):
    rows, columns = torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4, 9])
    cut = link.cut((OUT, IN), rows, columns)
    with torch.no_grad():
        left = cut.change(drawn(OUT, IN)[rows][:, columns])
        assert torch.allclose(left, link.change(drawn(OUT, IN))[rows][:, columns], atol=1e-12)
    assert cut.suits(torch.Size((3, 4)))


def test_its_entries_are_those_of_its_delta(link):
    places, values = link.entries()
    expected = torch.zeros(OUT * IN, dtype=torch.float64)
    if places is None:
        expected = values
    elif len(places):
        expected[places] = values
    assert link.masks or torch.allclose(expected.view(OUT, IN), dense(link), atol=1e-12)
    assert link.support() is None or torch.equal(link.support(), places)


def test_its_gradients_are_torchs(link):
    if not link.separable(10**6) or not link.trained():
        return
    x, gradient = drawn(7, IN), drawn(7, OUT)
    functional.linear(x, link.change(torch.zeros(OUT, IN, dtype=torch.float64))).backward(gradient)
    found = link.gradients(x, gradient, *(tensor.detach() for tensor in link.trained()))
    for tensor, own in zip(link.trained(), found, strict=True):
        assert torch.allclose(own, tensor.grad, atol=1e-12)


def test_its_product_is_that_of_its_delta(link):
    if not link.factorable:
        return
    x, y = drawn(7, IN), torch.zeros(7, OUT, dtype=torch.float64)
    assert torch.allclose(link.factor(IN)(x, y), x @ dense(link).T, atol=1e-12)


def test_peft_holds_the_same_delta(link):
    held = link.to_peft()
    assert (held is None) == (not link.factorable)
    if held is not None:
        assert held.kind in ("low_rank", "sparse") and torch.allclose(dense(held), dense(link), atol=1e-12)


def test_a_mask_alone_stays_last_and_is_no_part_of_the_delta(link):
    layer = torch.nn.Linear(IN, OUT, dtype=torch.float64)
    attach(layer, Mask(torch.zeros(OUT, IN, dtype=torch.bool)))
    attach(layer, link)
    assert not layer.weight.any()
    assert torch.allclose(delta_of(layer), dense(link) if link.tuned else torch.zeros_like(dense(link)), atol=1e-12)


def test_a_tied_parameter_has_one_delta(tmp_path, monkeypatch):
    """A decoder's embeddings are its head, too: both uses change alike, are stored once, and are one parameter when merged."""

    def decoder():
        return tiny("llama", torch.float32, auto=AutoModelForCausalLM, tie_word_embeddings=True)

    model, base = tuned(decoder(), "selective-everything"), decoder()
    before = logits(model)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert not torch.equal(model.lm_head.weight, base.lm_head.weight)
    assert "lm_head.weight" not in describe_changes(model)[0]["links"]
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=[])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: base)
    again = load_state(tmp_path, tmp_path)
    for merged in (merged_copy(model), merge_all(again)):
        assert merged.lm_head.weight is merged.model.embed_tokens.weight
        assert torch.equal(logits(merged), before)
