"""Child pruning, renewed masks and gates of matrices: dense deltas that are reduced to their largest entries."""

from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from compressor.deltas.kinds.dense import (
    Gated,
    dense_links,
    expected_open,
    fixed_after,
    hard_concrete,
    largest,
    reseed,
    reset,
)
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import chain
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.models.anatomy import matrices_of
from compressor.training.callbacks import Report
from compressor.training.trainer import settle, trainer_of
from tests.compressor.conftest import tiny
from tests.compressor.test_dense import FAST, gated_model
from tests.compressor.training_parts import MODULES, rows_of


def test_child_pruning_keeps_the_largest_changes_after_each_step(tmp_path):
    """SAM's baseline: at most |Ω| entries differ from θ0 in every step's weights, and from the burn-in on the same ones."""

    class Watch(TrainerCallback):
        places = ()

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            changed = torch.cat([link.effect().flatten() != 0 for link in dense_links(model)])
            self.places = (*self.places, changed)

    model, watch = tiny("bert", torch.float32), Watch()
    apply(model, "child_tuning", Options(modules=MODULES, child="pruning", budget=60, burn_in=10, group="1"))
    trainer = trainer_of(model, rows_of(64), 1, FAST, tmp_path)
    trainer.add_callback(watch)
    trainer.train()
    counts = [int(places.sum()) for places in watch.places]
    assert counts[:2] == [0, 0] and set(counts[2:]) == {60}, "the first step has a learning rate of 0"
    assert any(not torch.equal(watch.places[2], places) for places in watch.places[3:11])
    assert all(torch.equal(watch.places[10], places) for places in watch.places[11:])
    settle(model)
    links = [link for matrix in matrices_of(model, MODULES) for link in chain(matrix.owner)]
    assert sum(len(link.values) for link in links) == 60 and all(type(link) is Sparse for link in links)


def test_masks_of_diff_pruning_are_renewed(tmp_path):
    """Between the projections every entry is trained: other places win. Without a step for it, the burn-in is an error."""
    model, moved = tiny("bert", torch.float32), []
    apply(model, "diff_pruning", Options(modules=MODULES, budget=60, burn_in=9, renew=4, group="1"))

    def count(note: str) -> None:
        moved.append(sum(int((link.effect() != 0).sum()) for link in dense_links(model)))

    trainer_of(model, rows_of(64), 1, FAST, tmp_path, [Report(count)]).train()
    # the counts are taken after a step: the one after a projection moves all again
    assert all(link.projected for link in dense_links(model)) and moved[8] > 60 and set(moved[9:]) == {60}
    model = tiny("bert", torch.float32)
    apply(model, "diff_pruning", Options(modules=MODULES, budget=60, burn_in=48))
    with pytest.raises(UserError, match="E413 burn_in is 48 steps, the training has 48"):
        trainer_of(model, rows_of(64), 1, FAST, tmp_path)
    with pytest.raises(UserError, match="E413 renew is 9 steps, the positions are fixed after 9: nothing is ever renewed"):
        fixed_after([Gated(torch.zeros(2, 2), 1, 0.1, burn_in=9, renew=9)], 48)


@pytest.mark.parametrize(("method", "options", "steps"), [("child_tuning", {"child": "pruning"}, 2), ("diff_pruning", {}, 1)])
def test_positions_are_not_fixed_before_anything_has_changed(tmp_path, method, options, steps):
    """The warm-up begins at a rate of 0, and half of one step is none: the first entries would be taken as the largest."""
    model = tiny("bert", torch.float32)
    apply(model, method, Options(modules=MODULES, budget=60, group="1", **options))
    with pytest.raises(UserError, match=rf"E413 positions are fixed after step {steps - 1}, before any entry has changed"):
        trainer_of(model, rows_of(64), 1, replace(FAST, max_steps=steps), tmp_path).train()


def test_a_reset_keeps_values_and_gates_of_the_largest():
    model = gated_model()
    links = dense_links(model)
    before = [(link.values.clone(), link.effect().detach()) for link in links]
    masks = largest(links)
    reset(links)
    assert sum(int(mask.sum()) for mask in masks) == 60
    for link, (values, effect), mask in zip(links, before, masks, strict=True):
        assert torch.equal(link.values, values * mask) and torch.equal(link.effect(), effect * mask) and not link.projected


def test_a_gate_of_a_matrix_multiplies_and_costs():
    """Guo et al. 2021, section 3.3: z = z_entry z_matrix, and both must be open for an entry to count."""
    weight = torch.randn(3, 4, dtype=torch.float64)
    link = Gated(weight, 2, 0.1, grouped=True)
    torch.nn.init.normal_(link.values)
    link.alpha.data.normal_()
    link.alpha_of_matrix.data.fill_(0.3)
    expected = hard_concrete(link.alpha) * hard_concrete(link.alpha_of_matrix) * link.values
    assert torch.allclose(link.eval().change(weight), weight + expected)
    cost = 0.1 * (expected_open(link.alpha) * expected_open(link.alpha_of_matrix)).sum()
    assert torch.isclose(link.penalty(), cost)
    reseed([link], 0, 1)
    assert torch.equal(link.train().change(weight), link.change(weight)), "one draw in a step"
    link.eval().change(weight).sum().backward()
    assert link.alpha_of_matrix.grad.abs() > 0


@pytest.mark.parametrize(("method", "options"), [("diff_pruning", {}), ("child_tuning", {"child": "pruning"})])
def test_a_budget_of_more_than_is_left_by_pruning_is_an_error(method, options):
    """What a mask hides never moves: it would be among the largest changes once all others are."""
    model = tiny("bert")
    matrices = matrices_of(model, ("query",))
    for matrix in matrices:
        matrix.attach(Mask(torch.zeros(matrix.original.shape, dtype=torch.bool).index_fill(1, torch.tensor([3]), True)))
    free = sum(matrix.unmasked for matrix in matrices)
    with pytest.raises(UserError, match=rf"E401 .*a budget of {free + 1} places, and all but {free} of [\d,]+ are pruned"):
        apply(model, method, Options(modules=("query",), budget=free + 1, **options))
