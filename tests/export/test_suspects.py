"""A failed comparison names the block where two models part."""

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from compressor.deltas.links import merged_copy
from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import Removal, remove, silence
from export.parity.suspects import suspect_in_graph, suspect_module
from tests.compressor.conftest import tiny
from tests.export.conftest import encoding


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "t5"])
@pytest.mark.parametrize("matrix", ["key", "ffn_out"])
def test_modules_part_at_the_changed_matrix(name, matrix):
    model = tiny(name, torch.float32)
    broken, batch = copy.deepcopy(model), encoding(2, 9)
    if name == "t5":
        batch["input_ids"][:, -1] = model.config.eos_token_id
        batch["attention_mask"][:] = 1
    layer = layers_of(broken)[1]
    with torch.no_grad():
        layer.linear(matrix).weight.mul_(1.5)
    found = suspect_module(model, broken, batch)
    named = "query" if name == "gpt2" and matrix == "key" else matrix  # GPT-2's key lies in one matrix with its query
    assert found == f"block 1, from its {named} on"


def test_blocks_keep_their_number_when_others_are_gone():
    masked = tiny("bert", torch.float32)
    cut = merged_copy(masked)
    removals = {0: Removal(whole=True)}
    silence(masked, removals)
    remove(cut, removals)
    assert suspect_module(masked, cut, encoding(2, 9)).startswith("the pooler or the task head")
    with torch.no_grad():
        layers_of(cut)[1].linear("value").bias.add_(3.0)
    assert suspect_module(masked, cut, encoding(2, 9)) == "block 2, from its value on"


@pytest.mark.parametrize("kind", ["fp32", "fused"])
def test_a_graph_parts_at_the_changed_block(exported, tmp_path, kind):
    made = exported("bert-unequal")
    path = getattr(made, kind)
    proto = onnx.load(path)
    # block 1 alone has this many neurons left, so its bias is found by its shape
    (bias,) = [tensor for tensor in proto.graph.initializer if list(tensor.dims) == [20]]
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(5), bias.name))
    onnx.save(proto, tmp_path / "broken.onnx")
    assert suspect_in_graph(made.model, tmp_path / "broken.onnx", encoding(2, 9)) == "block 1"
    assert suspect_in_graph(made.model, path, encoding(2, 9)).startswith("the pooler or the task head")


def test_what_cannot_be_told_is_said():
    model = tiny("bert", torch.float32)
    model.config.model_type = "unheard-of"
    assert suspect_module(model, model, encoding(2, 9)).startswith("not known (architecture 'unheard-of'")
