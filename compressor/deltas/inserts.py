"""Small modules inserted into a frozen model: adapters and prefixes. They cannot be merged; checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.deltas.links import Sourced
from compressor.deltas.sources import Source


class Insert(Sourced):
    """A change that adds a module instead of changing a weight."""

    def __init__(self, source: Source, group: str = ""):
        super().__init__()
        self.source, self.group = source, group

    @property
    def size(self) -> int:
        """Bottleneck width of an adapter, or number of positions of a prefix."""
        raise NotImplementedError

    def join(self, owner: nn.Module) -> None:
        """Add this module to the computation of `owner`."""

    def enter(self, model: nn.Module) -> None:
        """Prepare the whole `model` for inserts of this kind."""

    def leave(self, model: nn.Module) -> None:
        """Undo `enter` where this was the last insert of its kind in `model`."""

    def entries(self) -> tuple[None, Tensor]:
        return None, torch.cat([self.source.read(name).detach().flatten() for name in self.source.names]).double()


def inserts_of(owner: nn.Module) -> list[Insert]:
    """The adapters or prefixes inserted at this module, in order."""
    return list(owner.inserts) if hasattr(owner, "inserts") else []


def insert(owner: nn.Module, change: Insert) -> None:
    """Insert an adapter after a linear layer, or a prefix into an attention."""
    if not hasattr(owner, "inserts"):
        owner.inserts = nn.ModuleList()
    owner.inserts.append(change)
    change.join(owner)


def settle_inserts(model: nn.Module) -> None:
    """Replace every insert in place by its stored form, without what only training needs."""
    for owner in list(model.modules()):
        for place, change in enumerate(inserts_of(owner)):
            owner.inserts[place] = change.settled()


def take_out(model: nn.Module, owner: nn.Module) -> None:
    """Undo every `insert` at `owner`, a module of `model`."""
    gone = inserts_of(owner)
    del owner.inserts
    for key, hook in list(owner._forward_hooks.items()):
        if any(getattr(hook, "__self__", None) is change for change in gone):
            del owner._forward_hooks[key]
    for change in gone:
        change.leave(model)


def has_inserts(model: nn.Module) -> bool:
    """Whether the model contains adapters or prefixes."""
    return any(isinstance(module, Insert) for module in model.modules())
