"""ID3's growing Ω: the budget at every step, the choice against brute force, and each scalar's own Adam steps."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.deltas.kinds.mask import Mask
from compressor.deltas.links import chain
from compressor.errors import UserError
from compressor.models.anatomy import matrices_of
from compressor.selection.allocation import RECORDED, recorded_steps, sparsity_entropy, tensor_sparsity
from compressor.selection.gradients import Heuristic
from compressor.selection.growth import COHORTS, Growth, ScalarAdamW, grower_of, growth_targets, plant
from tests.compressor.conftest import encoding, tiny


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 400), st.sampled_from(["exact", "cohorts"]))
def test_the_whole_budget_is_spent_and_never_more(budget, steps, schedule):
    """ID3 section 3: Σ u_t = B for any B and T, B < T too; the released code crashes there or overshoots."""
    targets = growth_targets(budget, steps, schedule)
    counts = list(targets.values())
    assert counts[-1] == budget
    assert all(1 <= step <= steps for step in targets) and list(targets) == sorted(targets)
    assert all(later > earlier for earlier, later in pairwise(counts))
    assert len(targets) <= (steps if schedule == "exact" else COHORTS)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(50, 5000), st.integers(10, 400), st.sampled_from(["exact", "cohorts"]), st.sets(st.integers(1, 49), max_size=4)
)
def test_growth_halts_at_every_stop(budget, steps, schedule, stops):
    targets = growth_targets(budget, steps, schedule, stops)
    assert stops <= set(targets.values()) and list(targets.values())[-1] == budget
    counts = list(targets.values())
    assert counts == sorted(set(counts)) and len(counts) <= (steps if schedule == "exact" else COHORTS)


def test_a_stop_is_reached_in_the_step_of_the_nearest_target():
    """Not as soon as Ω may be as large: a checkpoint of a small budget would be of an almost untrained model."""
    natural = {step: 10 * step for step in range(1, 11)}
    assert growth_targets(100, 10, "exact", (55,)) == {**natural, 5: 55}


def test_a_stop_that_cannot_be_reached_is_an_error():
    model = tiny("bert")
    plant(model, Growth(matrices_of(model, ("query",)), 40, heuristic=Heuristic()))
    with pytest.raises(UserError, match="E408"):
        grower_of(model, 3, stops=(1, 2, 3, 4))


@pytest.mark.parametrize("budget", [0, 3 * 32 * 32 + 1])
def test_a_budget_that_cannot_be_spent_is_an_error(budget):
    model = tiny("bert")
    with pytest.raises(UserError, match="E401"):
        plant(model, Growth(matrices_of(model, ("query",)), budget, heuristic=Heuristic()))


def updates_of(budget: int, steps: int, schedule: str) -> int:
    """Scalar updates of a whole training: every chosen position has one in every step."""
    targets, there, updates = growth_targets(budget, steps, schedule), 0, 0
    for step in range(1, steps + 1):
        there = targets.get(step, there)
        updates += there
    return updates


@pytest.mark.parametrize(("budget", "steps"), [(320, 32), (1000, 50), (640, 64)])
def test_half_the_updates_of_a_static_choice(budget, steps):
    """ID3 section 3: increment-S makes B (T + 1) / 2 scalar updates, static-S makes T B."""
    assert updates_of(budget, steps, "exact") == budget * (steps + 1) / 2


@pytest.mark.parametrize(("budget", "steps"), [(320, 320), (6400, 5000), (3200, 33)])
def test_cohorts_make_about_3_percent_more_updates(budget, steps):
    """Of 32 cohorts each is there a little earlier than one position after the other."""
    assert 1.025 < updates_of(budget, steps, "cohorts") / (budget * (steps + 1) / 2) < 1.035


def grown(
    repeat: bool, steps: int, budget: int = 12, schedule: str = "exact", architecture: str = "bert", freeze: bool = False
):
    """A tiny model whose Ω grew for `steps`; yields (step, dense scores before, matrices, growth) after every choice.

    Every choice gives each chosen entry its own gradient, and a new one an optimizer that knows nothing of its slot.
    """
    model = tiny(architecture)
    model.requires_grad_(False)
    matrices = matrices_of(model, ("query", "ffn_out"))
    heuristic = Heuristic(exp=2.0, eps=0.5)
    plant(model, Growth(matrices, budget, heuristic=heuristic, schedule=schedule, repeat=repeat, freeze=freeze))
    growth, grower = model.growth, grower_of(model, steps)
    optimizer = ScalarAdamW([{"params": [growth.values]}], growth, lr=1e-2)
    labels = torch.tensor([0, 2, 1])
    for step in range(1, steps + 1):
        grower.before(step)
        for part in (slice(0, 2), slice(2, 3)):  # two micro-batches
            batch = {key: value[part] for key, value in encoding().items()}
            (torch.nn.functional.cross_entropy(model(**batch).logits, labels[part], reduction="sum") / 3).backward()
        heard = [growth.gradients[number].clone() for number in range(len(matrices))]
        scores = torch.cat([heuristic(g, m.weight).flatten() for g, m in zip(heard, matrices, strict=True)])
        before = slots_of(matrices, growth)
        grower.choose(step, optimizer)
        now = slots_of(matrices, growth)
        assert torch.equal(growth.values.grad[: len(now)], torch.cat([g.flatten() for g in heard])[now])
        fresh = torch.cat([now[: len(before)] != before, torch.ones(len(now) - len(before), dtype=torch.bool)]).nonzero()
        assert not any(state[fresh].any() for state in optimizer.state[growth.values].values())
        yield step, scores, matrices, growth
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def slots_of(matrices, growth) -> torch.Tensor:
    """The chosen place of every slot, as an index into all matrices one behind the other."""
    used = int(growth.count)
    return torch.tensor(offsets(matrices))[growth.matrix[:used].long()] + growth.index[:used]


def places(matrices, growth) -> set[int]:
    """The chosen places as indices into all matrices one behind the other."""
    return set(slots_of(matrices, growth).tolist())


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_each_step_adds_the_best_that_are_not_chosen_yet(architecture):
    """Against a sort of all scores; GPT-2's matrices lie in a fused, transposed weight."""
    before: set[int] = set()
    for step, scores, matrices, growth in grown(False, 6, architecture=architecture):
        now = places(matrices, growth)
        rest = sorted((place for place in range(len(scores)) if place not in before), key=lambda p: (-float(scores[p]), p))
        assert now == before | set(rest[: 2 * step - len(before)])
        before = now


