"""What losing units costs: against models that really lost them, on every architecture."""

import copy

import numpy as np
import pytest
import torch

from compressor.errors import UserError
from compressor.models.modules import STRUCTURES
from compressor.pruning.prices import KNOTS, knots_of, prices_of, trials
from compressor.pruning.scores import lowest, random_scores, units_of
from compressor.pruning.surgery import Removal, remove, silence, silenced
from compressor.tasks.task_kind import kind_of
from tests.compressor.conftest import encoding, plan_of, tiny

KIND = kind_of("classification")
LABELS = torch.tensor([0, 2, 1])


def two_batches() -> list:
    """Of two rows and one, so that a mean over batches would not be that over rows."""
    rows = encoding()
    return [({key: value[part] for key, value in rows.items()}, LABELS[part]) for part in (slice(0, 2), slice(2, 3))]


def loss(model, taught) -> float:
    """All rows at once, against the logits of a teacher."""
    with torch.no_grad():
        return float(KIND.distillation(model(**encoding()).logits, taught, LABELS))


def scores_of(model) -> dict:
    structures = [name for name in STRUCTURES if any(units_of(model, name))]
    return {name: random_scores(model, name, seed) for seed, name in enumerate([*structures, "layers"])}


def test_a_price_is_what_removing_does_to_the_loss(architecture):
    """At every width that was measured, float64; in between and at the ends as the definition says."""
    model, counted = tiny(architecture), []
    before, scores = copy.deepcopy(model.state_dict()), scores_of(model)
    prices = prices_of(model, scores, two_batches(), KIND, counted.append)
    assert len(counted) == 2 * trials(model, list(scores)) > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "weights are back, bit for bit"
    taught = model(**encoding()).logits.detach()
    start = loss(model, taught)
    for structure, blocks in prices.items():
        for place, price in enumerate(blocks):
            units, cut = units_of(model, structure)[place], copy.deepcopy(model)
            assert price.shape == (units + 1,) and price[0] == 0 and (np.diff(price) > 0).all()
            highest, known = 0.0, [0, *(units - left for left in knots_of(units))]
            assert price == pytest.approx(np.interp(range(units + 1), known, price[known]), abs=1e-12)
            for left in knots_of(units):
                cut.load_state_dict(before)
                gone = lowest([scores[structure][place]], [units - left])[0]
                silence(cut, {place: Removal(whole=True) if structure == "layers" else Removal(**{structure: gone})})
                highest = max(highest, loss(cut, taught) - start)
                assert price[units - left] == pytest.approx(highest, abs=1e-5), (structure, place, left)


def test_a_silence_ends(architecture):
    model, plan = tiny(architecture), plan_of(architecture)
    with torch.no_grad():
        whole = model(**encoding()).logits
        with silenced(model, plan):
            quiet = model(**encoding()).logits
        assert torch.equal(model(**encoding()).logits, whole) and not torch.equal(quiet, whole)
        remove(model, plan)
        assert (model(**encoding()).logits - quiet).abs().max() < 1e-12


def test_a_model_whose_loss_is_no_number_has_no_prices():
    model = tiny("bert")
    with torch.no_grad():
        model.classifier.bias[0] = float("nan")
    with pytest.raises(UserError, match="E521"):
        prices_of(model, {"heads": random_scores(model, "heads", 0)}, two_batches(), KIND)


@pytest.mark.parametrize(("units", "knots"), [(0, []), (1, [0]), (4, [3, 2, 1, 0]), (12, [9, 6, 3, 1, 0])])
def test_widths_that_are_measured(units, knots):
    assert knots_of(units) == knots and len(knots) <= len(KNOTS)


def test_a_block_without_units_costs_nothing():
    model = tiny("bert")
    remove(model, {1: Removal(heads=list(range(4)))})
    prices = prices_of(model, {"heads": random_scores(model, "heads", 0)}, two_batches(), KIND)
    assert prices["heads"][1].tolist() == [0.0] and len(prices["heads"][0]) == 5
