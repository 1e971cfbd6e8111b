"""Trainable changes of frozen weights, as parametrizations: W -> W + ΔW -> M ⊙ (W + ΔW).

A delta is a module whose forward takes a tensor and returns one of the same shape. Deltas chain on a layer's `weight` (or
`bias`) in the order of `attach`; a mask closes the chain. Merging keeps the computed tensor and drops the chain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compressor.deltas.sources import Masked, Own


@dataclass(frozen=True)
class Place:
    """Where in a stored tensor a matrix (out, in) lies: output rows [start, stop) of it, stored as (in, out) or not."""

    rows: tuple[int, int] | None = None
    transposed: bool = False

    def read(self, stored: Tensor) -> Tensor:
        """The matrix, as a view."""
        whole = stored.T if self.transposed else stored
        return whole if self.rows is None else whole[self.rows[0] : self.rows[1]]

    def write(self, stored: Tensor, matrix: Tensor) -> Tensor:
        """A copy of `stored` with the matrix in its place."""
        if self.rows is not None:
            whole = stored.T if self.transposed else stored
            matrix = torch.cat([whole[: self.rows[0]], matrix, whole[self.rows[1] :]])
        # contiguous, as it is stored and merged: BLAS sums another layout in another order
        return matrix.T.contiguous() if self.transposed else matrix


WHOLE = Place()


class Change(nn.Module):
    """What a method adds to a frozen model. `group` names the stage that made it, so that a later one trains its own alone.

    Where it is `frozen` its tensors stay at their start, and only what is attached to them is trained.
    """

    kind: str
    group: str = ""
    frozen = False
    moving: tuple[str, ...] = ()
    """Buffers that training changes, beside the parameters."""

    def settings(self) -> dict:
        """What, beside the tensors, rebuilds this change (JSON)."""
        return {"kind": self.kind, "group": self.group}

    def settled(self) -> Change:
        """The change as it is stored: one that has its own way to train, as it stands now."""
        return self


class Delta(Change):
    """One link W -> W + ΔW. A subclass says how in `change`; `place` is the matrix it sees of the stored tensor."""

    place: Place = WHOLE

    def change(self, weight: Tensor) -> Tensor:
        """W + ΔW for a matrix (out, in), or a bias (out,)."""
        raise NotImplementedError

    def forward(self, stored: Tensor) -> Tensor:
        if self.place == WHOLE:
            return self.change(stored)
        return self.place.write(stored, self.change(self.place.read(stored)))

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Delta:
        """The same change for a weight of `shape` (out, in) that keeps `rows` and `columns` only (sorted int64)."""
        raise NotImplementedError

    def settings(self) -> dict:
        place = {"rows": self.place.rows} if self.place.rows else {}
        return {**super().settings(), **place, **({"transposed": True} if self.place.transposed else {})}


def add_at(weight: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`weight` (any shape) with `values` (N,) added at flat places `index` (N,)."""
    # index_add on the flat view, not `+ dense zeros`: adding 0.0 would turn -0.0 into 0.0 elsewhere
    return weight.flatten().index_add(0, index, values).view(weight.shape)


class LowRank(Delta):
    """W + (alpha / rank) · B A, the low-rank update ΔW_l of DSEE section 3.2 (and of LoRA).

    A is (rank, in), drawn from N(0, 0.02²); B is (out, rank), zero, so ΔW starts at 0 (DSEE algorithm 2).
    """

    kind = "low_rank"

    def __init__(self, source: Own | Masked, scale: float, group: str = ""):
        super().__init__()
        self.source, self.scale, self.group = source, scale, group

    @staticmethod
    def tensors(weight: Tensor, rank: int) -> dict[str, Tensor]:
        """A and B at the start, for `weight` (out, in)."""
        out_features, in_features = weight.shape
        A = torch.empty(rank, in_features, dtype=weight.dtype, device=weight.device).normal_(std=0.02)
        return {"A": A, "B": weight.new_zeros(out_features, rank)}

    @classmethod
    def start(cls, weight: Tensor, rank: int, alpha: float, group: str = "") -> LowRank:
        """A fresh link for `weight` (out, in)."""
        return cls(Own(cls.tensors(weight, rank)), alpha / rank, group)

    @property
    def A(self) -> Tensor:
        return self.source.read("A")

    @property
    def B(self) -> Tensor:
        return self.source.read("B")

    def change(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.B, self.A, alpha=self.scale)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> LowRank:
        # blocks of unequal size cannot share a prototype: each keeps what it saw of it
        A, B = self.A.detach()[:, columns].clone(), self.B.detach()[rows].clone()
        return LowRank(Own({"A": A, "B": B}), self.scale, self.group)

    def settings(self) -> dict:
        return {**super().settings(), "scale": self.scale}


