"""Refit of outgoing matrices after pruning: ridge regression on what the unpruned model computes at the same place.

Sublayer by sublayer, in the order of the computation, the matrix and the bias that write a sublayer's output are fitted so
that the hidden states are again those of the unpruned model (docs/pruning.md has the formulas). It needs no labels and no
gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from compressor.arguments import require_number
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import attach, chains, detach, merged_copy, original
from compressor.models.anatomy import Layer, Matrix, layers_of
from compressor.models.modules import STRUCTURES
from compressor.pruning.block_passes import BlockPasses, Inputs, outgoing_of, require_finite, streams_of
from compressor.pruning.surgery import kept_of

if TYPE_CHECKING:
    from compressor.account import Plan

RIDGE = 0.01
"""Weight of ‖ΔW‖² relative to the mean diagonal of XᵀX."""

FACTORIZED = 5
"""Estimated time of a FLOP of a factorization in float64, relative to one of a product in float32."""

ROUNDING = 64
"""A sublayer whose relative error (of norms) is at most this many rounding errors is left as it is."""


@dataclass(frozen=True)
class Refitted:
    """Squared error of one sublayer's output over the calibration tokens, relative to the target's square: before and after."""

    block: str
    structure: str
    before: float
    after: float


class Moments:
    """Sums over tokens, in float64, of the inputs X (T, in) of an outgoing matrix and what its output lacks, R (T, out)."""

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count = 0
        self.gram, self.cross = zeros(inputs, inputs), zeros(inputs, outputs)  # XᵀX, XᵀR
        self.inputs, self.lacking = zeros(inputs), zeros(outputs)  # Σx, Σr
        self.error, self.power = zeros(()), zeros(())  # Σ‖r‖², Σ‖target‖²

    def add(self, inputs: Tensor, target: Tensor, output: Tensor) -> None:
        """Add the tokens of one batch."""
        x, lacking = inputs.double(), target.double() - output.double()
        self.count += len(x)
        self.gram += x.T @ x
        self.cross += x.T @ lacking
        self.inputs += x.sum(0)
        self.lacking += lacking.sum(0)
        self.error += lacking.square().sum()
        self.power += target.double().square().sum()

    def solve(self, ridge: float, *, bias: bool, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ΔW (out, in) and Δb (out,) of least Σ‖r - ΔW x - Δb‖² + λ‖ΔW‖², zero outside `keep` (out, in); Δb = 0 without `bias`.

        λ is `ridge` times the mean of the diagonal of XᵀX.
        """
        gram, cross = self.gram, self.cross
        if bias:  # with the best bias for every ΔW, the problem is that of centred X and R
            gram = gram - torch.outer(self.inputs, self.inputs) / self.count
            cross = cross - torch.outer(self.inputs, self.lacking) / self.count
        change = torch.zeros_like(cross.T)
        penalty = ridge * self.gram.diagonal().mean() if len(gram) else 0.0
        if penalty > 0:
            system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            change = _solve(system, cross).T if keep is None else _solve_within(system, cross, keep)
        offset = (self.lacking - change @ self.inputs) / self.count if bias else torch.zeros_like(self.lacking)
        return change, offset

    def error_with(self, change: Tensor, offset: Tensor) -> Tensor:
        """Σ‖r - ΔW x - Δb‖²."""
        fitted = (change @ self.gram * change).sum() + self.count * offset.square().sum() + 2 * offset @ (change @ self.inputs)
        return (self.error - 2 * (change * self.cross.T).sum() - 2 * offset @ self.lacking + fitted).clamp_min(0)


def _solve(system: Tensor, cross: Tensor) -> Tensor:
    return torch.cholesky_solve(cross, torch.linalg.cholesky(system))


