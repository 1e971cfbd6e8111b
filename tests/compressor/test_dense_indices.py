"""compressor.pruning.dense_indices: places of a pruned model's matrices, in the matrices before pruning."""

import pytest
import torch

from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.build import build
from compressor.models.modules import EVERYTHING, MODULES
from compressor.pruning.dense_indices import before_pruning
from compressor.pruning.surgery import restore_kept
from tests.tiny import write_model


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama", "modernbert"])
def test_they_hold_the_same_weights(tmp_path, model_type):
    """Heads and neurons of the second block removed, and the first block: plain, transposed, grouped and fused matrices."""
    folder = write_model(tmp_path, model_type, num_hidden_layers=3)
    dense, pruned, numbered = (build(folder, ["0", "1"]) for _ in range(3))
    kept = {
        str(number): {"heads": [*range(layer.units("heads"))], "neurons": [*range(layer.units("neurons"))]}
        for number, layer in enumerate(layers_of(dense))
    }
    del kept["0"]
    kept["1"] = {"heads": kept["1"]["heads"][1:], "neurons": [0, 2, 5, 23]}
    restore_kept(pruned, kept)
    draw = torch.Generator().manual_seed(0)
    positions = {
        matrix.path: torch.randperm(matrix.original.numel(), generator=draw)[:9].sort().values.to(torch.int32)
        for matrix in matrices_of(pruned, MODULES)
    }
    found = before_pruning(positions, kept, numbered)
    originals = {matrix.path: matrix.original for matrix in matrices_of(dense, MODULES)}
    assert len(found) == len(positions) == 2 * len(originals) // 3
    for matrix, (path, places) in zip(matrices_of(pruned, MODULES), found.items(), strict=True):
        assert places.dtype == torch.int32 and matrix.name == next(
            m.name for m in matrices_of(dense, MODULES) if m.path == path
        )
        assert torch.equal(matrix.original.flatten()[positions[matrix.path].long()], originals[path].flatten()[places.long()])


def test_biases_norms_and_embeddings_have_places_too(tmp_path):
    """Ω in every parameter: a bias loses entries with its matrix, also where that is all of it."""
    folder = write_model(tmp_path, "bert")
    dense, pruned, numbered = (build(folder, ["0", "1"]) for _ in range(3))
    for model in (dense, pruned):
        for number, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    kept = {"0": {"heads": [1, 3], "neurons": []}, "1": {"heads": [0, 1, 2, 3], "neurons": [2, 7]}}
    restore_kept(pruned, kept)
    chosen = {matrix.path: matrix.original.flatten() for matrix in matrices_of(pruned, EVERYTHING)}
    positions = {path: torch.arange(len(values), dtype=torch.int32) for path, values in chosen.items()}
    originals = {matrix.path: matrix.original.flatten() for matrix in matrices_of(dense, EVERYTHING)}
    found = before_pruning(positions, kept, numbered)
    assert len(found) == len(positions) and {"bert.embeddings.word_embeddings.weight"} <= found.keys()
    for path, places in found.items():
        assert torch.equal(originals[path][places.long()], chosen[path])