class Sparse(Delta):
    """W + P_Ω(S): trainable values on a fixed support Ω (DSEE section 3.2; every static selective method).

    `omega` holds the sorted flat indices of Ω as int32. Only its |Ω| values exist: no dense S, no gradient masks, and
    entries outside Ω stay bit-identical whatever the optimizer does.
    """

    kind = "sparse"

    def __init__(self, omega: Tensor, values: Tensor, group: str = ""):
        super().__init__()
        self.register_buffer("omega", omega.to(torch.int32))
        self.values, self.group = nn.Parameter(values), group

    @classmethod
    def start(cls, weight: Tensor, omega: Tensor, group: str = "") -> Sparse:
        """A fresh link for `weight` (out, in); `omega` (N,) sorted flat indices into it."""
        return cls(omega, weight.new_zeros(omega.numel()), group)

    def change(self, weight: Tensor) -> Tensor:
        return add_at(weight, self.omega, self.values)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Sparse:
        width = shape[1]
        row, column = self.omega.long() // width, self.omega.long() % width
        kept = torch.isin(row, rows) & torch.isin(column, columns)
        new_row, new_column = torch.searchsorted(rows, row[kept]), torch.searchsorted(columns, column[kept])
        return Sparse(new_row * len(columns) + new_column, self.values.detach()[kept].clone(), self.group)


class Offset(Delta):
    """b + Δb or W + ΔW: a whole tensor moves. For biases (BitFit), where no other form is smaller, and dense deltas."""

    kind = "offset"

    def __init__(self, values: Tensor, group: str = ""):
        super().__init__()
        self.values, self.group = nn.Parameter(values), group

    def change(self, weight: Tensor) -> Tensor:
        return weight + self.values

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Offset:
        values = self.values.detach()[rows]
        return Offset((values if values.dim() == 1 else values[:, columns]).clone(), self.group)


class Mask(Delta):
    """M ⊙ (W + ΔW): closes the chain, so what training sees is what merging keeps. `keep` (out, in) is boolean.

    What it hides is +0.0, never -0.0, and gets no gradient. `pattern` says what it was made as: unstructured, or n:m.
    """

    kind = "mask"

    def __init__(self, keep: Tensor, pattern: str = "unstructured", group: str = ""):
        super().__init__()
        self.register_buffer("keep", keep)
        self.pattern, self.group = pattern, group

    def change(self, weight: Tensor) -> Tensor:
        # chosen, not multiplied: -1 x 0 is -0.0, and infinity x 0 no number
        return torch.where(self.keep, weight, 0.0)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Mask:
        return Mask(self.keep[rows][:, columns].clone(), self.pattern, self.group)

    def settings(self) -> dict:
        return {**super().settings(), "pattern": self.pattern}


def chain(layer: nn.Module, name: str = "weight") -> list[nn.Module]:
    """The parametrizations of one tensor of `layer`, first applied first; empty when there are none."""
    return list(layer.parametrizations[name]) if parametrize.is_parametrized(layer, name) else []


def original(layer: nn.Module, name: str = "weight") -> Tensor:
    """The frozen tensor at the start of the chain."""
    return layer.parametrizations[name].original if chain(layer, name) else getattr(layer, name)


