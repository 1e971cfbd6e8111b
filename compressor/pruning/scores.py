"""How much a head or an FFN neuron matters: one number each, the lowest go first.

Heads are scored on the rows of query, key and value, neurons on the rows of ffn_in and the columns of ffn_out, as DSEE
section 3.4 sums |ΔW|. Taylor looks at the task's loss instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from compressor.anatomy import Layer, layers_of
from compressor.deltas import original
from compressor.errors import UserError

Structure = Literal["heads", "neurons"]
Criterion = Literal["delta", "weight", "weight_plus_delta", "taylor", "random"]
Changes = Mapping[str, Tensor]
"""Path of a matrix -> ΔW (out, in)."""

_ROWS = {"heads": ("query", "key", "value"), "neurons": ("ffn_in",)}
_COLUMNS = {"heads": (), "neurons": ("ffn_out",)}
TAYLOR_LAYER = {"heads": "output", "neurons": "ffn_out"}
"""The matrix whose input holds one slice a structure: there a structure's whole effect passes through."""


def changes_of(model: nn.Module, base: nn.Module | None = None) -> dict[str, Tensor]:
    """ΔW of every matrix that changed: of its chain, or against the same matrix of `base` after full tuning."""
    result = {}
    for number, layer in enumerate(layers_of(model)):
        for name in layer.names:
            matrix = layer.matrix(name)
            delta = matrix.delta
            if base is not None:
                delta = matrix.weight.detach() - layers_of(base)[number].matrix(name).weight.detach()
            if delta.any():
                result[matrix.path] = delta
    return result


def weight_scores(model: nn.Module, structure: Structure, criterion: Criterion, changes: Changes) -> list[Tensor]:
    """Σ|ΔW|, Σ|W| or Σ|W + ΔW| over a structure's rows and columns: one tensor (structures,) a layer.

    Raises UserError E502 when the criterion is delta and no matrix of the structure has one.
    """
    scores = []
    for layer in layers_of(model):
        names = (*_ROWS[structure], *_COLUMNS[structure])
        if criterion == "delta" and not any(layer.linear_path(name) in changes for name in names):
            raise UserError(
                "E502",
                f"{structure} by criterion delta: nothing was tuned on {', '.join(names)} of {layer.path}",
                "Tune one of these modules, or use taylor or weight",
            )
        rows = sum(_judged(layer, name, criterion, changes).sum(dim=1) for name in _ROWS[structure])
        columns = sum(_judged(layer, name, criterion, changes).sum(dim=0) for name in _COLUMNS[structure])
        total = rows + columns
        scores.append(total.view(layer.heads, layer.head_size).sum(dim=1) if structure == "heads" else total)
    return scores


def _judged(layer: Layer, name: str, criterion: Criterion, changes: Changes) -> Tensor:
    """The absolute values that a criterion sums for one matrix, (out, in)."""
    linear = layer.linear(name)
    if criterion == "delta":
        path = layer.linear_path(name)
        return changes[path].abs() if path in changes else torch.zeros_like(linear.weight)
    weight = original(linear) if criterion == "weight" else linear.weight
    return weight.detach().abs()


def random_scores(model: nn.Module, structure: Structure, seed: int) -> list[Tensor]:
    """Uniform draws: the control that every criterion must beat."""
    generator = torch.Generator().manual_seed(seed)
    layers = layers_of(model)
    return [torch.rand(layer.heads if structure == "heads" else layer.neurons, generator=generator) for layer in layers]


def taylor_scores(
    model: nn.Module,
    structure: Structure,
    encodings: Sequence[tuple[dict[str, Tensor], Tensor]],
    on_batch: Callable[[int], None] = lambda rows: None,
) -> list[Tensor]:
    """First-order change of the loss when a structure is silenced: Σ over rows of |Σ_t x · ∂L/∂x| (Molchanov et al. 2019).

    `encodings` are batches of (inputs, labels); x is the structure's slice of the input of its outgoing matrix. The sum
    over tokens and features is signed, the one over rows is not. The model is in eval mode.
    """
    layers = layers_of(model)
    totals = [torch.zeros(layer.heads if structure == "heads" else layer.neurons) for layer in layers]
    inputs: dict[int, Tensor] = {}

    def keep_input(number: int):
        def hook(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            # a leaf would cut the graph below; the frozen base gives no gradient path, so ask for one here
            inputs[number] = arguments[0] if arguments[0].requires_grad else arguments[0].requires_grad_(True)
            return (inputs[number],)

        return hook

    target = TAYLOR_LAYER[structure]
    hooks = [layer.linear(target).register_forward_pre_hook(keep_input(number)) for number, layer in enumerate(layers)]
    model.eval()
    try:
        for encoding, labels in encodings:
            # the sum over rows makes each row's gradient its own
            loss = nn.functional.cross_entropy(model(**encoding).logits, labels, reduction="sum")
            gradients = torch.autograd.grad(loss, [inputs[number] for number in range(len(layers))])
            for number, gradient in enumerate(gradients):
                effect = (inputs[number].detach() * gradient).sum(dim=1)
                totals[number] += effect.view(len(effect), len(totals[number]), -1).sum(dim=2).abs().sum(dim=0)
            on_batch(len(labels))
    finally:
        for hook in hooks:
            hook.remove()
    return totals


def lowest(scores: Sequence[Tensor], count: Sequence[int]) -> list[list[int]]:
    """For each layer the `count` structures with the lowest scores, sorted; equal scores: the lowest index goes."""
    return [
        sorted(torch.sort(layer_scores, stable=True).indices[:number].tolist())
        for layer_scores, number in zip(scores, count, strict=True)
    ]
