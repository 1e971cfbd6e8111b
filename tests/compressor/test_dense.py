"""Mixout, diff pruning and child tuning: what they draw, what they keep, and that gates end in exactly |Ω| places."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from compressor.compression import compression_of
from compressor.deltas.kinds.dense import (
    OPEN,
    Dense,
    Gated,
    Mixed,
    Thinned,
    dense_links,
    expected_open,
    hard_concrete,
    project,
    reseed,
)
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import Delta, chain, merge_all
from compressor.errors import UserError
from compressor.methods import Options, apply, set_trainable
from compressor.models.anatomy import matrices_of
from compressor.pruning.surgery import Removal, remove, silence
from compressor.training.callbacks import CLIP
from compressor.training.schedule import Schedule
from compressor.training.trainer import settle, train, trainer_of
from tests.compressor.conftest import encoding, prepared, tiny, tuned
from tests.compressor.training_parts import MODULES, rows_of

FAST = Schedule(epochs=6, learning_rate=5e-3, mask_learning_rate=0.1, batch_size=8, seed=4)
"""48 steps of 64 rows: gates are projected before the 25th."""


def link_of(kind: type[Dense], *settings, shape: tuple[int, int] = (2, 3)) -> tuple[torch.Tensor, Dense]:
    """(weight, a link of it with random values), in training mode."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    link = kind(weight, *settings, group="")
    torch.nn.init.normal_(link.values, generator=generator)
    return weight, link


def loss_of(model) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(**encoding()).logits, torch.tensor([0, 2, 1]))


# --- mixout ---


def test_the_mean_of_mixout_is_the_tuned_weight():
    """All 2³ draws of three columns by their probabilities: E[W] = θ0 + Δ, exactly (Lee et al. 2020)."""
    weight, link = link_of(Mixed, 0.7)
    mean = torch.zeros_like(weight)
    for learned in itertools.product([False, True], repeat=3):
        link.uniform = lambda columns, learned=learned: torch.tensor([0.9 if one else 0.1 for one in learned])
        seen = link.change(weight)
        untouched = ~torch.tensor(learned)
        assert torch.equal(seen[:, untouched], weight[:, untouched]), "a column that is not drawn is the pretrained one"
        mean += 0.3 ** sum(learned) * 0.7 ** (3 - sum(learned)) * seen.detach()
    assert torch.allclose(mean, weight + link.values, atol=1e-15)
    assert torch.equal(link.eval().change(weight), weight + link.values)


def test_mixout_draws_with_its_probability():
    weight, link = link_of(Mixed, 0.7, shape=(2, 4000))
    reseed([link], 0, 1)
    left = (link.change(weight) == weight).all(dim=0)
    assert abs(float(left.double().mean()) - 0.7) < 4 * (0.7 * 0.3 / 4000) ** 0.5


@pytest.mark.parametrize(("kind", "settings"), [(Mixed, (0.5,)), (Gated, (2, 0.1))])
def test_gradients_at_a_fixed_draw(kind, settings):
    """Against finite differences (the authors' mixout lacks the factor 1 / (1 - p) in its backward pass)."""
    weight, link = link_of(kind, *settings)
    reseed([link], 0, 3)
    parameters = dict(link.named_parameters())
    if kind is Gated:  # in the middle of its range, where a gate has a gradient
        parameters["alpha"].data.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)

    def weight_of(*values):
        return torch.func.functional_call(link, dict(zip(parameters, values, strict=True)), weight)

    assert torch.autograd.gradcheck(weight_of, tuple(parameters.values()))
    assert (torch.autograd.grad(weight_of(*parameters.values()).sum(), link.values)[0] != 0).any()


