"""What is known of a live model beside its weights: one object, copied with the model and no part of its state."""

import copy

import torch

from compressor.compression import Compression, Origin, compression_of
from compressor.methods import apply
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.training.multitask import join_heads
from tests.compressor.conftest import OPTIONS, tiny


def test_it_is_made_when_it_is_first_asked_for():
    layer = torch.nn.Linear(2, 2, device="meta")
    assert compression_of(layer) == Compression() and compression_of(layer) is layer.compression


def test_it_is_no_part_of_the_state():
    model = tiny("bert")
    names = list(model.state_dict())
    compression_of(model).tasks = compression_of(join_heads([("a", tiny("bert")), ("b", tiny("bert"))])).tasks
    assert list(model.state_dict()) == names and not any("compression" in name for name, _ in model.named_modules())


def test_a_copy_has_its_own():
    model = tiny("bert")
    apply(model, "full", OPTIONS)
    compression_of(model).origin = Origin("here", "0", dict(model.named_parameters()))
    other = copy.deepcopy(model)
    remove(other, {0: Removal([1])})
    assert kept_of(model) == {} and kept_of(other) and compression_of(other).weights_moved
    # its parameters are others: it no longer stands on the base
    assert compression_of(other).origin.sha256 == "0" and not compression_of(other).origin.parameters


def test_the_heads_of_a_copy_are_its_own():
    model = copy.deepcopy(first := join_heads([("a", tiny("bert")), ("b", tiny("bert", seed=1))]))
    tasks = compression_of(model).tasks
    tasks.choose("b")
    assert compression_of(first).tasks.active == 0
    assert all(module is model.get_submodule(path) and module.tasks is tasks for path, module in tasks.heads.items())
