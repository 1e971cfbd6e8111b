"""Dense deltas with a special form of training: mixed with the base (mixout), gated (diff pruning), thinned (Child-Tuning),
or reduced to the largest entries after every step (ChildPruning).

They exist only during training; the plain link returned by `settled` is stored, merged and pruned. Random numbers are drawn
once a step from a seed of that step: micro-batches and processes use the same draw, and a resumed training repeats the draws
of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from compressor.deltas.burn_in import burn_in_fault, renewal_fault
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import Delta
from compressor.deltas.sources import top_mask
from compressor.errors import UserError


class Dense(Delta):
    """W + ΔW with one trainable scalar per entry of W (out, in), initialized to 0."""

    seed: int | None = None
    """Seed of this step's draw; None: torch's own random state."""

    def __init__(self, weight: Tensor, group: str = ""):
        super().__init__()
        self.values, self.group = nn.Parameter(weight.new_zeros(weight.shape)), group

    def uniform(self, *shape: int) -> Tensor:
        """Noise from U(0, 1) of a shape, by default (out, in); all calls within one step return the same values."""
        like = self.values
        generator = None if self.seed is None else torch.Generator(like.device).manual_seed(self.seed)
        return torch.rand(shape or like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def effect(self) -> Tensor:
        """ΔW (out, in) without randomness."""
        return self.values

    def penalty(self) -> Tensor | float:
        """The link's regularization term in the loss."""
        return 0.0

    def thin(self) -> None:
        """Modify the gradient after clipping and before the optimizer's step."""

    def settled(self) -> Delta:
        return self._placed(Offset(self.effect().detach().clone(), self.group))

    def _placed(self, link: Delta) -> Delta:
        link.place = self.place
        return link


class Mixed(Dense):
    """θ0 + Δ ⊙ m / (1 - p): each input column keeps its pretrained values with probability p (mixout, Lee et al. 2020).

    One m in {0, 1} for each of the `in` columns, as in dropout of input neurons. The division preserves the mean: E[W] = θ0 +
    Δ.
    """

    kind = "mixed"

    def __init__(self, weight: Tensor, mixout: float, group: str):
        super().__init__(weight, group)
        self.mixout = mixout

    def change(self, weight: Tensor) -> Tensor:
        if not self.training or not self.mixout:
            return weight + self.values
        learned = self.uniform(self.values.shape[1]) >= self.mixout
        return weight + self.values * (learned.to(weight) / (1 - self.mixout))


class Thinned(Dense):
    """W + ΔW; each step keeps each gradient element with probability `reserve` (Child-Tuning-F, Xu et al. 2021, section 2.2).

    Kept elements are divided by `reserve`, which preserves the mean of the gradient.
    """

    kind = "thinned"

    def __init__(self, weight: Tensor, reserve: float, group: str):
        super().__init__(weight, group)
        self.reserve = reserve

    def change(self, weight: Tensor) -> Tensor:
        return weight + self.values

    def thin(self) -> None:
        if self.values.grad is not None:
            self.values.grad *= (self.uniform() < self.reserve).to(self.values) / self.reserve


LOW, HIGH = -1.5, 1.5
"""Ends of the stretched gate before it is clamped to [0, 1], l and r of Guo et al. 2021."""

OPEN = 5.0
"""Initial α of a gate: almost fully open."""


