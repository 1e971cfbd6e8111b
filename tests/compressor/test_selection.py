"""Ω: exactly N places, deterministic ties, and no silent "everything"."""

import itertools
import re
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.account import Places
from compressor.cost import share
from compressor.errors import UserError
from compressor.methods import Options
from compressor.models.anatomy import matrices_of
from compressor.pruning.weights import NofM, hide_all_but, hide_lowest
from compressor.selection.choice import WEIGHT_SCORES, choose_all, choose_places, weight_score
from compressor.selection.gradients import GRADIENT_SCORES, GradientSettings, Heuristic, gradient_scores
from compressor.selection.rpca import decompose
from compressor.selection.score_names import DATA_SCORES, SCORES
from compressor.selection.settings import Setting
from pipelines.stages.select.config import SelectConfig, ground_problems
from tests.compressor.conftest import encoding, tiny, top_places


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5))
def test_exactly_n_places_whatever_the_ties(count, seed):
    scores = torch.randint(1, 4, (8, 5), generator=torch.Generator().manual_seed(seed)).float()
    (omega,) = choose_places([scores], count)
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
        choose_places([torch.zeros(8, 8)], 1)
    with pytest.raises(UserError, match="E401"):
        top_places(torch.zeros(64, 64), "rpca", 16, seed=0)


@pytest.mark.parametrize(("score", "largest"), [("magnitude", True), ("pafi", False)])
def test_magnitude_takes_the_largest_and_pafi_the_smallest(score, largest):
    """Against a brute-force sort, with zeros and equal magnitudes among the candidates."""
    weight = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    weight[3, 4], weight[5, 6], weight[7, 8] = 0.0, 0.25, -0.25
    flat = weight.abs().flatten().tolist()
    order = sorted(range(120), key=lambda place: (-flat[place] if largest else flat[place], place))
    assert top_places(weight, score, 17, seed=0).tolist() == sorted(order[:17])


def test_every_score_has_a_row_a_function_and_its_place_in_the_stage():
    assert (set(SCORES) - set(DATA_SCORES), set(DATA_SCORES)) == (set(WEIGHT_SCORES), set(GRADIENT_SCORES))
    assert get_args(SelectConfig.model_fields["score"].annotation) == tuple(SCORES)
    assert all(hasattr(SelectConfig(), key) for row in SCORES.values() for key in row.reads)


@pytest.mark.parametrize("score", sorted(WEIGHT_SCORES))
def test_every_score_repeats_and_fills(score):
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    first = top_places(weight, score, 9, seed=3)
    assert len(first) == 9 and torch.equal(first, top_places(weight, score, 9, seed=3))
    assert weight_score(weight, score, seed=3).element_size() == SCORES[score].width


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


def test_a_last_batch_of_fewer_rows_counts_as_so_much_less():
    """Four rows and one are as five in one batch; a batch is clipped before it is weighed."""
    model = tiny("bert")
    matrices, inputs, labels = matrices_of(model, ("query",)), encoding(5), torch.tensor([0, 1, 2, 0, 1])
    parts = [({key: tensor[of] for key, tensor in inputs.items()}, labels[of]) for of in (slice(4), slice(4, 5))]
    for score, factor in (("sam", 25 / 16), ("d3", 5 / 4)):
        whole = gradient_scores(model, matrices, score, [(inputs, labels)])
        split = gradient_scores(model, matrices, score, parts, batch_size=4)
        assert all(torch.allclose(split[path], values * factor, rtol=1e-9) for path, values in whole.items())
    clip = GradientSettings(clip=1e-3)
    full = gradient_scores(model, matrices, "fish", parts[1:], settings=clip)
    short = gradient_scores(model, matrices, "fish", parts[1:], settings=clip, batch_size=4)
    assert all(torch.allclose(short[path] * 16, values, rtol=1e-9) for path, values in full.items())


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_clipping_is_per_batch(architecture):
    """By the norm over the asked matrices: of GPT-2's fused weight the query alone."""
    model = tiny(architecture)
    matrices = matrices_of(model, ("query",))
    one = two_batches()[:1]
    free = gradient_scores(model, matrices, "d3", one)
    norm = torch.stack([score.square().sum() for score in free.values()]).sum().sqrt()
    clipped = gradient_scores(model, matrices, "d3", one, settings=GradientSettings(clip=float(norm) / 4))
    assert all(torch.allclose(clipped[path], score / 4, rtol=1e-4) for path, score in free.items())


@pytest.mark.parametrize(("exp", "expected"), [(-1.0, [2.0, 12.0]), (0.0, [2.0, 4.0]), (2.0, [2.0, 4 / 9])])
def test_the_heuristic_of_id3_by_hand(exp, expected):
    """H = |g| / (|θ| + ε)^exp with θ = 0 and -2, g = -2 and 4, ε = 1 (ID3, section 3)."""
    got = Heuristic(exp, 1.0)(torch.tensor([-2.0, 4.0]), torch.tensor([0.0, -2.0]))
    assert torch.allclose(got, torch.tensor(expected))