def test_repeat_holds_its_budget_and_what_leaves_falls_back():
    """What comes begins at its weight, too: it takes no value over from what left its slot."""
    first, before = None, set()
    for _, scores, matrices, growth in grown(True, 6):
        first = first or [matrix.original.clone() for matrix in matrices]
        now = places(matrices, growth)
        assert now == set(torch.sort(scores, descending=True, stable=True).indices[:12].tolist())
        moved = {
            start + int(i)
            for start, matrix, old in zip(offsets(matrices), matrices, first, strict=True)
            for i in (matrix.weight != old).flatten().nonzero()
        }
        assert moved <= now & before
        before = now


def test_repeat_chooses_at_every_step_however_small_its_budget_is():
    """Growing one entry at a time, it would first choose in step 4, and in two steps only."""
    assert [len(places(matrices, growth)) for _, _, matrices, growth in grown(True, 8, budget=2)] == [2] * 8


@pytest.mark.parametrize("repeat", [False, True])
def test_what_a_mask_hides_is_never_chosen(repeat):
    """Such an entry has no gradient; it would be chosen once all others are."""
    model = tiny("bert").requires_grad_(False)
    (matrix, *_) = matrices = matrices_of(model, ("query",))
    for one in matrices:
        one.attach(Mask(torch.zeros(one.original.shape, dtype=torch.bool).index_fill(1, torch.tensor([3, 5]), True)))
    free = sum(one.unmasked for one in matrices)
    assert free == len(matrices) * 2 * matrix.original.shape[0]
    with pytest.raises(UserError, match=f"E401 .*a budget of {free + 1} places, and all but {free} of .* are pruned"):
        plant(model, Growth(matrices, free + 1, heuristic=Heuristic()))
    plant(model, Growth(matrices, free, heuristic=Heuristic(), schedule="exact", repeat=repeat))
    growth, grower = model.growth, grower_of(model, 2)
    optimizer = ScalarAdamW([{"params": [growth.values]}], growth, lr=1e-2)
    for step in (1, 2):
        grower.before(step)
        model(**encoding()).logits.square().sum().backward()
        grower.choose(step, optimizer)
    assert all(
        (growth.index[growth.slots(number)] % matrix.original.shape[1]).unique().tolist() == [3, 5] for number in range(2)
    )


