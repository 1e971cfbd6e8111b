"""Ω within the tensors of a LoRA or of adapters: what is not chosen keeps the bits that it was drawn with."""

from dataclasses import replace

import pytest
import torch

from compressor.account import Places
from compressor.cost import shape_of
from compressor.deltas.kinds.adapter import Adapter
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.links import chain, merge_all, settle_links
from compressor.errors import UserError
from compressor.methods import Options, apply, method
from compressor.methods.selective import ground, sizes
from compressor.models.anatomy import layers_of
from compressor.selection.choice import choose_all, weight_score
from compressor.selection.gradients import gradient_scores
from compressor.storage.changes import describe_changes
from compressor.training.schedule import Schedule
from compressor.training.trainer import settle, trainer_of
from tests.compressor.conftest import CASES, GROWING, OPTIONS, encoding, logits, prepared, tiny
from tests.compressor.training_parts import MODULES, rows_of

KINDS = {"lora": LowRank, "adapter": Adapter}
WITHIN = [case for case, (_, kind) in {**CASES, **GROWING}.items() if "on" in kind]


def options_on(on: str) -> Options:
    return replace(OPTIONS, modules=MODULES, group="1", on=on)


@pytest.fixture(params=KINDS)
def on(request) -> str:
    return request.param


def test_the_start_is_the_one_that_the_method_itself_draws(on, architecture):
    """The same draws in the same order, under unique paths; the closed form knows each size."""
    tensors = ground(model := tiny(architecture), options_on(on))
    apply(plain := tiny(architecture), on, options_on(on))
    state = plain.state_dict()
    assert len({tensor.path for tensor in tensors}) == len(tensors)
    assert all(torch.equal(tensor.original, state[tensor.path]) for tensor in tensors)
    counted = sizes(shape_of(model), options_on(on))
    assert sorted(counted) == sorted(tensor.original.numel() for tensor in tensors)
    assert sum(counted) == method(on).count(shape_of(model), options_on(on), 0)


def trained(case: str, work, weight_decay: float = 0.1):
    """A tiny BERT after 12 steps of AdamW with decay, values not yet settled; (model, options, tensors at the start)."""
    model = tiny("bert", torch.float32)
    options = prepared(model, case, MODULES, places=7)
    start = {at: tensor.clone() for at, tensor in tensors_of(model, options.on).items()}
    trainer = trainer_of(
        model, rows_of(32), 1, Schedule(epochs=3, learning_rate=1e-2, batch_size=8, weight_decay=weight_decay), work
    )
    trainer.train()
    return model.cpu().eval(), options, start, trainer.grower


def tensors_of(model, on: str) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of the changes, as the model computes with it."""
    changes = [(path, module) for path, module in model.named_modules() if isinstance(module, KINDS[on])]
    return {(path, name): change.source.read(name).detach() for path, change in changes for name in change.source.names}


@pytest.mark.parametrize("case", WITHIN)
def test_only_the_budget_moves_and_settling_changes_no_bit(case, tmp_path):
    """Of all tensors exactly |Ω| entries are trained; every other keeps its start; a plain change is left, nothing else."""
    model, options, start, grower = trained(case, tmp_path)
    before, described = logits(model), describe_changes(model)
    if grower is not None:
        settle_links(model)
        assert torch.equal(logits(model), before)
    links = {at: chain(model.get_submodule(f"{at[0]}.source"), at[1]) for at in start}
    omega = {at: torch.cat([link.omega.long() for link in there]) for at, there in links.items() if there}
    places = sum(len(one) for one in options.omega.values())
    assert sum(map(len, omega.values())) == method("selective").count(shape_of(model), options, places)
    settle(model)
    assert torch.equal(logits(model), before)
    moved = 0
    for at, tensor in tensors_of(model, options.on).items():
        outside = torch.ones(tensor.numel(), dtype=torch.bool)
        outside[omega.get(at, torch.empty(0, dtype=torch.long))] = False
        assert torch.equal(tensor.flatten()[outside], start[at].flatten()[outside])
        moved += int((tensor != start[at]).sum())
    assert 0 < moved <= sum(map(len, omega.values()))
    assert described[0] == describe_changes(model)[0], "unsettled or not, it is stored as a plain change"
    assert all(torch.equal(tensor, described[1][name]) for name, tensor in describe_changes(model)[1].items())
    assert not any(module.frozen for module in model.modules() if isinstance(module, KINDS[options.on]))
    assert torch.equal(logits(merge_all(model)), before)


def test_a_larger_budget_than_the_tensors_have_is_an_error(on):
    with pytest.raises(UserError, match="E401"):
        apply(tiny("bert"), "selective", replace(options_on(on), strategy="increment", budget=10**6))


def test_pafi_takes_what_starts_at_zero_by_the_lowest_index(on):
    """All of B (or of up and the biases) is tied at the smallest |θ|: those of the first block come first."""
    tensors = ground(tiny("bert"), options_on(on))
    zero = [tensor for tensor in tensors if not tensor.original.any()]
    budget = sum(tensor.original.numel() for tensor in zero[:2]) + 3
    scores = {tensor.path: weight_score(tensor.original, "pafi", 0) for tensor in tensors}
    omega = choose_all(scores, {}, Places(options_on(on), "global", count=budget))
    expected = {zero[0].path: zero[0].original.numel(), zero[1].path: zero[1].original.numel(), zero[2].path: 3}
    assert {path: len(places) for path, places in omega.items() if len(places)} == expected
    assert omega[zero[2].path].tolist() == [0, 1, 2]


@pytest.mark.parametrize("score", ["fish", "sam", "d3"])
def test_gradients_see_nothing_behind_a_zero(on, score, architecture):
    """dL/dA is exactly 0 while B is: such scores choose in B (in up and its bias), and never more than there is."""
    model = tiny(architecture)
    tensors = ground(model, options_on(on))
    scores = gradient_scores(model, tensors, score, [(encoding(), torch.tensor([0, 2, 1]))])
    seen = {tensor.name for tensor in tensors if scores[tensor.path].any()}
    assert seen == {"lora": {"B"}, "adapter": {"up", "up_bias"}}[on]
    candidates = sum(int((one > 0).sum()) for one in scores.values())
    choose_all(scores, {}, Places(options_on(on), "global", count=candidates))
    with pytest.raises(UserError, match="E401"):
        choose_all(scores, {}, Places(options_on(on), "global", count=candidates + 1))


@pytest.mark.parametrize("scope", ["matrix", "layer", "global"])
def test_the_closed_form_of_a_select_is_exact_in_every_scope(on, scope):
    """Shares are rounded down tensor by tensor, block by block, or once."""
    model = tiny("t5")
    places = Places(options_on(on), scope, ratio=0.13)
    shape, tensors = shape_of(model), ground(model, options_on(on))
    layer_of = {one.path: layer.path for layer in layers_of(model) for one in tensors if one.path.startswith(f"{layer.path}.")}
    omega = choose_all({one.path: weight_score(one.original, "random", 1) for one in tensors}, layer_of, places)
    assert sum(map(len, omega.values())) == places.total(shape)
