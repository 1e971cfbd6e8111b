"""benchmarks/unpadded.py answers as the padded model does; on a CPU each row's attention is computed alone."""

import copy

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from benchmarks import unpadded
from benchmarks.runtimes import narrowed

SHAPE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def batch_of(lengths: list[int]) -> dict[str, np.ndarray]:
    """Rows of these lengths, padded with tokens that would change the answers if they were read."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(0).integers(1, 50, mask.shape)
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": ids % 2}


@pytest.mark.parametrize("share", unpadded.PLANS.values())
@pytest.mark.parametrize("lengths", [[5, 9, 1], [4], [7, 7]])
def test_without_padding_the_logits_are_the_same(share, lengths):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SHAPE, initializer_range=0.3)).double().eval()
    model = narrowed(model, share) if share < 1 else model
    expected = unpadded.padded(copy.deepcopy(model), "cpu")(batch_of(lengths))
    found = unpadded.unpadded(model, "cpu")(batch_of(lengths))
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_row_depends_on_no_other():
    torch.manual_seed(0)
    forward = unpadded.unpadded(BertForSequenceClassification(BertConfig(**SHAPE, initializer_range=0.3)).eval(), "cpu")
    both, alone = batch_of([6, 8]), {name: values[1:] for name, values in batch_of([6, 8]).items()}
    np.testing.assert_allclose(forward(both)[1:], forward(alone), rtol=1e-4, atol=1e-5)
