"""Fully tuned weights as deltas of their base, for what is stored as a delta: a model of many tasks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.compression import compression_of
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.links import Place, attach, tied_owners
from compressor.models.build import head_names


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights of the base that a training is about to change, tied ones once."""
    head, named = head_names(model), model.named_parameters()
    return {name: weight.detach().cpu().clone() for name, weight in named if weight.requires_grad and name not in head}


@torch.no_grad()
def as_deltas(model: nn.Module, before: Mapping[str, Tensor], group: str) -> None:
    """Set weights back to `before`, in place, and attach the differences as deltas: of a tied weight one to all its uses."""
    parameters, tied = dict(model.named_parameters()), tied_owners(model)
    uses = {name: tied.get(id(parameters[name])) for name in before}
    changes = {name: parameters[name].detach().cpu() - weight for name, weight in before.items()}
    for name, weight in before.items():
        parameters[name].copy_(weight)
    for name, values in changes.items():
        path, _, tensor = name.rpartition(".")
        owners = uses[name] or [(model.get_submodule(path), tensor)]
        link = _offset(values, owners[0][0], group)
        for owner, part in owners:
            attach(owner, link, part, check=False)
    compression_of(model).weights_moved = False


def _offset(values: Tensor, owner: nn.Module, group: str) -> Offset:
    """The difference as a link; that of a matrix as (out, in), as every other method's, so that files can be compared."""
    transposed = isinstance(owner, Conv1D) and values.dim() == 2
    link = Offset(values.T.contiguous() if transposed else values, group)
    link.place = Place(transposed=transposed)
    return link
