"""Keeping the best parameters: which they are, when the training ends early, and that a cut training keeps the same."""

import pytest
import torch

from compressor.tasks.features import torch_forward
from compressor.training.keep_best import KeepBest
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from compressor.training.unfinished import changing
from tests.compressor.conftest import encoding, prepared, tiny
from tests.compressor.training_parts import MODULES, rows_of

FAST = Schedule(epochs=3, learning_rate=5e-3, batch_size=8, seed=4)
"""18 steps for 48 rows."""
NAN = float("nan")
ENCODING = {name: tensor.numpy() for name, tensor in encoding().items()}


def trained(best: KeepBest | None, work, case="lora", on_step=lambda note: None, **options):
    model = tiny("bert", torch.float32, hidden_dropout_prob=0.2)
    prepared(model, case, MODULES)
    return model, train(model, rows_of(48), 1, FAST, work, on_step, best=best, **options)


@pytest.mark.parametrize(
    ("values", "every", "patience", "steps", "kept"),
    [
        ([0.1, 0.5, 0.3], 6, None, [6, 12, 18], 12),
        ([0.1, 0.3, 0.3, 0.3], 5, None, [5, 10, 15, 18], 10),  # the first of equal ones; the last step, too
        ([NAN, 0.2, NAN], 6, None, [6, 12, 18], 12),
        ([0.1, 0.5, 0.3, 0.6], 4, 1, [4, 8, 12], 8),
        ([0.1, 0.5, 0.3, 0.6, 0.6, 0.6], 3, 2, [3, 6, 9, 12, 15, 18], 12),
    ],
)
def test_the_best_is_kept(values, every, patience, steps, kept, tmp_path):
    seen, given, done = [], iter(values), []

    def measure(model):
        seen.append({name: tensor.detach().cpu().clone() for name, tensor in changing(model).items()})
        return next(given)

    best = KeepBest(measure, every, patience)
    model, _ = trained(best, tmp_path, on_step=done.append)
    assert [evaluation["step"] for evaluation in best.evaluations] == steps and len(done) == steps[-1]
    assert best.evaluations[best.best]["step"] == kept
    assert all(torch.equal(tensor, seen[steps.index(kept)][name]) for name, tensor in changing(model).items())


class Cut(Exception):
    pass


@pytest.mark.parametrize("case", ["lora", "propetl", "prefix-reparametrized", "mixout"])
def test_a_cut_training_keeps_the_same(case, tmp_path):
    """Cut behind the best evaluation, and begun again when all was done: equal bits, evaluations and losses."""

    def begin(work: str, cut_at: int = 0):
        told = []

        def on_step(note: str) -> None:
            told.append(note)
            if len(told) == cut_at:
                raise Cut

        # best at step 8
        best = KeepBest(lambda model: -abs(8 - len(told)) + 0 * torch_forward(model)(ENCODING).sum(), every=2, patience=3)
        return *trained(best, tmp_path / work, case, on_step, save_every=0.0), best.evaluations, told

    model, losses, evaluations, _ = begin("whole")
    assert [evaluation["step"] for evaluation in evaluations] == [2, 4, 6, 8, 10, 12, 14]
    with pytest.raises(Cut):
        begin("cut", cut_at=12)
    for work, resumed in (("cut", 11), ("whole", 13)):
        again, same, seen, told = begin(work)
        assert (same, seen, told.count("resumed"), len(told)) == (losses, evaluations, resumed, 14)
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_an_evaluation_changes_nothing_of_the_training(tmp_path):
    """With dropout, whose random numbers go on as they would have."""
    best = KeepBest(lambda model: torch_forward(model)(ENCODING).sum(), every=1)
    assert trained(best, tmp_path / "1")[1] == trained(None, tmp_path / "2")[1]
