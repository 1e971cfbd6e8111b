"""The precision of a training step: fp32, or bf16 for the matrix products (mixed precision, Micikevicius et al. 2018).

Parameters, their gradients, the optimizer and the loss stay in fp32: with the range of fp32, bf16 needs no scaling of the loss.
What a delta adds to a weight is computed in fp32, too; only the product with the sum is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compressor.processor import BF16, processor
from compressor.training.schedule import Precision


def multiplies_bf16() -> bool:
    """Whether trainings here have bf16 in hardware: the GPU, if torch finds one, else the processor."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool({*BF16} & {*processor()["instructions"]})


def computed(model: nn.Module, inputs: Mapping[str, Tensor], precision: Precision) -> Any:
    """Outputs of a model whose matrix products are computed in a precision; bf16 leaves some of them in bf16 (`widened`)."""
    device = next(iter(inputs.values())).device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        return model(**inputs)


def widened(values: Tensor) -> Tensor:
    """bf16 as fp32, all else as it is."""
    return values.float() if values.dtype == torch.bfloat16 else values
