"""Choosing widths: the dynamic program against brute force, and what they are chosen from."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.cost import shape_of
from compressor.pruning.search import Block, Option, blocks_of, choose_widths, even_prices, most_saved, widths_of
from tests.compressor.conftest import tiny

BINS = 50


@st.composite
def options(draw, keeps=True):
    """Widths of one sublayer: the first keeps everything, each saves some whole bins."""
    more = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=3))
    rows = [(0, 0)] * keeps + more
    return tuple(Option(len(rows) - n, float(saved), float(lost)) for n, (saved, lost) in enumerate(rows))


@st.composite
def blocks(draw):
    names = draw(st.sampled_from([["heads"], ["heads", "neurons"]]))
    whole = draw(st.none() | st.builds(Option, st.just(0), st.integers(0, 60).map(float), st.integers(0, 40).map(float)))
    return Block({name: draw(options()) for name in names}, whole)


def outcomes(block):
    """(widths, saved, lost) of everything that may happen to a block."""
    for chosen in itertools.product(*block.options.values()):
        widths = {name: one.units for name, one in zip(block.options, chosen, strict=True)}
        yield widths, sum(one.saved for one in chosen), sum(one.lost for one in chosen)
    if block.drop:
        yield None, block.drop.saved, block.drop.lost


@settings(max_examples=200, deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=3))
def test_no_other_choice_loses_less(model):
    """Savings are whole bins here, so the discretised problem is the problem itself."""
    every = [
        (sum(saved for _, saved, _ in whole), sum(lost for _, _, lost in whole))
        for whole in itertools.product(*map(outcomes, model))
    ]
    assert most_saved(model) == max(saved for saved, _ in every)
    best = min((lost for saved, lost in every if saved >= BINS), default=None)
    found = choose_widths(model, float(BINS), BINS)
    if best is None:
        assert found is None
        return
    taken = [[one for one in outcomes(block) if one[0] == widths] for block, widths in zip(model, found, strict=True)]
    # widths may stand for several outcomes: one of each block's must add up to the best
    sums = [(sum(s for _, s, _ in way), sum(lost for _, _, lost in way)) for way in itertools.product(*taken)]
    assert any(saved >= BINS and math.isclose(lost, best) for saved, lost in sums)


@settings(max_examples=50, deadline=None)
@given(st.lists(blocks(), min_size=1, max_size=4), st.floats(0.1, 100))
def test_the_target_is_met_whatever_the_bins(model, need):
    found = choose_widths(model, need, 7)
    if found is None:
        assert most_saved(model) < need * (1 + (len(model) + 1) / 7)
        return
    best = [max(s for widths, s, _ in outcomes(block) if widths == w) for block, w in zip(model, found, strict=True)]
    assert sum(best) >= need * (1 - 1e-6)


@pytest.mark.parametrize(
    ("structure", "units", "least", "tile", "expected"),
    [
        ("heads", 3, 0, 64, [3, 2, 1, 0]),
        ("heads", 3, 2, 1, [3, 2]),
        ("heads", 3, 9, 1, [3]),
        ("neurons", 128, 100, 1, [128, 120, 112, 104]),
        ("neurons", 128, 100, 64, [128, 120, 112, 104]),
        ("neurons", 24, 22, 1, [24, 23, 22]),
        ("neurons", 1000, 900, 1, [1000, 992, 960, 928]),
        ("neurons", 1024, 960, 1, [1024, 992, 960]),
        ("neurons", 1024, 860, 64, [1024, 960, 896]),
        ("neurons", 256, 100, 64, [256, 192, 128]),
    ],
)
def test_widths_are_multiples_that_kernels_like(structure, units, least, tile, expected):
    assert widths_of(structure, units, least, tile) == expected


def test_even_prices_hold_every_sublayer_equal():
    shape = shape_of(tiny("bert")).with_units("heads", [4, 2, 0])
    prices = even_prices(shape, ["heads", "neurons", "layers"])
    assert [one.tolist() for one in prices["heads"]] == [[0, 0.25, 0.5, 0.75, 1], [0, 0.5, 1], [0]]
    assert [one.tolist() for one in prices["layers"]] == [[0, 2]] * 3
    assert [one.tolist() for one in even_prices(shape, ["layers"])["layers"]] == [[0, 1]] * 3


def test_losses_are_the_prices_and_savings_the_measures():
    shape = shape_of(tiny("bert"))
    prices = {"heads": [np.array([0.0, 0.0, 1.0, 3.0, 6.0]) for _ in shape.layers]}
    block = blocks_of(shape, prices, lambda one: one.parameters, {})[1]
    assert [(one.units, one.lost) for one in block.options["heads"]] == [(4, 0), (3, 0), (2, 1), (1, 3), (0, 6)]
    left = [shape.with_units("heads", [units if n == 1 else 4 for n in range(len(shape.layers))]) for units in (4, 3, 2, 1, 0)]
    assert [one.saved for one in block.options["heads"]] == [shape.parameters - one.parameters for one in left]
    assert block.drop is None


def test_a_block_that_others_rely_on_stays_with_a_head():
    shape = shape_of(tiny("t5"))
    found = blocks_of(shape, even_prices(shape, ["heads", "layers"]), lambda one: one.flops(16), {}, staying=[1])
    for block, layer in zip(found, shape.layers, strict=True):
        assert block.options["heads"][-1].units == int(layer.needed)
    assert [place for place, block in enumerate(found) if block.drop is None] == sorted(
        {1} | {place for place, layer in enumerate(shape.layers) if layer.needed}
    )