def test_without_chance_both_are_a_plain_dense_delta(tmp_path):
    """Mixout of probability 0, and a child network that hears every gradient: the bits of an Offset's training."""

    def trained(attach) -> dict[str, torch.Tensor]:
        model = tiny("bert", torch.float32)
        attach(model)
        train(model, rows_of(32), 1, Schedule(epochs=2, learning_rate=5e-3, batch_size=8), tmp_path)
        return model.state_dict()

    def plain(model) -> None:
        set_trainable(model, base=False, groups=())
        for matrix in matrices_of(model, MODULES):
            matrix.attach(Offset(torch.zeros_like(matrix.original)))

    expected = trained(plain)
    for name, settings in (("mixout", {"mixout": 0.0}), ("child_tuning", {"reserve": 1.0})):
        found = trained(lambda model, n=name, s=settings: apply(model, n, Options(modules=MODULES, **s)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


# --- the draws ---


def test_a_draw_is_a_steps_own():
    """Within a step the same for every micro-batch and process; another for every step, link and seed."""
    links = [link_of(Thinned, 0.3, shape=(20, 20))[1] for _ in range(2)]

    def draws(seed: int, step: int) -> list[torch.Tensor]:
        reseed(links, seed, step)
        return [link.uniform() for link in links]

    first, again = draws(0, 1), draws(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    others = [*first, *draws(0, 2), *draws(1, 1), *draws(1, 0)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(others, 2))


# --- child tuning ---


class Watch(TrainerCallback):
    """The gradients of every step, clipped, and as the optimizer takes them."""

    def __init__(self, model):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.clipped, self.taken = [], []

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.parameters.items()}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clipped.append(self._now())

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.taken.append(self._now())


def test_a_step_hears_a_share_of_the_clipped_gradient(tmp_path):
    """Drawn after clipping, divided by the share, anew at every step; the task head hears all of it."""
    model = tiny("bert")
    apply(model, "child_tuning", Options(modules=MODULES, reserve=0.3))
    watch = Watch(model)
    trainer_of(model, rows_of(48), 1, Schedule(epochs=1, learning_rate=1e-3, batch_size=16), tmp_path, [watch]).train()
    assert len(watch.taken) == 3
    kept = []
    for clipped, taken in zip(watch.clipped, watch.taken, strict=True):
        norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in clipped.values()]))
        assert norm <= CLIP + 1e-6
        heard = {name: gradient != 0 for name, gradient in taken.items()}
        for name, gradient in taken.items():
            whole = name in compression_of(model).head_parameters
            assert torch.allclose(gradient, clipped[name] * (1 if whole else heard[name] / torch.tensor(0.3).double()))
        body = [(heard[name], clipped[name] != 0) for name in taken if name not in compression_of(model).head_parameters]
        kept.append(torch.cat([ones.flatten() for ones, _ in body]))
        count, of = (sum(int(mask.sum()) for mask in masks) for masks in zip(*body, strict=True))
        assert abs(count / of - 0.3) < 4 * (0.3 * 0.7 / of) ** 0.5
    assert not torch.equal(kept[0], kept[1])


def test_gradients_of_a_growing_choice_are_clipped_together_with_the_head_s(tmp_path):
    """Not by Trainer, which clips before new entries have their gradient: a loss of large logits, and steps of norm CLIP."""
    model = tiny("bert")
    prepared(model, "id3", MODULES)
    with torch.no_grad():
        model.classifier.weight *= 100
    watch = Watch(model)
    trainer_of(model, rows_of(48), 1, Schedule(epochs=1, learning_rate=1e-3, batch_size=16), tmp_path, [watch]).train()
    norms = [torch.nn.utils.get_total_norm(list(taken.values())) for taken in watch.taken]
    assert "growth.values" in watch.taken[0] and norms == pytest.approx([CLIP] * 3, abs=1e-6)


# --- diff pruning ---


def test_the_expected_number_of_open_gates():
    """P(z > 0) against 40,000 draws each (Guo et al. 2021, section 3.1); a gate is closed, open or between."""
    alpha = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, OPEN], dtype=torch.float64)[:, None]
    uniform = torch.rand(6, 40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gates = hard_concrete(alpha, uniform)
    shares, expected = (gates > 0).double().mean(dim=1), expected_open(alpha).flatten()
    assert (abs(shares - expected) <= 4 * (expected * (1 - expected) / 40_000).sqrt()).all()
    assert gates.min() == 0 and gates.max() == 1 and ((gates > 0) & (gates < 1)).any()
    assert torch.equal(hard_concrete(torch.tensor([-9.0, 9.0])), torch.tensor([0.0, 1.0]))


def test_gates_are_those_of_the_paper():
    """Guo et al. 2021: a gate starts at α = 5 and is stretched to (-1.5, 1.5) before it is clamped."""
    _, link = link_of(Gated, 1, 0.0)
    assert link.alpha.unique().tolist() == [5.0]
    assert torch.isclose(hard_concrete(torch.tensor(0.5)), 3 * torch.sigmoid(torch.tensor(0.5)) - 1.5)


def on_device(trainer, rows) -> dict[str, torch.Tensor]:
    """All rows as a batch, where the trainer's model is."""
    return trainer._prepare_inputs(trainer.data_collator([rows[row] for row in range(len(rows))]))


def test_open_gates_cost_and_learn_at_their_own_rate(tmp_path):
    """λ Σ P(z > 0) on top of the task's loss until the projection; α in a group of its own, never decayed."""
    model = gated_model()
    trainer = trainer_of(model, rows_of(16), 1, replace(FAST, weight_decay=0.1), tmp_path)
    inputs, links = on_device(trainer, rows_of(16)), dense_links(model)
    with torch.no_grad():
        task, whole = model(**inputs).loss, trainer.compute_loss(model, dict(inputs))
        expected = sum(1.25e-7 * torch.sigmoid(link.alpha).sum() for link in links)
        assert torch.allclose(whole - task, expected, atol=1e-12)
        project(links)
        assert torch.equal(model(**inputs).loss, trainer.compute_loss(model, dict(inputs)))
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in trainer.create_optimizer().param_groups for p in g["params"]}
    assert {rates[id(link.alpha)] for link in links} == {(0.1, 0.0)}
    assert {rates[id(link.values)] for link in links} == {(5e-3, 0.1)}


