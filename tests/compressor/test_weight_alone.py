"""Masks over W alone (DSEE section 3.3): M ⊙ W + ΔW with a dense ΔW, through training, files, removal and export."""

import pytest
import torch

from compressor.checkpoint import load_state, save_state
from compressor.deltas.factored import apart_of, factor_all
from compressor.deltas.links import chain, merge_deltas, merged_copy
from compressor.errors import UserError
from compressor.models.anatomy import layers_of, matrices_of
from compressor.pruning.scores import changes_of
from compressor.pruning.surgery import Removal, remove
from compressor.pruning.weights import densities, hide_lowest, importance, nonzeros, require_zeros_kept
from compressor.storage import delta_file, live
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from pipelines.stages.prune.mask_weights import without_weights
from tests.compressor.conftest import logits, tiny, tuned
from tests.compressor.training_parts import rows_of

ADAPTED = ("query", "value")
SHARE = 0.3


def pruned(architecture: str = "bert", dtype: torch.dtype = torch.float32):
    """A model tuned by dsee, 30 % of query and value hidden by |ΔW|, in W alone; and its matrices."""
    model = tuned(tiny(architecture, dtype), "dsee", ADAPTED)
    matrices = matrices_of(model, ADAPTED)
    count = int(SHARE * sum(matrix.original.numel() for matrix in matrices))
    hide_lowest(matrices, importance(matrices, "delta", changes_of(model), 0), count, "weight")
    return model, matrices


def test_the_mask_hides_the_weight_and_leaves_the_delta(architecture):
    """Bit for bit the model in which W was overwritten; ΔW and its scores are what they were."""
    before = changes_of(tuned(tiny(architecture, torch.float32), "dsee", ADAPTED))
    model, matrices = pruned(architecture)
    for matrix in matrices:
        hidden = ~matrix.weight_mask.keep
        assert hidden.any() and matrix.mask is None
        assert torch.equal(changes_of(model)[matrix.path], before[matrix.path])
        # W + ΔW - W: the sum of both is rounded
        assert torch.allclose(matrix.weight[hidden], matrix.delta[hidden], atol=1e-6)
    assert torch.equal(logits(without_weights(model, matrices)), logits(model))
    assert torch.equal(logits(merged_copy(model)), logits(model))


def test_it_is_as_sparse_as_the_paper_counts_only_while_base_and_delta_are_apart():
    """DSEE's share of the pooled matrices, which a merge would fill."""
    model, matrices = pruned()
    entries = sum(matrix.original.numel() for matrix in matrices)
    row = next(row for row in densities(model) if row.pattern)
    assert (row.pattern, row.entries, row.nonzeros) == ("unstructured, of W alone", entries, entries - int(SHARE * entries))
    merged = merged_copy(model)
    assert next(iter(densities(merged))).pattern == ""
    assert all((matrix.weight != 0).all() for matrix in matrices_of(merged, ADAPTED))
    added = sum(int((p != 0).sum()) for p in model.parameters()) - sum(int((p != 0).sum()) for p in tiny("bert").parameters())
    assert nonzeros(model) == nonzeros(tiny("bert", torch.float32)) + added - int(SHARE * entries)
    with pytest.raises(UserError, match=r"E412 merging would fill the zeros of .*\.0\.attention\.self\.query"):
        require_zeros_kept(model)
    require_zeros_kept(merge_deltas(tiny("bert")))


def test_training_moves_the_delta_and_leaves_the_zeros(tmp_path):
    model, matrices = pruned()
    keeps = [matrix.weight_mask.keep.clone() for matrix in matrices]
    before = [matrix.delta.clone() for matrix in matrices]
    train(model, rows_of(32), 1, Schedule(epochs=1, learning_rate=1e-2, batch_size=8), tmp_path)
    for matrix, keep, delta in zip(matrices_of(model, ADAPTED), keeps, before, strict=True):
        assert torch.equal(matrix.weight_mask.keep, keep) and chain(matrix.owner)[0] is matrix.weight_mask
        assert not torch.equal(matrix.delta, delta)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_it_is_stored_cut_and_exported_with_the_delta_apart(architecture, tmp_path, monkeypatch):
    model, _ = pruned(architecture)
    base, again = tiny(architecture, torch.float32), tiny(architecture, torch.float32)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), logits(model))
    path = tmp_path / "delta.safetensors"
    delta_file.write(model, path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    live.remember(again, "here", "0")
    again.config.id2label = dict(enumerate("abc"))
    assert torch.equal(logits(live.apply(again, path)), logits(model))
    remove(model, {0: Removal([1]), 2: Removal(neurons=[3])})
    first = layers_of(model)[0].matrix("query")
    assert first.weight_mask.keep.shape == first.original.shape
    expected, apart = logits(model), apart_of(model)
    kept = sum(int(matrix.weight_mask.keep.sum()) for matrix in matrices_of(model, ADAPTED))
    factored = factor_all(model)
    assert torch.allclose(logits(factored), expected, atol=1e-5)
    stored = [module.base.weight for module in factored.modules() if hasattr(module, "deltas") and hasattr(module, "base")]
    assert apart.parameters > 0 and sum(int((weight != 0).sum()) for weight in stored) >= kept
