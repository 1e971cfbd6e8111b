"""Sensitivity to int8, simulated in PyTorch: of every matrix alone, and of the outputs when all are rounded.

No runtime is used: writing one file for every matrix would be slow. Both runtimes quantize weights in the same way; activation
scales differ (dynamic or static), as they do here. The real files decide whether a model is good enough. `rounded` predicts
the change of a correct file's outputs on any task: for ONNX Runtime's dynamic int8 within a few percent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from compressor.tasks.features import Forward, torch_forward

Range = tuple[float, float]


@dataclass(frozen=True)
class Sensitivity:
    """Effect on the logits when this matrix alone is int8: the mean |Δlogit| over the tested rows."""

    name: str
    difference: float


def rank(
    model: nn.Module,
    names: Sequence[str],
    predict: Callable[[Forward], np.ndarray],
    *,
    static: bool,
    scored: Collection[str] = (),
    on_step: Callable[[], None] = lambda: None,
) -> list[Sensitivity]:
    """The matrices of `model` called `names`, the most sensitive first. `predict` computes the outputs (predictions,
    outputs) of a model for the tested rows.

    Weights get one scale an output channel (embeddings one in all), inputs one scale: of all these rows where `static`, else
    of each call. Where `static`, the outputs of those in `scored`, attention's queries and keys, are rounded in the same way:
    static int8 has attention read them so. Names that are not a module with a matrix are left out. The model is unchanged
    afterwards.
    """
    modules = {name: module for name, module in model.named_modules() if name in set(names) and has_matrix(module)}
    forward = torch_forward(model)
    with _watching(modules) as (taken, given):
        reference = predict(forward)
    ranked = []
    for name, module in modules.items():
        read = given.get(name) if static and name in scored else None
        with quantized(module, taken.get(name) if static else None, outputs=read):
            predictions = predict(forward)
        ranked.append(Sensitivity(name, float(np.abs(predictions - reference).mean())))
        on_step()
    return sorted(ranked, key=lambda sensitivity: -sensitivity.difference)


@contextlib.contextmanager
def rounded(model: nn.Module, excluded: Sequence[str] = (), bits: int = 8) -> Iterator[None]:
    """Context in which all matrices but those `excluded` (and their inputs, with scales of each call) are rounded: the weights
    to `bits`. Afterwards the model is as it was.
    """
    with contextlib.ExitStack() as stack:
        for name, module in list(model.named_modules()):
            if has_matrix(module) and name not in excluded:
                stack.enter_context(quantized(module, None, bits))
        yield


def has_matrix(module: nn.Module) -> bool:
    """Whether a module has its own 2-d weight, which it multiplies with or looks up in."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


@contextlib.contextmanager
def _watching(modules: dict[str, nn.Module]) -> Iterator[tuple[dict[str, Range], dict[str, Range]]]:
    """Context that records the ranges (minimum, maximum) of every module's inputs and of its outputs while the model runs."""
    taken: dict[str, Range] = {}
    given: dict[str, Range] = {}

    def see(name: str):
        def hook(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for ranges, values in ((taken, inputs[0]), (given, output)):
                low, high = ranges.get(name, (0.0, 0.0))
                ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))

        return hook

    handles = [module.register_forward_hook(see(name)) for name, module in modules.items()]
    try:
        yield taken, given
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def quantized(module: nn.Module, inputs: Range | None, bits: int = 8, outputs: Range | None = None) -> Iterator[None]:
    """Context with one module's weight rounded to `bits`, its inputs to 8. `inputs` is their range; None: that of each call.
    With a range of `outputs` they are rounded to 8 bits, too."""

    def hook(_module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_rounded(args[0], inputs or (float(args[0].min()), float(args[0].max()))), *args[1:])

    weight = module.weight
    # replaced in this module only: a tied weight elsewhere is not changed
    module._parameters["weight"] = nn.Parameter(_rounded_weight(module, bits), requires_grad=False)
    handles = [] if isinstance(module, nn.Embedding) else [module.register_forward_pre_hook(hook)]
    if outputs:
        handles.append(module.register_forward_hook(lambda _module, _inputs, output: _rounded(output, outputs)))
    try:
        yield
    finally:
        module._parameters["weight"] = weight
        for handle in handles:
            handle.remove()


def _rounded(values: Tensor, limits: Range) -> Tensor:
    """Round values (any shape) to 256 levels between the limits; 0 is one of the levels."""
    low, high = min(limits[0], 0.0), max(limits[1], 0.0)
    scale = max((high - low) / 255, 1e-12)
    return torch.fake_quantize_per_tensor_affine(values, scale, round(-low / scale), 0, 255)


def _rounded_weight(module: nn.Module, bits: int) -> Tensor:
    """The weight rounded to 8 bits (or fewer): one scale per output channel, a single scale for an embedding."""
    weight = module.weight.detach()
    if isinstance(module, nn.Embedding):
        return _rounded(weight, (float(weight.min()), float(weight.max())))
    # a linear layer stores (out, in), a Conv1D (in, out)
    inner = 1 if isinstance(module, nn.Linear) else 0
    scale = weight.abs().amax(dim=inner, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale
