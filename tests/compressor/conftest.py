"""Tiny random models of every supported architecture, in float64 where exactness is asked."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from compressor.anatomy import ARCHITECTURES, layers_of
from compressor.methods import NAMES, Options, apply

HEADS, NEURONS, LAYERS = 4, 20, 3


def tiny(model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A random model: 3 layers, hidden 32, 4 heads, 20 neurons, weights large enough for differences to show."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=NEURONS,
        vocab_size=99,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = AutoModelForSequenceClassification.from_config(config).to(dtype).eval()
    prefix = f"{model.base_model_prefix}."
    model.head_parameter_names = frozenset(name for name, _ in model.named_parameters() if not name.startswith(prefix))
    return model


def encoding(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Right-padded random rows of unequal length."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 99, (rows, length), generator=generator)
    attention_mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        attention_mask[row, length - 2 * row :] = 0
    input_ids[attention_mask == 0] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def tuned(model, method: str, modules=("query", "value"), places: int = 5):
    """Attach a method to every chosen matrix and move its parameters away from the start."""
    generator = torch.Generator().manual_seed(2)
    omega = {
        layer.linear_path(name): torch.sort(
            torch.randperm(layer.linear(name).weight.numel(), generator=generator)[:places]
        ).values.to(torch.int32)
        for layer in layers_of(model)
        for name in modules
    }
    apply(model, method, Options(modules=modules, rank=2, alpha=4.0, group="1", omega=omega))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in model.head_parameter_names:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request) -> str:
    return request.param


@pytest.fixture(params=NAMES)
def method(request) -> str:
    return request.param