def dense(matrices) -> torch.Tensor:
    return torch.cat([matrix.weight.detach().flatten() for matrix in matrices])


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_repeat_may_freeze_what_leaves(architecture):
    """ID3's repeat-S: a step changes the chosen positions alone; what was ever chosen keeps what it learned, and goes on."""
    ever, before, back = set(), None, 0
    for _, scores, matrices, growth in grown(True, 8, architecture=architecture, freeze=True):
        first = torch.cat([matrix.original.flatten() for matrix in matrices])
        now, weights = places(matrices, growth), dense(matrices)
        assert now == set(torch.sort(scores, descending=True, stable=True).indices[:12].tolist())
        if before is not None:
            moved = set((weights - before[1]).abs().gt(1e-15).nonzero().flatten().tolist())
            assert moved <= before[0]
            back += len((now - before[0]) & ever)
        ever |= now
        assert set((weights != first).nonzero().flatten().tolist()) <= ever
        before = (now, weights)
    assert back and len(ever) > 12
    settled = [chain(matrix.owner)[-1].settled() for matrix in matrices] if architecture == "bert" else []
    for matrix, link in zip(matrices, settled, strict=False):
        assert torch.equal(link(matrix.original), matrix.weight)
        assert torch.equal(link.omega, link.omega.unique())


def test_a_choice_alone_changes_no_weight():
    """What is frozen keeps its value also where its slot goes to an entry of a matrix before its own."""
    model = tiny("bert")
    model.requires_grad_(False)
    matrices = matrices_of(model, ("query", "ffn_out"))
    plant(model, Growth(matrices, 12, heuristic=Heuristic(), schedule="exact", repeat=True, freeze=True))
    growth, grower = model.growth, grower_of(model, 6)
    optimizer, generator = ScalarAdamW([growth.values], growth, lr=1e-2), torch.Generator().manual_seed(0)
    for step in range(1, 7):
        grower.before(step)
        for number, matrix in enumerate(matrices):
            growth.add_gradient(number, torch.randn(matrix.original.shape, generator=generator, dtype=matrix.original.dtype))
        growth.values.grad, weights = torch.zeros_like(growth.values), dense(matrices)
        grower.choose(step, optimizer)
        assert torch.allclose(dense(matrices), weights, atol=1e-15, rtol=0)
        optimizer.step()


