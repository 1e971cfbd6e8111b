"""A training step through W + ΔW that computes only the gradients of the factors of ΔW, not the gradient of W + ΔW.

Autograd computes the full gradient of a parametrized weight, T m n multiplications for T tokens, of which a low-rank link
needs only r (m + n) sums. With G = ∂L/∂y (T, out) and y = x W'ᵀ, those sums are ∂L/∂B = s Gᵀ (x Aᵀ) and ∂L/∂A = s (G B)ᵀ x
(DSEE section 3.2 by the chain rule), T r (m + n) multiplications each; a value of Ω at (i, j) gets Σ_t G[t, i] x[t, j]. The
forward pass is bit for bit that of the merged weight.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from compressor.deltas.links import Delta, autocasts, chain, chains, original


class _Linear(torch.autograd.Function):
    """x (..., in), the matrix W' (out, in), a bias (out,) or None, the links of W' and their tensors -> y (..., out)."""

    @staticmethod
    def forward(context, x: Tensor, matrix: Tensor, bias: Tensor | None, links: list[Delta], *tensors: Tensor) -> Tensor:
        context.links, context.narrow = links, autocasts(x)
        if context.narrow:  # what is kept for the backward pass, too: autocast would keep x and W' as they are
            x, matrix = (value.to(torch.get_autocast_dtype(x.device.type)) for value in (x, matrix))
        context.save_for_backward(x, matrix, *tensors)
        return functional.linear(x, matrix, bias)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not context.narrow:
            return _Linear._gradients(context, gradient)
        with torch.autocast(gradient.device.type, gradient.dtype):
            return _Linear._gradients(context, gradient)

    @staticmethod
    def _gradients(context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, *tensors = context.saved_tensors
        of_x, _, of_bias, *_ = context.needs_input_grad
        rows, inputs, pulled = gradient.flatten(end_dim=-2), x.flatten(end_dim=-2), []
        for link in context.links:
            parameters = [tensors.pop(0) for _ in link.trained()]
            # links of an earlier stage are frozen
            trained = any(parameter.requires_grad for parameter in parameters)
            part = rows if link.place.rows is None else rows[:, slice(*link.place.rows)]
            pulled += link.gradients(inputs, part, *parameters) if trained else [None] * len(parameters)
        return gradient @ matrix if of_x else None, None, rows.sum(0) if of_bias else None, None, *pulled


def _separable(layer: nn.Module) -> bool:
    """Whether the weight is frozen and all its links have gradients by factors: no masks, and no links whose tensors are
    computed themselves."""
    if original(layer).requires_grad:  # full tuning on top of deltas
        return False
    links = chain(layer)
    return bool(links) and all(link.separable(original(layer).numel()) for link in links)


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Replacement for a layer's forward. It reads the chain at every call, because chains change while a model is in use."""
    if not torch.is_grad_enabled() or not _separable(layer):
        return type(layer).forward(layer, x)
    links = chain(layer)
    with torch.no_grad():
        stored = layer.weight
    matrix = stored.T if isinstance(layer, Conv1D) else stored
    return _Linear.apply(x, matrix, layer.bias, links, *(parameter for link in links for parameter in link.trained()))


@contextlib.contextmanager
def by_factors(model: nn.Module) -> Iterator[None]:
    """Context in which linear layers of `model` compute the gradients of their deltas by factors, where possible."""
    layers = [layer for _, layer, name in chains(model) if name == "weight" and isinstance(layer, nn.Linear | Conv1D)]
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