def test_sam_is_the_best_subset_of_the_second_order_approximation():
    """SAM theorem 3 by brute force over all subsets: the gain of M is ½ Σ g²/h; with |λmax| I for H, g² ranks."""
    generator = torch.Generator().manual_seed(0)
    gradient, curvature = torch.randn(9, generator=generator), torch.full((9,), 1.7)
    gain = {m: 0.5 * sum(float(gradient[i] ** 2 / curvature[i]) for i in m) for m in itertools.combinations(range(9), 4)}
    (omega,) = choose_places([gradient.square()], 4)
    assert tuple(omega.tolist()) == max(gain, key=gain.get)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("score", sorted(WEIGHT_SCORES))
def test_a_weight_that_is_not_finite_is_an_error(score, value):
    """RPCA halved an infinite threshold for ever; by magnitude a NaN left the choice a place short."""
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    weight[2, 3] = value
    with pytest.raises(
        UserError, match=rf"E409 score {score}: the weights of layer\.0\.query hold 1 of 48 values that are not finite"
    ):
        weight_score(weight, score, 0, path="layer.0.query")
    with pytest.raises(UserError, match="E409"):
        top_places(weight, score, 5, seed=0)


@settings(max_examples=60, deadline=10_000)
@given(st.sampled_from(sorted(WEIGHT_SCORES)), st.integers(0, 40), st.integers(-44, 38), st.integers(1, 40), st.data())
def test_exactly_n_places_or_an_error(score, zeros, power, count, data):
    """Weights of any size, many of them 0, and of rank 1."""
    generator = torch.Generator().manual_seed(zeros)
    weight = torch.randn(8, 5, generator=generator)
    if data.draw(st.booleans()):
        weight = weight[:, :1] * weight[:1]
    weight = (weight.double() * 10.0**power).clamp(-3e38, 3e38).float()
    weight.view(-1)[torch.randperm(40, generator=generator)[:zeros]] = 0.0
    try:
        assert len(top_places(weight, score, count, seed=0)) == count
    except UserError as error:
        assert error.code in ("E401", "E409") and "this matrix" in str(error)


@pytest.mark.parametrize(
    ("scope", "place"),
    [
        ("matrix", r"1\.q: nothing to choose, as all 24 scores are 0, 2 were"),
        ("layer", "layer 1: only 1 of 40"),
        ("global", "the model: only 3 of 80"),
    ],
)
def test_too_few_candidates_name_their_matrix_or_layer(scope, place):
    scores = {path: torch.zeros(shape) for path, shape in (("0.q", (6, 4)), ("0.v", (4, 4)), ("1.q", (6, 4)), ("1.v", (4, 4)))}
    scores["0.q"][:2, 0], scores["1.v"][0, 0] = 1.0, 1.0
    if scope == "matrix":
        scores["0.v"] += 1.0
    with pytest.raises(UserError, match=f"E401 {place}"):
        choose_all(
            scores, {path: int(path[0]) for path in scores}, Places(Options(), scope, count=4 if scope == "global" else 2)
        )


def test_scores_that_are_no_number_name_their_matrix():
    with pytest.raises(UserError, match=r"E409 the scores of 1\.q hold 1 of 4 values"):
        choose_all(
            {"0.q": torch.ones(2, 2), "1.q": torch.tensor([[1.0, float("nan")], [1, 1]])},
            {},
            Places(Options(), "global", count=2),
        )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", SCORES)
def test_scores_that_are_not_finite_name_their_matrix_and_themselves(score, dtype, value):
    """Weights of one matrix, or its gradients: an error that names it, whatever ranks by it."""
    model = tiny("bert", dtype)
    matrices = matrices_of(model, ("query",))
    spoilt = matrices[1]
    says = rf"E409 score {score}: the (weights|gradient scores) of {re.escape(spoilt.path)} hold 1 of 1,024 values"
    if score in WEIGHT_SCORES:
        with torch.no_grad():
            spoilt.original[3, 4] = value
        with pytest.raises(UserError, match=says):
            [weight_score(matrix.original, score, 0, path=matrix.path) for matrix in matrices]
        return
    spoilt.original.register_hook(
        lambda gradient: gradient.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(value, dtype=dtype))
    )
    with pytest.raises(UserError, match=says):
        gradient_scores(model, matrices, score, [(encoding(), torch.tensor([0, 1, 2]))])


def test_entries_to_hide_by_what_is_no_number_are_an_error():
    model = tiny("bert", torch.float32)
    (matrix,) = matrices_of(model, ("query",))[:1]
    scores = torch.rand(32, 32)
    scores[0, 0] = float("nan")
    with pytest.raises(UserError, match="E409"):
        hide_lowest([matrix], {matrix.path: scores}, 5)
    with pytest.raises(UserError, match="E409"):
        hide_all_but(matrix, scores, NofM(2, 4))


def test_the_rank_of_rpca_is_that_of_its_low_rank_part():
    """DSEE eq. 1: r bounds U V, here of the default setting; a stage's training does not inherit it."""
    weight = torch.randn(24, 24, generator=torch.Generator().manual_seed(0))
    by_hand = decompose(weight, Setting(rank=6), seed=3)
    assert by_hand.U.shape[1] == 6
    assert torch.equal(weight_score(weight, "rpca", 3, rank=6), by_hand.S.abs())
    assert torch.equal(weight_score(weight, "rpca", 3, rank=None), weight_score(weight, "rpca", 3))
    config = SelectConfig(rank=6)
    assert not list(ground_problems(config)) and config.ground() == SelectConfig().ground()
