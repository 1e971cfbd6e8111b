"""Trainable changes of frozen weights, as parametrizations: W -> W + ΔW -> M ⊙ (W + ΔW).

A delta is a module whose forward takes a tensor and returns one of the same shape. Deltas chain on a layer's `weight` (or
`bias`) in the order of `attach`; a mask closes the chain. Merging keeps the computed tensor and removes the chain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressor.compression import compression_of
from compressor.deltas.sources import PlainTensors, Shared, TensorSource


@dataclass(frozen=True)
class Place:
    """Position of a matrix (out, in) in a stored tensor: output rows [start, stop), stored as (in, out) if `transposed`."""

    rows: tuple[int, int] | None = None
    transposed: bool = False

    def read(self, stored: Tensor) -> Tensor:
        """View of the matrix in the stored tensor."""
        weight = stored.T if self.transposed else stored
        return weight if self.rows is None else weight[self.rows[0] : self.rows[1]]

    def write(self, stored: Tensor, matrix: Tensor) -> Tensor:
        """Copy of `stored` with the matrix written at its position."""
        if self.rows is not None:
            weight = stored.T if self.transposed else stored
            matrix = torch.cat([weight[: self.rows[0]], matrix, weight[self.rows[1] :]])
        # contiguous, as in the stored and merged weight: BLAS sums in a different order for other layouts
        return matrix.T.contiguous() if self.transposed else matrix


WHOLE = Place()


class Change(nn.Module):
    """What a method adds to a frozen model. `group` names the stage that added it, so later stages train only their own.

    If it is `frozen`, its tensors keep their initial values, and only deltas attached to them are trained.
    """

    kind: str
    group: str = ""
    frozen = False
    tuned = True
    """Whether training may change it, and criteria count it in |ΔW|."""
    masks = False
    """Whether it zeroes entries of W + ΔW: it is then always last in its chain, and not part of ΔW."""
    first = False
    """Whether it changes the frozen weight itself, before every delta: it is then always first in its chain."""
    prototype_name: str | None = None
    """Name of the prototype that this change shares with others; it is stored once."""
    moving: tuple[str, ...] = ()
    """Names of buffers that training changes in addition to the parameters."""

    def settings(self) -> dict:
        """Settings (JSON) from which, with the tensors, this change is rebuilt."""
        return {"kind": self.kind, "group": self.group}

    def settled(self) -> Change:
        """The change in its stored form, without what only training needs."""
        return self

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors that, with `settings`, rebuild this change: boolean ones are masks, one bit per entry on disk."""
        return self.state_dict()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shared: Shared | None = None, **settings) -> Self:
        """Reverse of `to_tensors`. `shared` is the prototype, which is stored separately from the change."""
        return cls(**tensors, **settings)

    def entries(self) -> tuple[Tensor | None, Tensor]:
        """(flat indices, values) that the change adds; indices are None if there is a value for every entry, float64."""
        raise NotImplementedError

    def support(self) -> Tensor | None:
        """Flat indices (int64) of the entries that it changes, or where its masks are 1; None for a change of every entry."""
        return None


class Sourced(Change):
    """A change whose tensors come from a `TensorSource`: its own parameters, or a prototype that several changes share."""

    source: TensorSource

    @property
    def prototype_name(self) -> str | None:
        return self.source.prototype_name

    def to_tensors(self) -> dict[str, Tensor]:
        return self.source.to_tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shared: Shared | None = None, **settings) -> Self:
        return cls(PlainTensors(tensors) if shared is None else shared.through(tensors), **settings)

    def support(self) -> Tensor | None:
        return self.source.support()


