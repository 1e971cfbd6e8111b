"""Closed forms against the papers' printed figures and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compressor.cost import LayerShape, ModelShape, human_bytes, paper_flops_ratio, shape_of
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import tiny

BERT_BASE = ModelShape(768, (LayerShape(12, 64, 3072),) * 12, other=0, head=0, head_macs=768 * 768 + 2 * 768)


@pytest.mark.parametrize(("heads", "whole", "paper"), [(3, 0.912, 0.9227), (6, 0.824, 0.8385), (9, 0.737, 0.7543)])
def test_flops_of_bert_base_with_heads_removed(heads, whole, paper):
    """export.md's ratios with attention scores at length 128, and DSEE table 6's 0.92 / 0.84 / 0.75."""
    pruned = BERT_BASE.pruned([12 - heads] * 12, [3072] * 12)
    assert round(pruned.flops(128) / BERT_BASE.flops(128), 3) == whole
    assert round(paper_flops_ratio(pruned, BERT_BASE, ("query", "value"), 16, 24 * 16), 4) == paper


def test_dense_figures_of_bert_base():
    """22.348 GFLOPs at length 128; LoRA's unmerged 1.0069 x."""
    assert round(BERT_BASE.flops(128) / 1e9, 3) == 22.348
    assert round(paper_flops_ratio(BERT_BASE, BERT_BASE, ("query", "value"), 16, 0), 4) == 1.0069


def test_flops_equal_the_counter(architecture):
    """Eager attention, so that the counter sees QKᵀ and AV; dense and pruned unequally."""
    model = tiny(architecture, torch.float32)
    model.set_attn_implementation("eager")
    remove(model, {0: Removal([1, 3], [0, 5, 7])})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(2, 7, dtype=torch.long))
    assert counter.get_total_flops() == shape_of(model).flops(7, batch=2)


def test_parameters_equal_the_model(architecture):
    model = tiny(architecture)
    remove(model, {1: Removal([0], [2, 3])})
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_human_bytes():
    assert [human_bytes(n) for n in (12, 1536, 2_500_000, 3.2e9)] == ["12 B", "1.5 KB", "2.5 MB", "3.20 GB"]