def _solve_within(system: Tensor, cross: Tensor, keep: Tensor) -> Tensor:
    """The solution (out, in) in which each row has only its kept entries.

    Each row has a matrix of its own to factorize: the system at its kept entries or, where fewer are hidden, its inverse at
    these, which gives the multipliers that hold them at zero.
    """
    keep = keep.to(system.device)
    few = 2 * keep.sum(dim=1, keepdim=True) <= keep.shape[1]
    change = _solve_rows(system, cross.T, keep & few)
    if not few.all():
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(system))
        free = (inverse @ cross).T
        multipliers = _solve_rows(inverse, free, ~keep & ~few)
        change = torch.where(few, change, (free - multipliers @ inverse).masked_fill(~keep, 0))
    return change


def _solve_rows(system: Tensor, right: Tensor, chosen: Tensor) -> Tensor:
    """For each row of `right` (out, in) the solution of the equations of its `chosen` places in these unknowns alone."""
    solution = torch.zeros_like(right)
    for row, places in enumerate(chosen):
        at = places.nonzero().flatten()
        if len(at):
            solution[row, at] = _solve(system[at[:, None], at], right[row, at, None]).flatten()
    return solution


@dataclass(frozen=True)
class _Outlet:
    """What writes a sublayer's output: its layer, and the matrix in it unless the sublayer is empty."""

    owner: nn.Module
    matrix: Matrix | None

    @classmethod
    def of(cls, layer: Layer, structure: str) -> _Outlet:
        name = STRUCTURES[structure].columns
        return cls(outgoing_of(layer, structure), layer.matrix(name) if name in layer.parts else None)

    @property
    def has_bias(self) -> bool:
        return original(self.owner, "bias") is not None

    @property
    def keep(self) -> Tensor | None:
        """Where ΔW may be other than zero: what no mask hides, neither of W + ΔW nor of W alone."""
        masks = [mask.keep for mask in (self.matrix.mask, self.matrix.weight_mask) if mask] if self.matrix else []
        return torch.stack(masks).all(0) if masks else None

    def moments(self) -> Moments:
        like = self.matrix.original if self.matrix else original(self.owner, "bias")
        return Moments(like.shape[1] if self.matrix else 0, like.shape[0], like.device)

    def zeros(self) -> tuple[Tensor | None, Tensor | None]:
        """ΔW and Δb of 0; None for one that it does not have."""
        return (
            torch.zeros_like(self.matrix.original) if self.matrix else None,
            torch.zeros_like(original(self.owner, "bias")) if self.has_bias else None,
        )

    def attach(self, change: Tensor | None, offset: Tensor | None, group: str) -> None:
        """Attach ΔW and Δb; None for one that it does not have."""
        if self.matrix is not None:
            self.matrix.attach(Refit(change.to(self.matrix.original.dtype).contiguous(), group))
        if self.has_bias:
            attach(self.owner, Refit(offset.to(original(self.owner, "bias").dtype), group), "bias")

    @torch.no_grad()
    def copy_to(self, other: _Outlet) -> None:
        """Write the current matrix and bias into a merged model's."""
        if self.matrix is not None:
            other.matrix.weight.copy_(self.matrix.weight)
        if self.has_bias:
            other.owner.bias.copy_(self.owner.bias)


def groups_of(model: nn.Module) -> set[str]:
    """The groups of the refits attached to a model; each refit has its own."""
    return {module.group for module in model.modules() if isinstance(module, Refit)}


def _new_group(model: nn.Module) -> str:
    taken = groups_of(model)
    return next(name for number in itertools.count(1) if (name := f"refit-{number}") not in taken)


def unfitted(model: nn.Module, groups: Collection[str]) -> nn.Module:
    """Remove the refits of `groups` from their chains, in place, and return the model."""
    for _, owner, name in list(chains(model)):
        for link in detach(owner, name):
            if not (isinstance(link, Refit) and link.group in groups):
                attach(owner, link, name, check=False)
    return model


def passes(model: nn.Module) -> int:
    """How often `refit` goes over the rows: once for each sublayer."""
    return sum(len(layer.structures) for layer in layers_of(model))