class Factor(nn.Module):
    """One link as a module, x -> x ΔWᵀ, for `rows` of the output; the layer's matrix is (out, in)."""

    def __init__(self, link: Delta):
        super().__init__()
        self.part = link.place.rows

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` (..., out) plus the link's product with `x` (..., in)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.part is None:
            return self.product(x, y)
        start, stop = self.part
        return torch.cat([y[..., :start], self.product(x, y[..., start:stop]), y[..., stop:]], dim=-1)


class Stack(nn.Module):
    """The links of many tasks on one matrix as one module: y + x ΔWᵀ, with the ΔW of each row's own task.

    Its tensors have one entry a slot, in the first axis. `slots` (tasks,) is the slot of each task, or None where task and slot
    are the same number: tasks without such a link share the last slot, whose ΔW is 0.
    """

    def __init__(self, rows: tuple[int, int] | None = None):
        super().__init__()
        self.part = rows
        self.register_buffer("slots", None)

    def product(self, x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
        """`y` (batch, tokens, out) plus the links' product with `x` (batch, tokens, in); `slot` (batch,) of each row."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor, task: Tensor) -> Tensor:
        slot = task if self.slots is None else self.slots.index_select(0, task)
        if self.part is None:
            return self.product(x, y, slot)
        start, stop = self.part
        return torch.cat([y[..., :start], self.product(x, y[..., start:stop], slot), y[..., stop:]], dim=-1)


def autocasts(tensor: Tensor) -> bool:
    """Whether products with a tensor are computed in a narrower precision here: in a training in bf16."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


class Delta(Change):
    """One link W -> W + ΔW. Subclasses define `change`; `place` is the position of its matrix in the stored tensor.

    A new kind of link is one file: a subclass that overrides what differs, and a row of `compressor.deltas.registry`.
    """

    place: Place = WHOLE
    factorable = False
    """Whether `factor` returns its ΔW as separate products."""
    settles_factorable = False
    """Whether its stored form after training can be factorable."""

    def change(self, weight: Tensor) -> Tensor:
        """W + ΔW for a matrix (out, in), or a bias (out,)."""
        raise NotImplementedError

    def forward(self, stored: Tensor) -> Tensor:
        if not autocasts(stored):
            return self._changed(stored)
        with torch.autocast(stored.device.type, enabled=False):  # the sum is rounded, where the layer multiplies with it
            return self._changed(stored)

    def _changed(self, stored: Tensor) -> Tensor:
        if self.place == WHOLE:
            return self.change(stored)
        return self.place.write(stored, self.change(self.place.read(stored)))

    def cut(self, shape: tuple[int, ...], rows: Tensor, columns: Tensor) -> Delta:
        """The same delta for a weight of `shape` (out, in), or a bias (out,), cut to `rows` and `columns` (sorted int64)."""
        raise NotImplementedError

    def fits(self, stored: Tensor) -> bool:
        """Whether the link has the dtype and the size of the matrix that it changes in `stored`."""
        same_type = all(parameter.dtype == stored.dtype for parameter in self.parameters())
        return same_type and self.suits(self.place.read(stored).shape)

    def suits(self, shape: torch.Size) -> bool:
        """Whether it can change a matrix (out, in), or a bias (out,), of this shape."""
        raise NotImplementedError

    def separable(self, size: int) -> bool:
        """Whether `gradients` costs less than the gradient of the whole matrix, which has `size` entries."""
        return False

    def trained(self) -> tuple[Tensor, ...]:
        """The tensors of a separable link whose gradients `gradients` computes."""
        raise NotImplementedError

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gradients of `tensors`, which are `trained()`, from the layer's input x (T, in) and ∂L/∂y (T, out)."""
        raise NotImplementedError

    def factor(self, width: int) -> Factor:
        """ΔW of a factorable link as a module beside its layer, whose matrix has `width` columns."""
        raise NotImplementedError

    def stack_key(self) -> tuple | None:
        """What links of several tasks must have in common to become one `Stack`; None if this link cannot be stacked."""
        return None

    @classmethod
    def stack(cls, links: Sequence[Delta | None], shape: torch.Size) -> Stack:
        """One link a slot, all with the same `stack_key`, for a matrix of `shape` (out, in); None: a slot without a change."""
        raise NotImplementedError

    def to_peft(self) -> Delta | None:
        """The equivalent low-rank or sparse link that the library peft can store; None where there is none."""
        return None

    def settings(self) -> dict:
        place = {"rows": self.place.rows} if self.place.rows else {}
        return {**super().settings(), **place, **({"transposed": True} if self.place.transposed else {})}


class Untrained(Delta):
    """A link without trained tensors: those beside it can still have their gradients by factors."""

    tuned = False

    def separable(self, size: int) -> bool:
        return True

    def trained(self) -> tuple[Tensor, ...]:
        return ()

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ()


def chain(layer: nn.Module, name: str = "weight") -> list[Delta]:
    """The parametrizations of one tensor of `layer`, in order of application; empty when there are none."""
    return list(layer.parametrizations[name]) if parametrize.is_parametrized(layer, name) else []


def original(layer: nn.Module, name: str = "weight") -> Tensor:
    """The frozen tensor at the start of the chain."""
    return layer.parametrizations[name].original if chain(layer, name) else getattr(layer, name)


def attach(layer: nn.Module, link: Delta, name: str = "weight", *, check: bool = True) -> None:
    """Append a delta or a mask to the chain of `layer.weight` (or another tensor) and freeze the original.

    A delta is inserted before existing masks, because they must cover it; a mask of the weight alone before all deltas. With
    `check`, torch computes the weight once to verify its shape.
    """
    masks = sum(change.masks for change in chain(layer, name))
    parametrize.register_parametrization(layer, name, link, unsafe=not check)
    links = layer.parametrizations[name]
    if link.first:
        links.insert(0, links.pop(-1))
    elif masks and not link.masks:
        links.insert(len(links) - 1 - masks, links.pop(-1))
    original(layer, name).requires_grad_(False)


@torch.no_grad()
def delta_of(layer: nn.Module, place: Place = WHOLE, name: str = "weight") -> Tensor:
    """ΔW of the merged layer, (out, in), without masks and refits: zero where nothing is attached."""
    before = original(layer, name)
    changed = before
    for link in chain(layer, name):
        if link.tuned and not link.masks:
            changed = link(changed)
    return place.read(changed - before)


def tied_owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Parameters that several modules share: id -> (module, name in it) of each, in the order of the model."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if name := plain_name(path):
            owner, _, tensor = name.rpartition(".")
            use, uses = (model.get_submodule(owner), tensor), owners.setdefault(id(parameter), [])
            if use not in uses:  # a module may have several paths
                uses.append(use)
    return {key: uses for key, uses in owners.items() if len(uses) > 1}


def merge(layer: nn.Module, name: str = "weight") -> None:
    """Replace the chain by the tensor that it computes. Bit-exact."""
    if chain(layer, name):
        value = getattr(layer, name).detach()
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
        setattr(layer, name, nn.Parameter(value))


def merge_deltas(model: nn.Module) -> nn.Module:
    """Merge the deltas of `model` in place and keep its masks: pruned weights stay zero in later training."""
    masks = [(layer, name, link) for _, layer, name in chains(model) for link in chain(layer, name) if link.masks]
    merge_all(model)
    for layer, name, mask in masks:
        attach(layer, mask, name, check=False)
    return model


def detach(layer: nn.Module, name: str = "weight") -> list[Delta]:
    """Remove the whole chain and return it; the tensor is the original again, bit for bit."""
    links = chain(layer, name)
    if links:
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    return links


def settle_links(model: nn.Module) -> None:
    """Replace every link by the plain link that it is stored as; remove links without values."""
    settled: dict[Delta, Delta] = {}  # the uses of a tied parameter have their links in common
    for _, owner, name in list(chains(model)):
        links = chain(owner, name)
        plain = [settled[link] if link in settled else settled.setdefault(link, link.settled()) for link in links]
        if any(new is not old for new, old in zip(plain, links, strict=True)):
            detach(owner, name)
            for new, old in zip(plain, links, strict=True):
                if new is old or any(parameter.numel() for parameter in new.parameters()):
                    attach(owner, new, name, check=False)


def chains(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of the owner, owner, tensor's name) for every chain of `model`, including chains on the tensors of a change."""
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            yield from ((path, module, name) for name in list(module.parametrizations))


def plain_name(name: str) -> str | None:
    """Name of a state dict's tensor in the unchanged model; None for a tensor that was added."""
    if ".inserts." in name:
        return None
    owner, _, tail = name.partition(".parametrizations.")
    if tail:
        return f"{owner}.{tail.removesuffix('.original')}" if tail.count(".") == 1 and tail.endswith(".original") else None
    return name


def merge_all(model: nn.Module) -> nn.Module:
    """Merge every chain of `model` in place and return it; tied parameters stay tied. Inserted modules stay: they cannot be
    merged. Its base weights then count as moved: a state stores them."""
    _record_merge(model, model)
    tied = tied_owners(model)
    groups = [uses for uses in tied.values() if chain(*uses[0])]
    for _, layer, name in list(chains(model)):
        merge(layer, name)
    for (first, tensor), *others in groups:
        for owner, name in others:
            setattr(owner, name, getattr(first, tensor))
    return model


def _record_merge(model: nn.Module, merged: nn.Module) -> None:
    """Record on `merged` that its base weights are others, if `model` has a chain on one of them."""
    if any(plain_name(f"{path}.{name}") for path, _, name in chains(model)):
        compression_of(merged).weights_moved = True


@torch.no_grad()
def merged_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with every chain merged; the model keeps its chains.

    Never `deepcopy` and then merge: both copies share the class that torch made for a parametrized layer, and merging one
    takes the `weight` property from the other. So the copy's layers get their original class back explicitly.
    """
    result, merged = copy.deepcopy(model), {}
    # the longest path first: a chain may be attached to a tensor of a link, which is removed with its own chain
    for path in sorted({path for path, _, _ in chains(model)}, key=len, reverse=True):
        layer, source = result.get_submodule(path), model.get_submodule(path)
        names = list(source.parametrizations)
        layer.__class__ = type(source).__bases__[0]
        del layer.parametrizations
        for name in names:
            before = original(source, name)  # tied parameters stay tied
            if before not in merged:
                merged[before] = nn.Parameter(getattr(source, name).detach().clone())
            layer.register_parameter(name, merged[before])
    _record_merge(model, result)
    return result.train(model.training)
