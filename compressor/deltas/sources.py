"""Sources of a change's tensors: its own parameters, a shared prototype multiplied by masks (ProPETL), or a network.

A `LowRank`, an `Adapter` or a `Prefix` reads its tensors ("A", "down", ...) from its source. So the shared version of a method
needs only another source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class TensorSource(nn.Module):
    """The source from which a change reads its tensors. `names` are their names."""

    names: tuple[str, ...]
    prototype_name: str | None = None
    """Name of the prototype whose tensors it reads."""
    masked = False
    """Whether masks hide entries of that prototype."""

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, as training sees it."""
        raise NotImplementedError

    def size(self, name: str) -> torch.Size:
        """The shape of the tensor called `name`."""
        raise NotImplementedError

    @property
    def plain(self) -> bool:
        """Whether the tensors are parameters themselves, so that nothing is computed when they are read."""
        return False

    def settled(self) -> TensorSource:
        """The source in its stored form, without what only training needs."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors that a change stores; for a masked prototype only the boolean masks."""
        return {name: self.read(name) for name in self.names}

    def support(self) -> Tensor | None:
        """Flat indices (int64) where its masks are 1; None without masks."""
        return None


class PlainTensors(TensorSource):
    """Plain trainable tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def read(self, name: str) -> Tensor:
        return getattr(self, name)

    def size(self, name: str) -> torch.Size:
        return getattr(self, name).shape

    @property
    def plain(self) -> bool:
        return not parametrize.is_parametrized(self)


class Prototype(PlainTensors):
    """Tensors that all blocks share (ProPETL section 3.2). `name` distinguishes the prototypes of one model."""

    kind = "prototype"

    def __init__(self, name: str, tensors: Mapping[str, Tensor], group: str = ""):
        super().__init__(tensors)
        self.name, self.group = name, group

    def settings(self) -> dict:
        """Settings (JSON) from which, with the tensors, the prototype is rebuilt; `kind` is omitted for this class."""
        return {"group": self.group}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, Tensor], **settings) -> Self:
        """Reverse of `settings` and `to_tensors`."""
        return cls(name, tensors, **settings)


def unused_name(model: nn.Module, name: str) -> str:
    """`name` for a prototype, with a number behind it if `model` has one of this name: files tell prototypes apart by name."""
    taken = {module.name for module in model.modules() if isinstance(module, Prototype)}
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(2)))
    return next(free for free in names if free not in taken)


class Network(nn.Module):
    """tanh(A P' + a), (length, inner): what the reparametrized prefixes of all blocks are computed from (Li and Liang 2021,
    section 4.3). P' (length, width) is trained with it, and all of it is dropped afterwards.
    """

    def __init__(self, like: Tensor, length: int, width: int, inner: int):
        super().__init__()
        self.start = nn.Parameter(like.new_empty(length, width).normal_())
        self.layer = nn.Linear(width, inner, device=like.device, dtype=like.dtype)

    def forward(self) -> Tensor:
        return torch.tanh(self.layer(self.start))


class Reparametrized(TensorSource):
    """Tensors (length, `sizes[name]`) as linear functions of a network that the blocks share."""

    def __init__(self, network: Network, sizes: Mapping[str, int]):
        super().__init__()
        self.network, self.names, like = network, tuple(sizes), network.start
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(network.layer.out_features, size, device=like.device, dtype=like.dtype))

    def read(self, name: str) -> Tensor:
        return getattr(self, name)(self.network())

    def size(self, name: str) -> torch.Size:
        return torch.Size((len(self.network.start), getattr(self, name).out_features))

    def settled(self) -> PlainTensors:
        """The current tensors as plain parameters, without the network."""
        return PlainTensors({name: self.read(name).detach() for name in self.names})


class NetworkPrototype(Prototype):
    """A prototype whose tensors are computed by a network: the masks lie on its outputs (ProPETL equations 12 and 13).

    It is stored, and settled, as the plain prototype of its current tensors.
    """

    def __init__(self, name: str, source: Reparametrized, group: str):
        super().__init__(name, {}, group)
        self.source, self.names = source, source.names

    def read(self, name: str) -> Tensor:
        return self.source.read(name)

    def size(self, name: str) -> torch.Size:
        return self.source.size(name)

    @property
    def plain(self) -> bool:
        return False

    def settled(self) -> Prototype:
        return Prototype(self.name, {name: self.read(name).detach() for name in self.names}, self.group)


class _TopK(torch.autograd.Function):
    """|s| -> a 0/1 mask of its `count` largest entries; the gradient passes straight through (Ramanujan et al. 2020)."""

    @staticmethod
    def forward(context, magnitudes: Tensor, count: int) -> Tensor:
        return top_mask(magnitudes, count).to(magnitudes.dtype)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def kept_count(size: int, keep: float) -> int:
    """Number of entries that a mask of density `keep` leaves of `size`: n - ⌊(1 - k) n⌋, as in the authors' code."""
    return size - int((1 - keep) * size)


def top_mask(scores: Tensor, count: int) -> Tensor:
    """Boolean, true at exactly the `count` largest entries; ties go to the lowest flat index. Any memory layout."""
    flat = scores.detach().flatten()
    if count == 0 or scores.is_meta:  # the tensors of a plan have no values
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = torch.kthvalue(flat, flat.numel() - count + 1).values
    chosen, ties = flat > threshold, (flat == threshold).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.view(scores.shape)


