"""What is known of a live model beside its weights: one object, copied with the model and no part of its state."""

import copy

import pytest
import torch

from compressor.checkpoint import load_state, save_state
from compressor.compression import Compression, Origin, compression_of
from compressor.deltas.links import merge_all, merged_copy
from compressor.methods import apply
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.storage.peft.write import write_peft
from compressor.training.multitask import join_heads
from tests.compressor.conftest import OPTIONS, logits, tiny, tuned
from tests.compressor.delta_parts import LABELS, refused, write


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


@pytest.mark.parametrize("merge", [merge_all, merged_copy])
def test_what_was_merged_is_stored_by_what_is_tuned_afterwards(merge, tmp_path, monkeypatch):
    """The state has the merged weights; a delta file, or an adapter of peft, would be the second training alone."""
    model = tuned(merge(tuned(tiny("bert", torch.float32), "lora")), "lora", ("output",))
    before = logits(model)
    save_state(model, tmp_path / "state", base="here", base_sha256="0", label_names=LABELS)
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: tiny("bert", torch.float32))
    assert torch.equal(logits(load_state(tmp_path / "state", tmp_path)), before)
    assert "or a merge" in refused("E312", write, model, tmp_path / "delta")
    assert "or a merge" in refused("E314", write_peft, model, tmp_path / "peft", base="here")


@pytest.mark.parametrize("merge", [merge_all, merged_copy])
def test_a_merge_without_a_chain_on_the_base_moves_nothing(merge):
    """Values on the tensors of adapters, and nothing at all."""
    for model in (tuned(tiny("bert", torch.float32), "selective-on-adapter"), tiny("bert")):
        assert not compression_of(merge(model)).weights_moved