def test_two_trainings_in_one(tmp_path):
    """24 steps up to learning_rate and down, 24 up to final_learning_rate and down, with an optimizer that knows no before."""
    schedule = replace(FAST, final_learning_rate=0.05, warmup=0.25)
    shares = [schedule.halves(24, 48)(step) for step in range(48)]
    assert shares[0] == shares[24] == 0 and shares[6] == max(shares[:24]) == 1 and shares[30] == max(shares) == 10
    assert all(a > b for half in (shares[6:24], shares[30:]) for a, b in itertools.pairwise(half))
    model = tiny("bert", torch.float32)
    prepared(model, "diff_pruning", MODULES)
    trainer = trainer_of(model, rows_of(64), 1, schedule, tmp_path)
    trainer.train()
    rates = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
    assert torch.allclose(torch.tensor(rates), 5e-3 * torch.tensor(shares))
    states = [trainer.optimizer.state[link.values] for link in dense_links(model)]
    assert {int(state["step"]) for state in states} == {24}
    assert not any(state["exp_avg"][~link.kept].any() for link, state in zip(dense_links(model), states, strict=True))


def gated_model(architecture: str = "bert", budget: int = 60):
    """Gates and values away from their start, on all chosen matrices."""
    model = tiny(architecture)
    apply(model, "diff_pruning", Options(modules=MODULES, budget=budget))
    generator = torch.Generator().manual_seed(5)
    for link in dense_links(model):
        torch.nn.init.normal_(link.values, std=0.1, generator=generator)
        torch.nn.init.normal_(link.alpha, generator=generator)
    return model


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_projection_keeps_the_largest_of_all_matrices(architecture):
    """Against a sort of every |z w|; what stays stays at its value. GPT-2's matrices lie in fused, transposed weights."""
    model = gated_model(architecture)
    links = dense_links(model)
    before = torch.cat([link.effect().detach().flatten() for link in links])
    project(links)
    after = torch.cat([link.effect().detach().flatten() for link in links])
    best = torch.sort(before.abs(), descending=True, stable=True).indices[:60]
    assert torch.equal(after.nonzero().flatten(), best.sort().values)
    assert torch.equal(after[best], before[best])
    for matrix in matrices_of(model, MODULES):
        (link,) = (one for one in chain(matrix.owner) if one.place == matrix.place)
        assert torch.equal(matrix.weight[~link.kept], matrix.original[~link.kept])


def test_equal_magnitudes_go_to_the_lowest_index():
    model = gated_model(budget=7)
    for link in dense_links(model):
        link.values.data.fill_(0.1)
        link.alpha.data.fill_(OPEN)
    project(dense_links(model))
    assert [int(link.kept.sum()) for link in dense_links(model)][:2] == [7, 0]
    assert dense_links(model)[0].kept.flatten()[:7].all()


def test_fixed_gates_give_the_rest_no_gradient():
    model = gated_model()
    project(dense_links(model))
    loss_of(model).backward()
    for link in dense_links(model):
        assert link.alpha.grad is None
        assert not link.values.grad[~link.kept].any()
    assert sum(int((link.values.grad != 0).sum()) for link in dense_links(model)) == 60