def straight_through(scores: Tensor, keep: float) -> Tensor:
    """The mask m of ProPETL section 3.3: 1 at the top `keep` of |s|. dL/ds = dL/dm · sign(s)."""
    return _TopK.apply(scores.abs(), kept_count(scores.numel(), keep))


COMBINE = {
    "or": lambda layer, task: 1 - (1 - layer) * (1 - task),
    "and": lambda layer, task: layer * task,
    "add": lambda layer, task: layer + task,
}
"""How a layer's mask and a task's mask become one (ProPETL section 3.4). `or` is the papers' best."""


class Scores(nn.Module):
    """One trainable score per entry of a prototype's matrices, U(-1/√in, 1/√in). Vectors (biases) have none."""

    def __init__(self, prototype: PlainTensors, keep: float):
        super().__init__()
        self.keep = keep
        for name in prototype.names:
            tensor = prototype.read(name)
            if tensor.dim() > 1:
                bound = 1 / math.sqrt(tensor.shape[1])  # kaiming_uniform with a = √5, as the authors draw them
                self.register_parameter(name, nn.Parameter(torch.empty_like(tensor).uniform_(-bound, bound)))

    def mask(self, name: str) -> Tensor | None:
        """0/1 mask in the prototype's shape and dtype; None where nothing is masked."""
        scores = getattr(self, name, None)
        return None if scores is None else straight_through(scores, self.keep)


class FixedMasks(nn.Module):
    """Masks that are not learned: drawn at random, or learned before and stored on disk, one bit per entry."""

    def __init__(self, masks: Mapping[str, Tensor]):
        super().__init__()
        for name, mask in masks.items():
            self.register_buffer(name, mask)

    @classmethod
    @torch.no_grad()
    def drawn(cls, prototype: PlainTensors, keep: float) -> Self:
        """Random masks that keep as many entries as learned ones do (the "random mask" of ProPETL section 4.4)."""
        scores = Scores(prototype, keep)
        return cls({name: scores.mask(name) for name, _ in scores.named_parameters()})

    def mask(self, name: str) -> Tensor | None:
        return getattr(self, name, None)


class Masked(TensorSource):
    """A prototype multiplied by this block's masks: w ⊙ m (ProPETL equation 5), combined with the task's masks if any.

    `layer` and `task` have a method `mask(name)`: `Scores`, `FixedMasks` (of no tensor where all of the prototype is shared),
    or the scores of many tasks.
    """

    def __init__(self, prototype: Prototype, layer: nn.Module, task: nn.Module | None, combine: str):
        super().__init__()
        if combine not in COMBINE:
            raise ValueError(f"masks are not joined by '{combine}'")
        self.prototype, self.layer, self.task, self.combine = prototype, layer, task, combine
        self.names = prototype.names

    def mask(self, name: str) -> Tensor | None:
        """Mask by which the prototype's tensor is multiplied; None where it is shared unmasked."""
        mask = self.layer.mask(name)
        if mask is None or self.task is None:
            return mask
        return COMBINE[self.combine](mask, self.task.mask(name))

    def read(self, name: str) -> Tensor:
        tensor, mask = self.prototype.read(name), self.mask(name)
        return tensor if mask is None else tensor * mask

    def size(self, name: str) -> torch.Size:
        return self.prototype.size(name)

    @property
    def prototype_name(self) -> str:
        return self.prototype.name

    @property
    def masked(self) -> bool:
        return bool(self.layer.state_dict())

    def to_tensors(self) -> dict[str, Tensor]:
        return masks_of(self.layer, self.names)

    def support(self) -> Tensor | None:
        masks = [mask for name in self.names if (mask := self.mask(name)) is not None]
        return torch.cat([mask.flatten() for mask in masks]).nonzero().flatten() if masks else None


def masks_of(owner: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The boolean masks of `Scores`, `FixedMasks` or the scores of many tasks, for those tensors that have one."""
    return {name: mask.bool() for name in names if (mask := owner.mask(name)) is not None}


@dataclass(frozen=True)
class Shared:
    """What all masked views of one stored prototype share: the prototype, and the task masks if there are any."""

    prototype: Prototype
    task: FixedMasks | None = None
    combine: str = "or"

    def through(self, masks: Mapping[str, Tensor]) -> Masked:
        """The prototype with the boolean masks of one block."""
        return Masked(self.prototype, self.fixed(masks), self.task, self.combine)

    def fixed(self, masks: Mapping[str, Tensor]) -> FixedMasks:
        """Stored masks, unpacked in the prototype's dtype and on its device."""
        like = self.prototype.read(self.prototype.names[0])
        return FixedMasks({name: mask.to(like) for name, mask in masks.items()})


def settle_prototypes(model: nn.Module) -> None:
    """Replace every prototype that a network computes by its tensors, in place: one object for all its views."""
    plain: dict[int, Prototype] = {}
    for view in [module for module in model.modules() if isinstance(module, Masked)]:
        made = plain.setdefault(id(view.prototype), view.prototype.settled())
        view.prototype = made
