"""Ω: exactly N places, deterministic ties, and no silent "everything"."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UserError
from compressor.selection import SCORES, choose, select
from pipelines.stages.select import SelectConfig


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5))
def test_exactly_n_places_whatever_the_ties(count, seed):
    scores = torch.randint(1, 4, (8, 5), generator=torch.Generator().manual_seed(seed)).float()
    omega = choose(scores, count)
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
        choose(torch.zeros(8, 8), 1)
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
    assert set(get_args(SelectConfig.model_fields["score"].annotation)) == set(SCORES)


@pytest.mark.parametrize("score", sorted(SCORES))
def test_every_score_repeats_and_fills(score):
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    first = select(weight, score, 9, seed=3)
    assert len(first) == 9 and torch.equal(first, select(weight, score, 9, seed=3))
