"""On a GPU no tensor is left behind on the CPU: every method, score, criterion and cut on a second device.

Where there is no GPU it is simulated and computes the CPU's values, bit for bit; a GPU's are as near as its arithmetic.
"""

from itertools import cycle

import pytest
import torch
from torch import Tensor

from compressor.deltas.links import merge_all, merged_copy
from compressor.models.anatomy import matrices_of
from compressor.models.modules import STRUCTURES
from compressor.pruning.prices import prices_of
from compressor.pruning.refit import refit
from compressor.pruning.scores import changes_of, loss_scores, reconstruction_scores, weight_scores
from compressor.pruning.surgery import Removal, remove, silence
from compressor.pruning.weights import hide_all_but, hide_lowest, importance, loss_importance
from compressor.pruning_criteria import LOSS_POWER, NofM
from compressor.selection.choice import WEIGHT_SCORES
from compressor.selection.gradients import gradient_scores
from compressor.selection.score_names import DATA_SCORES
from compressor.tasks.features import torch_forward
from compressor.tasks.task_kind import kind_of
from tests.compressor.conftest import CASES, GROWING, encoding, tiny, top_places, tuned
from tests.compressor.training_parts import MANY_RESUMED, OTHERS, RESUMED, one_process
from tests.second_device import CPU, REAL, SECOND, is_second, second_device

LABELS = torch.tensor([0, 2, 1])
TUNED = ("query", "value", "ffn_in", "ffn_out")
QUICK = {"id3", "mixout", "dsee"}
"""Trainings that the fast tests have: those that make tensors at every step, and the usual one."""
DRAWS = {"mixout", "diff_pruning", "diff_pruning-groups", "child_tuning", "child_tuning-d"}
"""Trainings that draw random numbers where they compute: a GPU's are others."""
CUT = {0: Removal([1], [0, 5, 7]), 2: Removal(neurons=[3])}
TRAININGS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*CASES, *GROWING, *OTHERS)]


@pytest.fixture
def device():
    with second_device() as there:
        yield there


def on(device, batch: dict) -> dict:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def model_on(device, case: str = "dsee"):
    return tuned(tiny("bert"), case, TUNED).to(device)


def equal(there: Tensor, here: Tensor) -> bool:
    """Bit for bit on the simulated device; on a GPU to 1e-9 in float64 and 1e-4 in float32."""
    if not REAL or not here.is_floating_point():
        return torch.equal(there.cpu(), here)
    bound = 1e-9 if here.dtype == torch.float64 else 1e-4
    return torch.allclose(there.cpu(), here, rtol=bound, atol=bound)


def same(moved, expected) -> bool:
    return all(equal(tensor, expected[name]) for name, tensor in moved.items()) and moved.keys() == expected.keys()


# --- the simulated device itself ---


def test_two_devices_do_not_mix(device):
    there, here = torch.randn(3, 4).to(device), torch.randn(3, 4)
    assert there.device == SECOND and here.device == CPU and there[0].t().device == SECOND
    for wrong in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: here[torch.tensor([1]).to(device)],
        lambda: torch.rand(3, device=device, generator=torch.Generator().manual_seed(1)),
    ):
        with pytest.raises(RuntimeError, match="device"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_what_a_gpu_takes_is_taken(device):
    there = torch.randn(3, 4).to(device)
    assert (there * torch.tensor(2.0)).device == SECOND and there[torch.tensor([1])].device == SECOND
    assert there.cpu().device == CPU and there.to("cpu").numpy().shape == (3, 4)
    assert torch.zeros_like(there).device == there.new_zeros(2).device == torch.arange(3, device=device).device == SECOND


# --- methods ---


@pytest.mark.parametrize("case", TRAININGS)
def test_training_computes_the_same(case, tmp_path):
    def train(folder):
        return OTHERS[case](folder, batch_size=16) if case in OTHERS else one_process(case, folder, batch_size=16)

    expected = train(tmp_path / "here")
    with second_device():
        moved = train(tmp_path / "there")
        # a whole training gives the model back on the CPU
        assert case in (RESUMED, MANY_RESUMED) or all(map(is_second, moved.values()))
        assert same(moved, expected) or (REAL and case in DRAWS)


# --- selection ---


@pytest.mark.parametrize("score", sorted(WEIGHT_SCORES))
def test_scores_of_weights(device, score):
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(0))
    expected = top_places(weight, score, 9, seed=0)
    assert equal(top_places(weight.to(device), score, 9, seed=0), expected)


