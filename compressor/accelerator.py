"""What is computed without being trained (outputs, scores, refits) is computed on a GPU, if torch finds one.

Trainer moves a model there by itself. Otherwise every model is on the CPU, where it is cut, compared and stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Batch = tuple[dict[str, "Tensor"], "Tensor"]
"""Inputs and labels."""


def gpu() -> torch.device | None:
    """The GPU of this process; None without one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


@contextmanager
def accelerated(*models: nn.Module) -> Iterator[torch.device]:
    """Context in which models are on the GPU, if there is one and they are on the CPU; gives the device that they are on."""
    import torch

    before, there = next(models[0].parameters()).device, gpu()
    if there is None or before.type != "cpu":
        yield before
        return
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False  # of convolutions; products have it off
    try:
        for model in models:
            model.to(there)
        yield there
    finally:
        torch.backends.cudnn.allow_tf32 = tf32
        for model in models:
            model.to(before)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other processes need the memory: Triton, a benchmark's workers


def batches_on(device: torch.device, batches: Iterable[Batch]) -> list[Batch]:
    """Batches whose tensors are on a device."""
    return [({name: tensor.to(device) for name, tensor in inputs.items()}, labels.to(device)) for inputs, labels in batches]