@pytest.mark.parametrize(("repeat", "freeze"), [(False, False), (True, False), (True, True)])
def test_the_entries_of_each_matrix_are_recorded_step_by_step(repeat, freeze):
    """Of repeat-S those that stopped are among them: they were trained."""
    expected = []
    for step, _, matrices, growth in grown(repeat, 8, freeze=freeze):
        starts = torch.tensor([*offsets(matrices)[1:], len(dense(matrices))])
        chosen = places(matrices, growth)
        if freeze:
            stopped = torch.cat([growth.stopped_values(number).flatten() for number in range(len(matrices))])
            chosen |= set(stopped.nonzero().flatten().tolist())
        numbers = torch.searchsorted(starts, torch.tensor(sorted(chosen)), right=True)
        expected.append((step, torch.bincount(numbers, minlength=len(matrices)).tolist()))
    assert "allotted" in growth.moving, "a training that is resumed goes on with them"
    facts = growth.allocation
    assert [(row["step"], row["entries"]) for row in facts["steps"]] == expected and facts["budget"] == 12
    assert [row["entries"] for row in facts["matrices"]] == [matrix.original.numel() for matrix in matrices]
    last = facts["steps"][-1]
    assert last["chosen"] == sum(expected[-1][1]) and (last["chosen"] > 12) == freeze
    assert last["tensor_sparsity"] == expected[-1][1].count(0) / len(matrices)


def test_statistics_of_an_allocation_by_hand():
    """ID3 section 6: shares 1/10, 1/10 and 0 are the probabilities 1/2, 1/2 and 0."""
    assert tensor_sparsity([1, 2, 0]) == 1 / 3
    assert sparsity_entropy([1, 2, 0], [10, 20, 30]) == pytest.approx(math.log(2) / math.log(3))
    assert sparsity_entropy([5, 10, 15], [10, 20, 30]) == pytest.approx(1)
    assert sparsity_entropy([0, 7, 0], [10, 20, 30]) == sparsity_entropy([0, 0], [1, 1]) == sparsity_entropy([1], [2]) == 0
    assert recorded_steps({3: 1, 1: 1}) == (1, 3)
    many = recorded_steps(range(1, 1001))
    assert (len(many), many[0], many[-1]) == (RECORDED, 1, 1000) and len(set(many)) == RECORDED


def offsets(matrices) -> list[int]:
    sizes = [matrix.original.numel() for matrix in matrices]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def test_a_late_scalar_starts_like_an_early_one():
    """Its first update is lr · sign(g): with a shared step count it would be up to 3.16 times that."""
    model = tiny("bert")
    plant(model, Growth(matrices_of(model, ("query",)), 4, heuristic=Heuristic()))
    growth = model.growth
    optimizer = ScalarAdamW([{"params": [growth.values]}], growth, lr=0.1, weight_decay=0.2)
    growth.count.fill_(2)
    reference = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    plain = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        gradient = torch.randn(4, generator=generator, dtype=torch.float64)
        growth.values.grad, reference.grad = gradient.clone(), gradient[:2].clone()
        optimizer.step()
        plain.step()
        assert torch.allclose(growth.values[:2], reference, atol=1e-12), "each scalar is plain AdamW"
        assert not growth.values[2:].any()
    growth.count.fill_(4)
    growth.values.grad = torch.full((4,), 0.3, dtype=torch.float64)
    optimizer.step()
    assert torch.allclose(growth.values[2:], torch.full((2,), -0.1, dtype=torch.float64), rtol=1e-6)


@pytest.mark.parametrize(
    ("heuristic", "factor", "says"),
    [
        (Heuristic(), float("nan"), r"E409 the gradients of .*\.0\.attention\.self\.query hold"),
        (
            Heuristic(exp=40.0, eps=1e-30),
            1.0,
            r"E409 in step 1 the scores .* of .*\.0\.attention\.self\.query hold .* closer to 0",
        ),
    ],
)
def test_gradients_and_scores_that_are_not_finite_name_their_matrix(heuristic, factor, says):
    """A score may overflow where the gradient is finite: at a weight of almost 0."""
    model = tiny("bert", torch.float32)
    model.requires_grad_(False)
    plant(model, Growth(matrices_of(model, ("query",)), 12, heuristic=heuristic))
    grower = grower_of(model, 4)
    optimizer = ScalarAdamW([{"params": [model.growth.values]}], model.growth, lr=1e-2)
    grower.before(1)
    (model(**encoding()).logits.sum() * factor).backward()
    with pytest.raises(UserError, match=says):
        grower.choose(1, optimizer)