@pytest.mark.parametrize("score", sorted(DATA_SCORES))
def test_scores_of_gradients(device, score):
    def scores(there):
        model = tiny("bert").to(there)
        return gradient_scores(model, matrices_of(model, TUNED), score, [(on(there, encoding()), LABELS.to(there))])

    assert same(scores(device), scores(CPU))


# --- pruning ---


@pytest.mark.parametrize("structure", [*STRUCTURES, "layers"])
def test_criteria_of_units(device, structure):
    def scores(there):
        model, batch = model_on(there), (on(there, encoding()), LABELS.to(there))
        changes = changes_of(model)
        by_weight = [weight_scores(model, structure, name, changes) for name in ("weight", "weight_plus_delta", "delta")]
        by_loss = [loss_scores(model, structure, name, [batch]) for name in LOSS_POWER]
        return [*by_weight, *by_loss, reconstruction_scores(model, structure, [batch[0]])]

    for there, here in zip(scores(device), scores(CPU), strict=True):
        assert all(equal(*pair) for pair in zip(there, here, strict=True))


def test_prices_of_units(device):
    """The scores are on the CPU, as their file is."""

    def prices(there):
        model = merged_copy(tuned(tiny("bert"), "dsee", TUNED)).to(there)
        scores = {structure: weight_scores(model.cpu(), structure, "weight", {}) for structure in STRUCTURES}
        batches = [(on(there, encoding()), LABELS.to(there))]
        found = prices_of(model.to(there), scores, batches, kind_of("classification"))
        return [torch.from_numpy(block) for blocks in found.values() for block in blocks]

    assert all(equal(*pair) for pair in zip(prices(device), prices(CPU), strict=True))


@pytest.mark.parametrize("criterion", ["delta", "weight", "weight_plus_delta", "random", *LOSS_POWER])
def test_single_weights(device, criterion):
    def pruned(there):
        model = model_on(there)
        matrices, batch = matrices_of(model, TUNED), (on(there, encoding()), LABELS.to(there))
        if criterion in LOSS_POWER:
            scores = loss_importance(model, matrices, criterion, [batch])
        else:
            scores = importance(matrices, criterion, changes_of(model), seed=0)
        hide_lowest(matrices[::2], scores, 500)
        for matrix, hides in zip(matrices[1::2], cycle(("both", "weight"))):
            hide_all_but(matrix, scores[matrix.path], NofM(2, 4), hides)
        return model(**on(there, encoding())).logits.detach()

    assert equal(pruned(device), pruned(CPU))


@pytest.mark.parametrize("case", ["dsee", "vera", "propetl-lora"])
def test_removal_refit_and_inference(device, case):
    """What is cut, fitted anew, merged and asked; and what is silenced instead of cut."""

    def answers(there):
        model = model_on(there, case)
        dense, silenced, batch = merged_copy(model), merged_copy(model), on(there, encoding())
        silence(silenced, CUT)
        remove(model, CUT)
        refit(dense, model, [batch])
        asked = {name: tensor.numpy() for name, tensor in encoding().items()}
        return [torch.from_numpy(torch_forward(one)(asked)) for one in (model, merge_all(model), silenced)]

    assert all(equal(*pair) for pair in zip(answers(device), answers(CPU), strict=True))