def flops_under_masks(plan: Plan) -> float:
    """Estimated work of the solutions under the masks of a plan, in FLOPs of products in float32."""
    shares, outgoing = {}, {span.columns for span in STRUCTURES.values()}
    for masked in plan.sparsity:
        for name in outgoing.intersection(masked.modules):
            shares[name] = max(shares.get(name, 0), masked.hidden / masked.entries)
    work = 0
    for name, rows, columns in plan.shape.matrices(tuple(shares)):
        fewer = min(shares[name], 1 - shares[name]) * columns
        work += columns**3 + rows * fewer**3 / 3
    return FACTORIZED * work


def announce(model: nn.Module) -> None:
    """Attach to a weightless (meta) model the links that a refit would attach, so that later stages meet them."""
    group = _new_group(model)
    for layer in layers_of(model):
        for structure in layer.structures:
            outlet = _Outlet.of(layer, structure)
            outlet.attach(*outlet.zeros(), group)


def refit(
    dense: nn.Module,
    model: nn.Module,
    batches: Sequence[Inputs],
    on_batch: Callable[[int], None] = lambda rows: None,
    *,
    ridge: float = RIDGE,
) -> list[Refitted]:
    """Attach to `model`, in place, a `Refit` on every outgoing matrix and bias whose output differs from that in `dense`.

    `dense` is the model before the removal, merged; it is not changed. Both are in eval mode afterwards. `batches` are
    encodings with an attention_mask; `on_batch` is told the rows of each batch at each sublayer. Raises UserError E521 where
    a hidden state is not finite, ValueError for a `ridge` that is not positive.
    """
    require_number("ridge", ridge, 0, above=True)
    pruned, group = merged_copy(model.eval()), _new_group(model)
    before, after, numbers, results = BlockPasses(dense, batches), BlockPasses(pruned, batches), _numbers(dense, model), []
    for place, layer in enumerate(layers_of(model)):
        streams = streams_of(dense, numbers[place], batches[-1])
        for structure in layer.structures:
            outlet = _Outlet.of(layer, structure)
            if outlet.matrix is None and not outlet.has_bias:  # an empty sublayer of an architecture without biases
                on_batch(sum(len(inputs["input_ids"]) for inputs in batches))
                continue
            moments, stream = outlet.moments(), streams[structure]
            with before.at(numbers[place], structure, stream) as expected, after.at(place, structure, stream) as computed:
                for number, inputs in enumerate(batches):
                    theirs, ours = expected(number), computed(number)
                    target = theirs.output + (theirs.stream - ours.stream)
                    moments.add(ours.inputs if outlet.matrix else ours.inputs[:, :0], target, ours.output)
                    on_batch(len(inputs["input_ids"]))
            results.append(Refitted(layer.path, structure, *_fit(outlet, moments, ridge, group)))
            outlet.copy_to(_Outlet.of(after.layers[place], structure))
    return results


def _fit(outlet: _Outlet, moments: Moments, ridge: float, group: str) -> tuple[float, float]:
    """Attach the solution, unless the error is one of rounding; returns the relative errors before and after."""
    require_finite("hidden states", moments.error, moments.gram)
    rounding = ROUNDING * torch.finfo(original(outlet.owner, "weight" if outlet.matrix else "bias").dtype).eps
    unit = moments.power.clamp_min(torch.finfo(torch.float64).tiny)
    if moments.error <= rounding**2 * moments.power:
        return (float(moments.error / unit),) * 2
    change, offset = moments.solve(ridge, bias=outlet.has_bias, keep=outlet.keep)
    outlet.attach(change, offset, group)
    return float(moments.error / unit), float(moments.error_with(change, offset) / unit)


def _numbers(dense: nn.Module, model: nn.Module) -> list[int]:
    """For each block of `model` the index of the same block in `dense`."""
    blocks = list(kept_of(dense)) or [str(number) for number in range(len(layers_of(dense)))]
    return [blocks.index(number) for number in list(kept_of(model)) or blocks]
