"""Deltas kept as separate operations beside their matrix: y = x Wᵀ + s (x Aᵀ) Bᵀ + x P_Ω(S)ᵀ, instead of one W + ΔW.

For an exported graph in which deltas stay separate from the base and can be exchanged. An exporter would fold a chain of
parametrizations into one matrix, but keeps these products. The cost is what merging saves: 2 (r (m + n) + |Ω|) FLOPs a token
and matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.deltas.inserts import inserts_of
from compressor.deltas.links import Delta, attach, chain, chains, detach, merge, original
from compressor.deltas.sources import TensorSource
from compressor.errors import UserError
from compressor.models.anatomy import layers_of


class FactoredLinear(nn.Module):
    """A linear layer (or Conv1D) whose deltas are computed as separate operations."""

    def __init__(self, base: nn.Module, links: list[Delta]):
        super().__init__()
        self.base = base
        widths = [link.place.read(base.weight).shape[1] for link in links]
        self.deltas = nn.ModuleList(link.factor(width) for link, width in zip(links, widths, strict=True))

    @property
    def weight(self) -> Tensor:
        """Weight of the base layer: models read a layer's dtype from it."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for delta in self.deltas:
            y = delta(x, y)
        return y


def require_factorable(model: nn.Module, *, trained: bool = True) -> None:
    """Raises UserError E644 if a delta of `model` cannot be kept separate from its matrix, or if there is none.

    Without `trained`, links used only in training are accepted if their stored form is such a product, and those on the tensors
    of a change: they are merged into these.
    """
    attached = [use for use in chains(model) if trained or not isinstance(use[1], TensorSource)]
    if not attached:
        raise UserError(
            "E644", "the model has no delta to keep separate", "Tune by lora, dsee or another sparse method, or merge"
        )
    fix = "Put a merge before export, and leave out merge: false"
    for path, layer, name in attached:
        linear = name == "weight" and isinstance(layer, nn.Linear | Conv1D)
        for link in chain(layer, name):
            # a mask of the weight alone is folded into the base
            apart = (link.factorable or link.first) and linear
            later = link.settles_factorable and linear and not trained
            if not (apart or later):
                raise UserError(
                    "E644", f"a delta of kind '{link.kind}' on {path}.{name} cannot be computed separately from its matrix", fix
                )
        if inserts_of(layer):
            raise UserError("E644", f"an adapter follows {path}, whose delta is to be kept separate", fix)


def factor_all(model: nn.Module) -> nn.Module:
    """Replace every layer that has a chain by a `FactoredLinear` and return the model. Raises UserError E644."""
    require_factorable(model)
    for path, layer, name in list(chains(model)):
        owner, _, leaf = path.rpartition(".")
        if links := fold_first(layer, name):
            setattr(model.get_submodule(owner), leaf, FactoredLinear(layer, links))
    return model


def fold_first(layer: nn.Module, name: str) -> list[Delta]:
    """Remove the chain, keeping in the tensor what its `first` links change; returns the others."""
    links = detach(layer, name)
    for link in links:
        if link.first:
            attach(layer, link, name, check=False)
    merge(layer, name)
    return [link for link in links if not link.first]


def factored(model: nn.Module) -> Iterator[tuple[str, FactoredLinear]]:
    """(path, layer) of every layer that `factor_all` replaced."""
    yield from ((path, module) for path, module in model.named_modules() if isinstance(module, FactoredLinear))


def factors_of(model: nn.Module) -> dict[str, Tensor]:
    """The delta tensors of a factored model, by the names that they have in an exported graph: A (in, rank),
    B (rank, out), values (|Ω|,). The indices of Ω are part of the graph."""
    return {
        f"{path}.{name}": parameter
        for path, layer in factored(model)
        for name, parameter in layer.named_parameters()
        if name[:5] != "base."
    }


def apart_of(model: nn.Module) -> int:
    """Cost of unmerged deltas on top of a merged model, scalars as well as multiply-adds for one token: r (m + n) for each
    low-rank link of `model`, |Ω| for each sparse one."""
    links = ((link, original(layer, name)) for _, layer, name in chains(model) for link in chain(layer, name))
    return sum(_scalars(link, stored) for link, stored in links if not link.first)


def delta_macs(model: nn.Module) -> int:
    """Multiply-adds for one token of the deltas on the blocks' linear layers, if each is a product of its own (`apart_of`).

    A value on an embedding, a norm or a bias is no multiply-add, and neither is a ΔW that would be a second whole matrix.
    """
    linears = {layer.linear(name) for layer in layers_of(model) for name in layer.names}
    return sum(_scalars(link, original(linear)) for linear in linears for link in chain(linear) if link.factorable)


def _scalars(link: Delta, stored: Tensor) -> int:
    return sum(parameter.numel() for parameter in link.factor(link.place.read(stored).shape[-1]).parameters())
