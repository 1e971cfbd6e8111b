"""Trainable changes of frozen weights, as parametrizations: W -> W + ΔW -> M ⊙ (W + ΔW).

A delta is a module whose forward takes a weight and returns a weight of the same shape. Deltas chain on `layer.weight`
in the order of `attach`; a mask closes the chain. Merging keeps the computed weight and drops the chain.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Delta(nn.Module):
    """One link W -> W + ΔW. `group` names the stage that made it, so that a later stage can train its own links alone."""

    kind: str
    group: str = ""

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Delta:
        """The same change for a weight of `shape` (out, in) that keeps `rows` and `columns` only (sorted int64)."""
        raise NotImplementedError

    def settings(self) -> dict:
        """What, beside the tensors, rebuilds this link (JSON)."""
        return {"kind": self.kind, "group": self.group}


class LowRank(Delta):
    """W + (alpha / rank) · B A, the low-rank update ΔW_l of DSEE section 3.2 (and of LoRA).

    A is (rank, in), drawn from N(0, 0.02²); B is (out, rank), zero, so ΔW starts at 0 (DSEE algorithm 2).
    """

    kind = "low_rank"

    def __init__(self, A: Tensor, B: Tensor, scale: float, group: str = ""):
        super().__init__()
        self.A, self.B, self.scale, self.group = nn.Parameter(A), nn.Parameter(B), scale, group

    @classmethod
    def start(cls, weight: Tensor, rank: int, alpha: float, group: str = "") -> LowRank:
        """A fresh link for `weight` (out, in)."""
        out_features, in_features = weight.shape
        A = torch.empty(rank, in_features, dtype=weight.dtype, device=weight.device).normal_(std=0.02)
        return cls(A, weight.new_zeros(out_features, rank), alpha / rank, group)

    def forward(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.B, self.A, alpha=self.scale)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> LowRank:
        return LowRank(self.A.detach()[:, columns].clone(), self.B.detach()[rows].clone(), self.scale, self.group)

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

    def forward(self, weight: Tensor) -> Tensor:
        # index_add on the flat view, not `+ dense zeros`: adding 0.0 would turn -0.0 into 0.0 outside Ω
        return weight.flatten().index_add(0, self.omega, self.values).view_as(weight)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Sparse:
        width = shape[1]
        row, column = self.omega.long() // width, self.omega.long() % width
        kept = torch.isin(row, rows) & torch.isin(column, columns)
        new_row, new_column = torch.searchsorted(rows, row[kept]), torch.searchsorted(columns, column[kept])
        return Sparse(new_row * len(columns) + new_column, self.values.detach()[kept].clone(), self.group)


class Mask(nn.Module):
    """M ⊙ W. Covers W + ΔW, so what training sees is what merging keeps. `keep` (out, in) is boolean."""

    def __init__(self, keep: Tensor):
        super().__init__()
        self.register_buffer("keep", keep)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.keep


KINDS = {cls.kind: cls for cls in (LowRank, Sparse)}
"""Every stored kind of delta. A new kind is a class above and a word here."""


def tensors_of(link: Delta) -> dict[str, Tensor]:
    """The tensors of a link as stored: its state dict, detached and contiguous."""
    return {name: tensor.detach().contiguous() for name, tensor in link.state_dict().items()}


def rebuild(settings: dict, tensors: dict[str, Tensor]) -> Delta:
    """The link that `settings()` and `tensors_of` described."""
    arguments = {name: value for name, value in settings.items() if name != "kind"}
    return KINDS[settings["kind"]](**tensors, **arguments)


def chain(layer: nn.Module) -> list[nn.Module]:
    """The parametrizations of `layer.weight`, first applied first; empty when there are none."""
    return list(layer.parametrizations.weight) if parametrize.is_parametrized(layer, "weight") else []


def original_weight(layer: nn.Module) -> Tensor:
    """The frozen weight (out, in) at the start of the chain."""
    return layer.parametrizations.weight.original if chain(layer) else layer.weight


def attach(layer: nn.Module, module: nn.Module) -> None:
    """Append a delta or a mask to the chain of `layer.weight` and freeze the original weight.

    Raises ValueError when a delta would follow a mask: it would escape it.
    """
    if not isinstance(module, Mask) and any(isinstance(link, Mask) for link in chain(layer)):
        raise ValueError(f"cannot attach {type(module).__name__} behind a mask")
    parametrize.register_parametrization(layer, "weight", module)
    layer.parametrizations.weight.original.requires_grad_(False)


@torch.no_grad()
def delta_of(layer: nn.Module) -> Tensor:
    """ΔW as the merged layer would have it, masks left out: (out, in), zero where nothing is attached."""
    original = original_weight(layer)
    changed = original
    for link in chain(layer):
        if not isinstance(link, Mask):
            changed = link(changed)
    return changed - original


def merge(layer: nn.Module) -> None:
    """Keep the computed weight, drop the chain. Bit-exact."""
    if chain(layer):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        layer.weight = nn.Parameter(layer.weight.detach())


def detach(layer: nn.Module) -> list[nn.Module]:
    """Take the whole chain off and give it back; the weight is the original again, bit for bit."""
    links = chain(layer)
    if links:
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    return links


def parametrized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer for every layer of `model` that carries a chain."""
    return {name: module for name, module in model.named_modules() if parametrize.is_parametrized(module, "weight")}


def merge_all(model: nn.Module) -> nn.Module:
    """Merge every chain of `model` in place and return it."""
    for layer in parametrized_layers(model).values():
        merge(layer)
    return model


@torch.no_grad()
def merged_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with every chain merged; the model keeps its chains.

    Never `deepcopy` and then merge: both copies share the class that torch made for a parametrized layer, and merging
    one takes the `weight` property from the other.
    """
    result = copy.deepcopy(model)
    for path, layer in parametrized_layers(model).items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(layer.weight.detach().clone())
        if layer.bias is not None:
            plain.bias = nn.Parameter(layer.bias.detach().clone())
        result.set_submodule(path, plain)
    return result.train(model.training)
