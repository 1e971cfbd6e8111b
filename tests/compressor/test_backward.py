"""Gradients by factors are those of the parametrized weight, for every method that has them, on every architecture."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from compressor.deltas import backward
from compressor.deltas.backward import by_factors
from compressor.deltas.kinds import sparse
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.links import attach, chains, original
from compressor.errors import UserError
from compressor.methods import apply
from tests.compressor.conftest import OPTIONS, TRIED, encoding, tiny, tuned

MODULES = ("query", "value", "output", "ffn_in", "ffn_out")
BY_FACTORS = ("lora", "vera", "dsee", "selective")
BY_WEIGHT = ("bitfit", "propetl-lora", "selective-on-lora", "full")
"""Nothing of theirs is a plain factor: computed tensors, biases, whole matrices."""


@pytest.fixture
def products(monkeypatch):
    """How many linear layers were computed by factors so far; every Ω counts as thin."""
    seen = []
    whole = backward._Linear.apply
    monkeypatch.setattr(backward._Linear, "apply", lambda *given: (seen.append(1), whole(*given))[1])
    monkeypatch.setattr(sparse, "THIN", 1.0)
    return seen


def gradients(model):
    """(loss, gradient by name) of one batch; every row of logits counts, unlike under a constant sum."""
    model.zero_grad()
    logits = model(**encoding()).logits
    loss = functional.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_close(found, expected):
    """The same parameters, with the same gradients to 1e-10 in float64."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("architecture", TRIED)
@pytest.mark.parametrize("case", [*BY_FACTORS, *BY_WEIGHT])
def test_gradients_are_those_of_the_weight(case, architecture, products):
    try:
        model = tuned(tiny(architecture), case, MODULES)
    except UserError as error:
        assert error.code == "E407"
        return
    loss, expected = gradients(model)
    with by_factors(model):
        again, found = gradients(model)
    assert bool(products) == (case in BY_FACTORS)
    assert torch.equal(again, loss)  # the forward is the merged one
    assert len(found) > 2
    require_close(found, expected)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize("case", ["full", "lora"])
def test_what_is_trained_on_top_of_deltas_gets_its_gradient(case, architecture, products):
    """Full tuning moves the weight below them; another LoRA leaves them as they are."""
    model = tuned(tiny(architecture), "lora", MODULES)
    apply(model, case, replace(OPTIONS, modules=MODULES, group="2"))
    _, expected = gradients(model)
    with by_factors(model):
        _, found = gradients(model)
    assert bool(products) == (case == "lora")
    assert any(".weight" in name for name in found)
    require_close(found, expected)


def test_a_mask_over_the_sum_keeps_the_gradient_of_the_weight(products):
    model = tuned(tiny("bert"), "dsee", MODULES)
    for _, layer, name in list(chains(model)):
        weight = original(layer, name)
        attach(layer, Mask(torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) < 0.5), name)
    _, expected = gradients(model)
    with by_factors(model):
        _, found = gradients(model)
    assert not products
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_dense_omega_keeps_the_gradient_of_the_weight(products, monkeypatch):
    """One gathered column a value would cost more than the matrix."""
    monkeypatch.setattr(sparse, "THIN", 1 / 1000)
    with by_factors(model := tuned(tiny("bert"), "selective", MODULES)):
        gradients(model)
    assert not products


def test_the_layers_are_as_they_were_afterwards(products):
    model = tuned(tiny("gpt2"), "dsee", MODULES)
    with by_factors(model):
        inside = copy.deepcopy(model)
        with torch.no_grad():
            model(**encoding())
    assert not products, "nothing is to be trained without gradients"
    assert all("forward" not in vars(module) for module in model.modules())
    gradients(inside)  # a copy computes with its own tensors
    assert products and all(p.grad is None for p in model.parameters())
