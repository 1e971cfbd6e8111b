"""Ω: exactly N places, deterministic ties, and no silent "everything"."""

import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.account import Places
from compressor.anatomy import matrices_of
from compressor.cost import share
from compressor.errors import UserError
from compressor.methods import Options
from compressor.selection.choice import WEIGHT_SCORES, choose, choose_all, select
from compressor.selection.gradients import Asking, Heuristic, gradient_scores
from compressor.selection.names import DATA_SCORES
from pipelines.stages.select import SelectConfig
from tests.compressor.conftest import encoding, tiny


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5))
def test_exactly_n_places_whatever_the_ties(count, seed):
    scores = torch.randint(1, 4, (8, 5), generator=torch.Generator().manual_seed(seed)).float()
    (omega,) = choose([scores], count)
    assert len(omega) == count and omega.dtype == torch.int32
    assert torch.equal(omega, omega.unique()), "sorted, no place twice"
    chosen = torch.zeros(40, dtype=torch.bool)
    chosen[omega.long()] = True
    flat = scores.flatten()
    worst = flat[chosen].min()
    assert (flat[~chosen] <= worst).all()
    ties_in, ties_out = (chosen & (flat == worst)).nonzero(), (~chosen & (flat == worst)).nonzero()
    assert not len(ties_out) or ties_in.max() < ties_out.min(), "equal scores go to the lowest index"


def test_too_few_candidates_is_an_error_not_everything():
    """The papers' code selects every weight when S is all zero."""
    with pytest.raises(UserError, match="E401"):
        choose([torch.zeros(8, 8)], 1)
    with pytest.raises(UserError, match="E401"):
        select(torch.zeros(64, 64), "rpca", 16, seed=0)


@pytest.mark.parametrize(("score", "largest"), [("magnitude", True), ("pafi", False)])
def test_magnitude_takes_the_largest_and_pafi_the_smallest(score, largest):
    """Against a brute-force sort, with zeros and equal magnitudes among the candidates."""
    weight = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    weight[3, 4], weight[5, 6], weight[7, 8] = 0.0, 0.25, -0.25
    flat = weight.abs().flatten().tolist()
    order = sorted(range(120), key=lambda place: (-flat[place] if largest else flat[place], place))
    assert select(weight, score, 17, seed=0).tolist() == sorted(order[:17])


def test_the_stage_offers_every_score():
    assert {word for literal in get_args(SelectConfig.model_fields["score"].annotation) for word in get_args(literal)} == {
        *WEIGHT_SCORES,
        *DATA_SCORES,
    }


@pytest.mark.parametrize("score", sorted(WEIGHT_SCORES))
def test_every_score_repeats_and_fills(score):
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    first = select(weight, score, 9, seed=3)
    assert len(first) == 9 and torch.equal(first, select(weight, score, 9, seed=3))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["matrix", "layer", "global"]), st.floats(0.02, 0.6), st.integers(0, 5))
def test_the_budget_is_exact_in_every_scope(scope, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.q": (6, 4), "0.v": (4, 4), "1.q": (6, 4), "1.v": (4, 4)}
    scores = {path: torch.randint(1, 5, shape, generator=generator).float() for path, shape in shapes.items()}
    layer_of = {path: int(path[0]) for path in scores}
    omega = choose_all(scores, layer_of, Places(Options(), scope, ratio=ratio))
    groups = {"matrix": [[path] for path in scores], "layer": [["0.q", "0.v"], ["1.q", "1.v"]], "global": [list(scores)]}
    for group in groups[scope]:
        flat = torch.cat([scores[path].flatten() for path in group])
        chosen = torch.zeros(len(flat), dtype=torch.bool)
        start = 0
        for path in group:
            chosen[start + omega[path].long()] = True
            start += scores[path].numel()
        assert chosen.sum() == share(ratio, len(flat))
        best = torch.sort(flat, descending=True, stable=True).indices[: chosen.sum()]
        assert torch.equal(best.sort().values, chosen.nonzero().flatten())


def two_batches():
    first, second = encoding(4), encoding(4, length=12)
    return [(first, torch.tensor([0, 1, 2, 0])), (second, torch.tensor([2, 2, 1, 0]))]


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_gradient_scores_by_hand(architecture):
    """|Σ g|, (Σ g)² and Σ g² over two batches; where gradients cancel, the first two see nothing and the third does."""
    model = tiny(architecture)
    matrices = matrices_of(model, ("query", "ffn_out"))
    gradients = []
    for inputs, labels in two_batches():
        model.requires_grad_(True).zero_grad()
        torch.nn.functional.cross_entropy(model(**inputs).logits, labels).backward()
        gradients.append({matrix.path: matrix.place.read(matrix.owner.weight.grad.clone()) for matrix in matrices})
    heuristic = Heuristic(exp=2.0, eps=0.5)
    got = {
        score: gradient_scores(model, matrices, score, two_batches(), heuristic=heuristic) for score in ("sam", "fish", "d3")
    }
    for matrix in matrices:
        first, second = (gradient[matrix.path] for gradient in gradients)
        assert torch.allclose(got["sam"][matrix.path], (first + second) ** 2, rtol=1e-9)
        assert torch.allclose(got["fish"][matrix.path], first**2 + second**2, rtol=1e-9)
        assert torch.allclose(got["d3"][matrix.path], (first + second).abs() / (matrix.weight.abs() + 0.5) ** 2, rtol=1e-9)


def test_clipping_is_per_batch():
    model = tiny("bert")
    matrices = matrices_of(model, ("query",))
    one = two_batches()[:1]
    free = gradient_scores(model, matrices, "d3", one)
    norm = torch.stack([score.square().sum() for score in free.values()]).sum().sqrt()
    clipped = gradient_scores(model, matrices, "d3", one, asking=Asking(clip=float(norm) / 4))
    assert all(torch.allclose(clipped[path], score / 4, rtol=1e-4) for path, score in free.items())


@pytest.mark.parametrize(("exp", "expected"), [(-1.0, [2.0, 12.0]), (0.0, [2.0, 4.0]), (2.0, [2.0, 4 / 9])])
def test_the_heuristic_of_id3_by_hand(exp, expected):
    """H = |g| / (|θ| + ε)^exp with θ = 0 and -2, g = -2 and 4, ε = 1 (methods.md 3.1)."""
    got = Heuristic(exp, 1.0)(torch.tensor([-2.0, 4.0]), torch.tensor([0.0, -2.0]))
    assert torch.allclose(got, torch.tensor(expected))


def test_sam_is_the_best_subset_of_the_second_order_approximation():
    """SAM theorem 3 by brute force over all subsets: the gain of M is ½ Σ g²/h; with |λmax| I for H, g² ranks."""
    generator = torch.Generator().manual_seed(0)
    gradient, curvature = torch.randn(9, generator=generator), torch.full((9,), 1.7)
    gain = {m: 0.5 * sum(float(gradient[i] ** 2 / curvature[i]) for i in m) for m in itertools.combinations(range(9), 4)}
    (omega,) = choose([gradient.square()], 4)
    assert tuple(omega.tolist()) == max(gain, key=gain.get)
