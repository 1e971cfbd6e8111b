"""Masks over W alone (DSEE section 3.3): M ⊙ W + ΔW with a dense ΔW, through training, files, removal and export."""

import pytest
import torch

from compressor.checkpoint import load_state, save_state
from compressor.deltas.factored import apart_of, factor_all
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import chain, merge_deltas, merged_copy
from compressor.errors import UserError
from compressor.models.anatomy import layers_of, matrices_of
from compressor.pruning.scores import changes_of
from compressor.pruning.surgery import Removal, remove
from compressor.pruning.weights import densities, densities_apart, hide_lowest, importance, nonzeros, require_zeros_kept
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


@pytest.mark.parametrize("share", [SHARE, 0.6], ids=["as much", "more"])
def test_what_a_mask_over_the_sum_hides_as_well_is_filled_by_no_merge(share):
    """Behind it the sum is counted, as merged; at fewer places the zeros of both are those of W."""
    model, matrices = pruned()
    query, value = matrices_of(model, ("query",)), matrices_of(model, ("value",))
    scores, size = importance(matrices, "delta", changes_of(model), 0), sum(matrix.original.numel() for matrix in query)
    covered = sum(int((~matrix.weight_mask.keep).sum()) for matrix in query)
    hide_lowest(query, scores, max(covered, int(share * size)))
    apart = {row.pattern: row.nonzeros for row in densities(model) if row.pattern}
    of_value = sum(int((~matrix.weight_mask.keep).sum()) for matrix in value)
    assert apart == {
        "unstructured": sum(int((matrix.weight != 0).sum()) for matrix in query),
        "unstructured, of W alone": size - of_value,
    }
    assert nonzeros(model) == nonzeros(pruned()[0]) + covered - max(covered, int(share * size))
    with pytest.raises(UserError, match=r"E412 .*\.value"):
        require_zeros_kept(model)
    hide_lowest(value, scores, of_value)
    require_zeros_kept(model)
    merged_weights = densities(merged_copy(model))
    assert sum(row.nonzeros for row in densities(model)) == sum(row.nonzeros for row in merged_weights)
    assert {row.pattern for row in densities(model)} == {"", "unstructured"}, "the zeros are those of the sum"
    for matrix, merged in zip(matrices, matrices_of(merged_copy(model), ADAPTED), strict=True):
        assert torch.equal(merged.weight != 0, matrix.mask.keep)


def test_a_later_mask_over_the_weight_counts_what_the_first_hides():
    _, matrices = pruned()
    entries = sum(matrix.original.numel() for matrix in matrices)
    hide_lowest(matrices, importance(matrices, "weight", {}, 0), int(0.4 * entries), "weight")
    assert sum(int((~matrix.weight_mask.keep).sum()) for matrix in matrices) == int(0.4 * entries)


def test_a_merge_fills_what_a_refit_before_the_mask_holds():
    """A refit is no ΔW, but no zero either."""
    model = tiny("bert", torch.float32)
    (matrix,) = matrices_of(model, ("output",))[:1]
    matrix.attach(Refit(torch.ones_like(matrix.original)))
    hide_lowest([matrix], importance([matrix], "weight", {}, 0), 5, "weight")
    with pytest.raises(UserError, match=r"E412 .*attention\.output"):
        require_zeros_kept(model)


def test_zeros_of_a_matrix_without_a_delta_are_those_of_its_merge():
    model = tuned(tiny("bert", torch.float32), "adapter-houlsby")
    matrices = matrices_of(model, ADAPTED)
    hide_lowest(matrices, importance(matrices, "weight", {}, 0), 100, "weight")
    require_zeros_kept(model)
    assert sum(int((matrix.weight == 0).sum()) for matrix in matrices_of(merged_copy(model), ADAPTED)) == 100
    assert [(row.pattern, row.entries - row.nonzeros) for row in densities(model) if row.pattern] == [("unstructured", 100)]
    assert densities_apart(model) == densities(model) and densities_apart(tuned(tiny("bert"), "dsee", ADAPTED)) == []


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
    assert apart > 0 and sum(int((weight != 0).sum()) for weight in stored) >= kept
