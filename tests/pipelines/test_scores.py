"""The scores that a prune stage removes by: every criterion is the function of its name."""

import typing
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.modules import MODULES
from compressor.pruning import scores as functions
from compressor.pruning_criteria import BY_ROWS, LOSS_POWER, SUMS, Criterion
from compressor.tasks.data import Data, tensor_batches
from pipelines.stages.prune import mask_weights
from pipelines.stages.prune.config import PruneItem
from pipelines.stages.prune.prune_weights import WeightsItem
from pipelines.stages.prune.remove_units import score
from tests.compressor.conftest import tiny, tuned
from tests.pipelines.test_precision import rows_of

QUIET = SimpleNamespace(progress=lambda *_: nullcontext(SimpleNamespace(advance=lambda steps=1: None)))


def expected(model, structure, criterion, batches):
    if criterion == "random":
        return functions.random_scores(model, structure, 5)
    if criterion == "reconstruction":
        return functions.reconstruction_scores(model, structure, [inputs for inputs, _ in batches])
    if criterion in LOSS_POWER:
        return functions.loss_scores(model, structure, criterion, batches)
    return functions.weight_scores(model, structure, criterion, functions.changes_of(model))


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers"])
def test_every_criterion_has_scores_of_its_own(structure):
    model = tuned(tiny("bert", torch.float32), "lora", ["query", "key", "value", "ffn_in", "ffn_out"])
    data = Data(rows_of(model, 16), rows_of(model, 4), ["a", "b", "c"], 1)
    batches, seen = list(tensor_batches(data.train.sample(12), 1, data.batch_size)), []
    for criterion in typing.get_args(Criterion):
        rows = {"rows": 12} if criterion in BY_ROWS else {}
        item = PruneItem(structure=structure, criterion=criterion, remove=1, **rows)
        found = torch.cat(score(item, model, None, 5, data, QUIET)).float()
        torch.testing.assert_close(found, torch.cat(expected(model, structure, criterion, batches)).float())
        assert not any(torch.equal(found, other) for other in seen), criterion
        seen.append(found)
    assert len(seen) == len(SUMS) + len(LOSS_POWER) + 2


@pytest.mark.parametrize("first", [{"remove": {"adapted": 0.1, "others": 0.2}}, {"pattern": "3:4"}], ids=["pools", "n:m"])
def test_a_second_item_ranks_weights_as_a_second_prune_does(first):
    """What the first one hides is no change of the blocks that were not trained: they stay the others, ranked by |W|."""
    first, second = (WeightsItem(structure="weights", **keys) for keys in (first, {"remove": {"adapted": 0.3, "others": 0.4}}))
    model, base = (tiny("bert", torch.float32) for _ in range(2))
    data = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1)
    with torch.no_grad():
        for matrix in map(layers_of(model)[-1].matrix, layers_of(model)[-1].names):
            matrix.weight.add_(torch.randn(matrix.weight.shape), alpha=0.1)
    before = {matrix.path: matrix.weight.detach().abs() for matrix in matrices_of(model, MODULES)}
    mask_weights.carry_out(first, model, base, 0, data, QUIET)
    adapted, others = mask_weights.carry_out(second, model, base, 0, data, QUIET)["pools"][::-1]
    assert (adapted["pool"], others["pool"]) == ("the adapted matrices", "the other matrices")
    assert others["entries"] == 2 * adapted["entries"] and others["hidden"] == int(0.4 * others["entries"])
    untrained = [matrix for layer in layers_of(model)[:-1] for matrix in map(layer.matrix, layer.names)]
    kept = [before[matrix.path][matrix.mask.keep] for matrix in untrained]
    hidden = [before[matrix.path][~matrix.mask.keep] for matrix in untrained]
    if first.nm is None:
        assert torch.cat(hidden).max() <= torch.cat(kept).min()
    assert all(len(part) for part in kept), "none is emptied"


@pytest.mark.parametrize(
    "keys", [{"remove": 0.5}, {"remove": 0.5, "criterion": "delta", "hides": "weight"}, {"pattern": "2:4"}]
)
def test_of_weights_that_changed_equally_the_smaller_goes(keys):
    """After a sparse tune nearly every ΔW is 0: by |ΔW| alone whole blocks would go, or the same places of every run."""
    item, model = WeightsItem(structure="weights", **keys), tuned(tiny("bert", torch.float32), "selective", MODULES)
    data, changes = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1), functions.changes_of(model)
    matrices = matrices_of(model, MODULES)
    moved = torch.cat([changes[matrix.path].abs().flatten() for matrix in matrices])
    sizes = torch.cat([matrix.weight.detach().abs().flatten() for matrix in matrices])
    width = item.nm.run if item.nm else len(sizes)
    order = np.lexsort((sizes.view(-1, width), moved.view(-1, width)))
    expected = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(expected, order[:, width // 2 :], True, axis=1)
    mask_weights.carry_out(item, model, None, 0, data, QUIET)
    kept = torch.cat([(matrix.mask or matrix.weight_mask).keep.flatten() for matrix in matrices])
    assert (kept.numpy() == expected.ravel()).all()
