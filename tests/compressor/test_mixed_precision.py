"""Trainings in bf16: nearly the same gradients, and a model that is in fp32 afterwards."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from compressor.deltas.backward import by_factors
from compressor.pruning.surgery import remove
from compressor.training import mixed_precision
from compressor.training.distillation import HiddenTeacher
from compressor.training.mixed_precision import computed, multiplies_bf16, widened
from compressor.training.schedule import Schedule
from compressor.training.trainer import train, trainer_of
from compressor.training.unfinished import changing
from tests.compressor.conftest import PLAN, TRIED, encoding, logits, prepared, tiny, tuned
from tests.compressor.training_parts import MODULES, many, mixture, rows_of

NARROW = Schedule(epochs=3, learning_rate=5e-3, mask_learning_rate=3e-2, batch_size=8, seed=4, precision="bf16")


def gradients(model, narrow: str) -> torch.Tensor:
    """All gradients of one step, in a row; the random numbers of gates and masks are the same every time."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(0)
    with by_factors(model):
        loss = cross_entropy(widened(computed(model, encoding(), narrow).logits), torch.tensor([0, 1, 2]))
        loss.backward()
    assert loss.dtype == torch.float32
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in trained)
    return torch.cat([parameter.grad.flatten() for parameter in trained if parameter.grad is not None])


def test_gradients_are_nearly_those_of_fp32(pair_of_case):
    """8 bits of a product are left of 24: the direction stays, and something is rounded."""
    case, architecture = pair_of_case
    model = tuned(tiny(architecture, torch.float32), case)
    exact, narrow = gradients(model, "fp32"), gradients(model, "bf16")
    assert torch.cosine_similarity(exact, narrow, dim=0) > 0.97
    assert not torch.equal(exact, narrow)


def test_the_environment_does_not_choose_a_precision(tmp_path, monkeypatch):
    """`accelerate launch` and cluster profiles set it, and no fingerprint holds it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trainer_of(tuned(tiny("bert", torch.float32), "lora"), rows_of(8), 0, replace(NARROW, precision="fp32"), tmp_path)
    assert trainer.accelerator.mixed_precision == "no"


def test_only_products_are_rounded():
    """What a delta adds to a weight is not: an update far below bf16's steps of 2^-8 moves the product's operand as in fp32."""
    model = tuned(tiny("bert", torch.float32), "lora")
    layer = model.bert.encoder.layer[0].attention.self.query
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, copy.deepcopy(layer).weight)
        inside = layer.weight
    assert torch.equal(inside, layer.weight) and inside.dtype == torch.float32


def test_a_trained_model_computes_in_fp32(case, tmp_path):
    model = tiny("bert", torch.float32)
    prepared(model, case, MODULES, places=20)
    before = copy.deepcopy(model)
    train(model, rows_of(48), 1, NARROW, tmp_path)
    assert all(tensor.dtype != torch.bfloat16 for tensor in [*model.parameters(), *model.buffers()])
    assert logits(model).dtype == torch.float32
    assert any(not torch.equal(tensor, changing(before).get(name, tensor[:0])) for name, tensor in changing(model).items())


@pytest.mark.parametrize("architecture", TRIED)
def test_bf16_learns_on_every_architecture(architecture, tmp_path):
    """The label is told by the first token: the loss falls, and is nearly that of fp32."""
    last = {}
    for name in ("fp32", "bf16"):
        model = tiny(architecture, torch.float32)
        prepared(model, "lora", MODULES)
        losses = train(model, rows_of(48), 1, replace(NARROW, precision=name, epochs=8), tmp_path / name)
        assert losses[-1]["loss"] < losses[0]["loss"]
        last[name] = losses[-1]["loss"]
    assert last["bf16"] == pytest.approx(last["fp32"], rel=0.2, abs=0.05) and last["bf16"] != last["fp32"]


def test_a_live_teacher_is_computed_in_it_too(tmp_path):
    dense, types = tiny("bert", torch.float32), []
    model = copy.deepcopy(dense)
    remove(model, PLAN)
    prepared(model, "lora", MODULES)
    dense.bert.encoder.layer[2].output.dense.register_forward_hook(lambda layer, inputs, output: types.append(output.dtype))
    train(model, rows_of(16), 1, replace(NARROW, epochs=1), tmp_path, teacher=HiddenTeacher(dense, model, logits=True))
    assert set(types) == {torch.bfloat16}


def test_many_tasks(tmp_path):
    model, _ = many(dtype=torch.float32)
    before = copy.deepcopy(changing(model))
    train(model, mixture(), 1, replace(NARROW, epochs=1), tmp_path)
    assert any(not torch.equal(tensor, before.get(name, tensor[:0])) for name, tensor in changing(model).items())


@pytest.mark.parametrize(
    ("instructions", "able"),
    [(["amx_bf16"], True), (["avx2", "avx512_bf16"], True), (["asimd", "bf16"], True), (["avx512f", "amx_int8"], False)],
)
def test_processors_with_bf16(instructions, able, monkeypatch):
    monkeypatch.setattr(mixed_precision, "processor", lambda: {"instructions": instructions})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert multiplies_bf16() is able


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="precision"):
        replace(NARROW, precision="fp16")