def hard_concrete(alpha: Tensor, uniform: Tensor | None = None) -> Tensor:
    """Gates z in [0, 1] of log-odds α, any shape, with noise U(0, 1) or without (Guo et al. 2021, section 3.1)."""
    noisy = alpha if uniform is None else alpha + torch.log(uniform) - torch.log1p(-uniform)
    return (torch.sigmoid(noisy) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def expected_open(alpha: Tensor) -> Tensor:
    """P(z > 0) of each gate; the sum over all gates is the expected L0 norm (Guo et al. 2021, section 3.1)."""
    return torch.sigmoid(alpha - math.log(-LOW / HIGH))


class Projected(Dense):
    """W + ΔW of which `project` keeps the `budget` largest entries over all links of the model together, from then on fixed.

    That is after `burn_in` steps, by default half of the training; before it, `renew` steps apart, `reset` returns all but the
    `budget` largest entries to W, and every entry goes on (ChildPruning, Fu et al. 2023, section 5: after each step).
    """

    kind = "projected"
    settles_factorable = True
    moving = ("kept", "projected")

    def __init__(self, weight: Tensor, budget: int, group: str = "", *, burn_in: int | None = None, renew: int | None = None):
        super().__init__(weight, group)
        self.budget, self.burn_in, self.renew = budget, burn_in, renew
        self.register_buffer("kept", torch.ones_like(self.values, dtype=torch.bool))
        # not on the device of the values: it is also read on a weightless (meta) model
        self.register_buffer("projected", torch.zeros((), dtype=torch.bool))

    def change(self, weight: Tensor) -> Tensor:
        if self.projected:  # selected, not added as 0: outside Ω even the sign of a zero is preserved, and there is no gradient
            return torch.where(self.kept, weight + self.values, weight)
        return weight + self.before()

    def before(self) -> Tensor:
        """ΔW (out, in) of a step before the projection."""
        return self.values

    def effect(self) -> Tensor:
        return self.values * self.kept if self.projected else self.values

    def settled(self) -> Delta:
        if not self.projected:
            return super().settled()
        omega = self.kept.flatten().nonzero().flatten()
        return self._placed(Sparse(omega, self.values.detach().flatten()[omega].clone(), self.group))


class Gated(Projected):
    """W + z ⊙ w with a gate z for every entry, learned first, then fixed by `project` (diff pruning, Guo et al. 2021).

    The expected number of open gates costs `sparsity` λ each. With `grouped` the whole matrix has a gate, too, and z is the
    product of both (section 3.3).
    """

    kind = "gated"

    def __init__(self, weight: Tensor, budget: int, sparsity: float, group: str = "", *, grouped: bool = False, **schedule):
        super().__init__(weight, budget, group, **schedule)
        self.alpha = nn.Parameter(torch.full_like(self.values, OPEN))
        self.alpha_of_matrix = nn.Parameter(self.values.new_full((1,), OPEN)) if grouped else None
        self.sparsity = sparsity

    @property
    def alphas(self) -> list[nn.Parameter]:
        """The parameters of all gates."""
        return [self.alpha] if self.alpha_of_matrix is None else [self.alpha, self.alpha_of_matrix]

    def gates(self, noisy: bool) -> Tensor:
        """z (out, in), with this step's noise or without."""
        if self.alpha_of_matrix is None:
            return hard_concrete(self.alpha, self.uniform() if noisy else None)
        size = self.alpha.numel()
        single, whole = self.uniform(size + 1).split([size, 1]) if noisy else (None, None)
        single = None if single is None else single.view_as(self.alpha)
        return hard_concrete(self.alpha, single) * hard_concrete(self.alpha_of_matrix, whole)

    def before(self) -> Tensor:
        return self.gates(self.training) * self.values

    def effect(self) -> Tensor:
        return super().effect() if self.projected else self.gates(False) * self.values

    def penalty(self) -> Tensor | float:
        if self.projected:
            return 0.0
        penalty = self.sparsity * expected_open(self.alpha).sum()
        return penalty if self.alpha_of_matrix is None else penalty * expected_open(self.alpha_of_matrix)[0]


@torch.no_grad()
def largest(links: Sequence[Projected]) -> list[Tensor]:
    """Masks (out, in) of the `budget` entries with the largest |ΔW| over all `links`.

    Equal magnitudes: the lowest index of the first link (Guo et al. 2021, section 3.2).
    """
    effects = [link.effect().abs() for link in links]
    flat = top_mask(torch.cat([effect.flatten() for effect in effects]), links[0].budget)
    parts = flat.split([effect.numel() for effect in effects])
    return [part.view_as(effect) for part, effect in zip(parts, effects, strict=True)]


@torch.no_grad()
def reset(links: Sequence[Projected]) -> None:
    """Return all entries but the `largest` to W; all are trained further."""
    for link, mask in zip(links, largest(links), strict=True):
        link.values.mul_(mask)


@torch.no_grad()
def project(links: Sequence[Projected]) -> None:
    """Keep the `largest` entries, at their value; all others return to W. From then on gates and positions are fixed."""
    for link, mask in zip(links, largest(links), strict=True):
        link.values.copy_(link.effect() * mask)
        link.kept.copy_(mask)
        link.projected.fill_(True)


def dense_links(model: nn.Module) -> list[Dense]:
    """Every dense link in training, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, Dense)]


def projected_of(links: Sequence[Dense]) -> list[Projected]:
    """The links that are reduced to their largest entries during the training."""
    return [link for link in links if isinstance(link, Projected)]


def fixed_after(links: Sequence[Dense], steps: int) -> int:
    """The step after which positions are fixed in a training of `steps`. Raises UserError E413 for one that is not in it, and
    for a `renew` that never comes before it."""
    burn_in, renew = next(((link.burn_in, link.renew) for link in projected_of(links)), (None, None))
    first = steps // 2 if burn_in is None else burn_in
    if fault := burn_in_fault(burn_in, steps) or renewal_fault(renew, first):
        raise UserError("E413", *fault)
    return first


def require_moved(links: Sequence[Projected], steps: int) -> None:
    """Raise UserError E413 if no entry has changed in the first `steps`: the largest ones would be any."""
    if not any(link.effect().any() for link in links):
        what = f"positions are fixed after step {steps:,}, before any entry has changed (a warm-up begins at a rate of 0)"
        raise UserError("E413", what, "Train longer, or raise burn_in")


def gates_of(links: Sequence[Dense]) -> list[Gated]:
    """The links that have gates."""
    return [link for link in links if isinstance(link, Gated)]


def reseed(links: Sequence[Dense], seed: int, step: int) -> None:
    """Give every link a separate random seed for `step`."""
    seeds = np.random.SeedSequence((seed, step)).generate_state(len(links))
    for link, link_seed in zip(links, seeds.tolist(), strict=True):
        link.seed = link_seed
