"""Deltas that stay apart from their matrix, as code: y = x Wᵀ + s (x Aᵀ) Bᵀ + x P_Ω(S)ᵀ, instead of the one matrix W + ΔW.

For a graph in which deltas are to be told from the base, and exchanged. An exporter would fold a chain on the weight into
one matrix; it leaves these products alone. It costs what merging saves: 2 (r (m + n) + |Ω|) FLOPs a token and matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.deltas.dense import Mixed, Thinned
from compressor.deltas.inserts import inserts_of
from compressor.deltas.links import Change, Delta, LowRank, Mask, Offset, Sparse, chain, chains, detach
from compressor.errors import UserError

FACTORS = (LowRank, Sparse)
"""Links with a product of their own. A dense one is as large as its matrix, and a mask lies over the sum."""


class Factor(nn.Module):
    """x -> x ΔWᵀ of one link, for `rows` of the output; the matrix of the layer is (out, in)."""

    def __init__(self, link: Delta):
        super().__init__()
        self.part = link.place.rows

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` (..., out) with the link's share of `x` (..., in) added."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.part is None:
            return self.product(x, y)
        start, stop = self.part
        return torch.cat([y[..., :start], self.product(x, y[..., start:stop]), y[..., stop:]], dim=-1)


class LowRankFactor(Factor):
    """y + s (x A) B with A (in, rank) and B (rank, out): transposed, so that a graph holds them as they are."""

    def __init__(self, link: LowRank, _width: int):
        super().__init__(link)
        self.scale = link.scale
        self.A, self.B = (nn.Parameter(one.detach().T.contiguous(), requires_grad=False) for one in (link.A, link.B))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.scale * ((x @ self.A) @ self.B)


class SparseFactor(Factor):
    """y[row] += value · x[column] for every place of Ω; `values` (|Ω|,) in the order of the flat indices."""

    def __init__(self, link: Sparse, width: int):
        super().__init__(link)
        self.register_buffer("rows", link.omega.long() // width)
        self.register_buffer("columns", link.omega.long() % width)
        self.values = nn.Parameter(link.values.detach().clone(), requires_grad=False)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return y.index_add(-1, self.rows, x.index_select(-1, self.columns) * self.values)


class FactoredLinear(nn.Module):
    """A linear layer (or Conv1D) with the factors of its links beside it."""

    def __init__(self, base: nn.Module, links: list[Delta]):
        super().__init__()
        self.base = base
        widths = [link.place.read(base.weight).shape[1] for link in links]
        kinds = {LowRank: LowRankFactor, Sparse: SparseFactor}
        self.deltas = nn.ModuleList(kinds[type(link)](link, width) for link, width in zip(links, widths, strict=True))

    @property
    def weight(self) -> Tensor:
        """The base's: models ask a layer for the type of its weight."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for delta in self.deltas:
            y = delta(x, y)
        return y


def require_factorable(model: nn.Module, *, trained: bool = True) -> None:
    """Raises UserError E644 where a delta of `model` cannot be kept apart, or there is none.

    Not `trained`: links that only training knows pass, for they settle to one of FACTORS where they can at all.
    """
    there = list(chains(model))
    if not there:
        raise UserError("E644", "there is no delta to keep apart", "Tune by lora, dsee or another sparse method, or merge")
    mend = "Put a merge before export, and leave out merge: false"
    refused = (Mask, Offset, Mixed, Thinned)
    for path, layer, name in there:
        for link in chain(layer, name):
            wrong = not isinstance(link, FACTORS) if trained else isinstance(link, refused)
            if wrong or (isinstance(link, FACTORS) and name != "weight"):
                kind = link.kind if isinstance(link, Change) else type(link).__name__
                raise UserError("E644", f"a delta of kind '{kind}' on {path}.{name} is no product of its own", mend)
        if inserts_of(layer):
            raise UserError("E644", f"an adapter stands behind {path}, whose delta is to be apart", mend)


def factor_all(model: nn.Module) -> nn.Module:
    """Put a `FactoredLinear` in the place of every layer with a chain and return the model. Raises UserError E644."""
    require_factorable(model)
    for path, layer, name in list(chains(model)):
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, FactoredLinear(layer, detach(layer, name)))
    return model


def factored(model: nn.Module) -> Iterator[tuple[str, FactoredLinear]]:
    """(path, layer) of what `factor_all` made."""
    yield from ((path, module) for path, module in model.named_modules() if isinstance(module, FactoredLinear))


def factors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the deltas of a factored model are, by the names that an exported graph gives them: A (in, rank),
    B (rank, out), values (|Ω|,). The places of Ω are part of the graph."""
    return {
        f"{path}.{name}": one
        for path, layer in factored(model)
        for name, one in layer.named_parameters()
        if name[:5] != "base."
    }


@dataclass(frozen=True)
class Apart:
    """What deltas cost beside a merged model: scalars, and multiply-adds for one token."""

    parameters: int
    macs: int


def apart_of(model: nn.Module) -> Apart:
    """Counted on a model whose deltas are still in their chains: r (m + n) each low-rank one, |Ω| each sparse one."""
    size = 0
    for _, layer, name in chains(model):
        for link in chain(layer, name):
            size += link.A.numel() + link.B.numel() if isinstance(link, LowRank) else link.values.numel()
    return Apart(size, size)