def test_after_a_whole_training_exactly_the_budget_has_moved(tmp_path):
    """Momentum, clipping, noise on the gates: outside Ω the base keeps its bits, even the sign of a zero."""
    model = tiny("bert", torch.float32)
    with torch.no_grad():
        for matrix in matrices_of(model, MODULES):
            matrix.original[0] = -0.0
    before = {matrix.path: matrix.original.clone() for matrix in matrices_of(model, MODULES)}
    apply(model, "diff_pruning", Options(modules=MODULES, budget=60, penalty=1e-4, group="1"))
    train(model, rows_of(64), 1, FAST, tmp_path)
    places = 0
    for matrix in matrices_of(model, MODULES):
        links, outside = chain(matrix.owner), torch.ones_like(matrix.original, dtype=torch.bool)
        assert all(type(link) is Sparse and link.group == "1" and len(link.values) for link in links)
        for link in links:
            outside.view(-1)[link.omega.long()] = False
            places += len(link.values)
        now, then = matrix.weight[outside].view(torch.int32), before[matrix.path][outside].view(torch.int32)
        assert torch.equal(now, then)
    assert places == 60


@pytest.mark.parametrize("cut", [24, 25, 40])
def test_a_cut_on_either_side_of_the_projection(cut, tmp_path):
    """The last step before it, the first behind it, and far from both: the same bits as without a cut."""

    def run(work, on_step=lambda note: None, **arguments):
        model = tiny("bert", torch.float32)
        prepared(model, "diff_pruning", MODULES)
        losses = train(model, rows_of(64), 1, FAST, work, on_step, **arguments)
        return model.state_dict(), losses

    steps = []

    def stop(note: str) -> None:
        steps.append(note)
        if len(steps) == cut + 1:
            raise InterruptedError

    whole, losses = run(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", stop, save_every=0.0)
    resumed = []
    again, same = run(tmp_path / "cut", resumed.append)
    assert resumed.count("resumed") == cut and losses == same
    assert whole.keys() == again.keys() and all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_the_projection_raises_the_loss(tmp_path):
    """What was learned with all places is worse with few of them, and the rest has to be learned again."""

    class Project(TrainerCallback):
        losses = ()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 24:
                model.eval()
                before = float(loss(model))
                project(dense_links(model))
                self.losses = before, float(loss(model))
                control.should_training_stop = True

    def loss(model) -> torch.Tensor:
        with torch.no_grad():
            return model(**on_device(trainer, rows_of(64))).loss

    model, watch = tiny("bert", torch.float32), Project()
    prepared(model, "diff_pruning", MODULES)
    trainer = trainer_of(model, rows_of(64), 1, FAST, tmp_path, [watch])
    trainer.train()
    before, after = watch.losses
    assert after > before + 0.01


def test_the_projection_is_not_continuous():
    """Two points 1e-6 apart keep different places, so their projections lie far apart."""
    kept, projected = [], []
    for nudge in (0.0, 1e-6):
        _, link = link_of(Gated, 1, 0.0)
        link.values.data.zero_()
        link.values.data[0, 0], link.values.data[1, 2] = 1.0, 1.0 - 5e-7 + nudge
        project([link])
        kept.append(link.kept.clone())
        projected.append(link.effect().detach())
    assert not torch.equal(*kept)
    assert (projected[0] - projected[1]).norm() > 1


def test_a_budget_of_no_place_or_of_too_many():
    for budget in (1e-9, 10**9):
        with pytest.raises(UserError, match="E401"):
            apply(tiny("bert"), "diff_pruning", Options(modules=("query",), budget=budget))


# --- what is left ---


@pytest.mark.parametrize("case", ["mixout", "child_tuning", "diff_pruning"])
def test_what_is_settled_computes_the_same_and_can_be_cut(case, architecture):
    """The plain links: same function, and heads and neurons removed equal heads and neurons masked."""
    modules = ("query", "value", "output", "ffn_in", "ffn_out")
    model = tuned(tiny(architecture), case, modules)
    if case == "diff_pruning":
        project(dense_links(model))
    with torch.no_grad():
        before = model(**encoding()).logits
        settle(model)
        links = [link for module in model.modules() for link in chain(module)]
        assert links and not dense_links(model) and all(isinstance(link, Delta) for link in links)
        assert torch.equal(model(**encoding()).logits, before)
        reference = tuned(tiny(architecture), case, modules)
        if case == "diff_pruning":
            project(dense_links(reference))
        plan = {0: Removal([1], [0, 5]), 2: Removal([0], [7])}
        silence(merge_all(reference), plan)
        remove(model, plan)
        assert (model(**encoding()).logits - reference(**encoding()).logits).abs().max() < 1e-12
