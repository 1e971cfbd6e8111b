"""Ω within the tensors that another method adds: A and B of a low-rank update, or the tensors of an adapter.

They are frozen at their initial values. Only values on Ω are trained, by the same links as on a weight; after training the
values are merged into the tensors, which gives a plain low-rank update or adapter.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from compressor.deltas.links import WHOLE, Change, merge
from compressor.models.anatomy import Matrix


def freeze(model: nn.Module, existing: Collection[nn.Module]) -> list[Matrix]:
    """Freeze the changes that are not in `existing`; returns their tensors in model order, `path` as in `state_dict()`."""
    tensors = []
    for path, change in model.named_modules():
        if isinstance(change, Change) and change not in existing:
            change.frozen = True
            for name in change.source.names:
                tensors.append(Matrix(name, f"{path}.source.{name}", change.source, WHOLE, name))
    return tensors


def thaw(model: nn.Module) -> None:
    """Merge the links on frozen changes' tensors into these, bit for bit; afterwards they are ordinary changes."""
    for change in list(model.modules()):
        if isinstance(change, Change) and change.frozen:
            for name in change.source.names:
                merge(change.source, name)
            change.frozen = False