def attach(layer: nn.Module, module: nn.Module, name: str = "weight", *, check: bool = True) -> None:
    """Append a delta or a mask to the chain of `layer.weight` (or another tensor) and freeze the original.

    A delta goes in front of the masks that are there: behind them it would escape. With `check`, torch computes the weight
    once to see that its size stays.
    """
    masks = sum(isinstance(link, Mask) for link in chain(layer, name))
    parametrize.register_parametrization(layer, name, module, unsafe=not check)
    if masks and not isinstance(module, Mask):
        links = layer.parametrizations[name]
        links.insert(len(links) - 1 - masks, links.pop(-1))
    original(layer, name).requires_grad_(False)


@torch.no_grad()
def delta_of(layer: nn.Module, place: Place = WHOLE, name: str = "weight") -> Tensor:
    """ΔW as the merged layer would have it, masks left out: (out, in), zero where nothing is attached."""
    before = original(layer, name)
    changed = before
    for link in chain(layer, name):
        if not isinstance(link, Mask):
            changed = link(changed)
    return place.read(changed - before)


def merge(layer: nn.Module, name: str = "weight") -> None:
    """Keep the computed tensor, drop the chain. Bit-exact."""
    if chain(layer, name):
        value = getattr(layer, name).detach()
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
        setattr(layer, name, nn.Parameter(value))


def merge_deltas(model: nn.Module) -> nn.Module:
    """Merge every chain of `model` in place but leave its masks on: what they hide stays zero whatever is trained then."""
    for _, layer, name in list(chains(model)):
        masks = [link for link in chain(layer, name) if isinstance(link, Mask)]
        merge(layer, name)
        for mask in masks:
            attach(layer, mask, name, check=False)
    return model


def detach(layer: nn.Module, name: str = "weight") -> list[nn.Module]:
    """Take the whole chain off and give it back; the tensor is the original again, bit for bit."""
    links = chain(layer, name)
    if links:
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    return links


def settle_links(model: nn.Module) -> None:
    """Replace every link that has its own way to train by the plain one it is stored as; one without values goes."""
    for _, owner, name in list(chains(model)):
        links = chain(owner, name)
        plain = [link.settled() if isinstance(link, Change) else link for link in links]
        if any(new is not old for new, old in zip(plain, links, strict=True)):
            detach(owner, name)
            for new, old in zip(plain, links, strict=True):
                if new is old or new.values.numel():
                    attach(owner, new, name, check=False)


def chains(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(path of the owner, owner, tensor's name) for every chain of `model`, those on tensors of a change too."""
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            yield from ((path, module, name) for name in list(module.parametrizations))


def plain_name(name: str) -> str | None:
    """What a tensor of the state dict is called where nothing was added; None for what was added."""
    if ".inserts." in name:
        return None
    owner, _, rest = name.partition(".parametrizations.")
    if rest:
        return f"{owner}.{rest.removesuffix('.original')}" if rest.count(".") == 1 and rest.endswith(".original") else None
    return name


def merge_all(model: nn.Module) -> nn.Module:
    """Merge every chain of `model` in place and return it. Inserted modules stay: they cannot be merged."""
    for _, layer, name in list(chains(model)):
        merge(layer, name)
    return model


@torch.no_grad()
def merged_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with every chain merged; the model keeps its chains.

    Never `deepcopy` and then merge: both copies share the class that torch made for a parametrized layer, and merging
    one takes the `weight` property from the other. So the copy's layers get their first class back by hand.
    """
    result = copy.deepcopy(model)
    # the longest path first: a chain may lie on a tensor of a link, which goes with the chain that it is in
    for path in sorted({path for path, _, _ in chains(model)}, key=len, reverse=True):
        layer, source = result.get_submodule(path), model.get_submodule(path)
        names = list(source.parametrizations)
        layer.__class__ = type(source).__bases__[0]
        del layer.parametrizations
        for name in names:
            layer.register_parameter(name, nn.Parameter(getattr(source, name).detach().clone()))
    return result.train(model.training)
