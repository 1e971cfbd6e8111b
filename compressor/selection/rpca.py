"""Robust PCA by greedy bilateral smoothing (GreBsmo, Zhou & Tao 2013), as DSEE section 3.2 uses it: W ≈ U V + S.

U V is low-rank and grown in steps; S is sparse; DSEE puts its sparse update at the positions of S's largest entries. DSEE's
code keeps λ at 0.01, below most weights, so S alone explains them and U V finds no low-rank part; and it runs to rank 496,
where U V is nearly the whole matrix and S arbitrary. By default λ falls to 0.01 and the rank stops at 16 (settings.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressor.selection.finite import LARGEST_WEIGHT, require_finite
from compressor.selection.settings import SETTINGS, Setting, SettingName

# a falling λ starts where only outliers pass and halves: what S holds from the start cannot enter the low-rank part
START_IN_RMS, FALL = 3.0, 0.5


@dataclass(frozen=True)
class Phase:
    """Iterations at one rank and one λ: `objective` after each of them, never rising."""

    rank: int
    threshold: float
    objective: list[float]


@dataclass(frozen=True)
class Decomposition:
    """U (out, rank) with orthonormal columns, V (rank, in), sparse S (out, in), and the phases that computed them."""

    U: Tensor
    V: Tensor
    S: Tensor
    phases: list[Phase]


def shrink(residual: Tensor, threshold: float, kind: str, *, out: Tensor | None = None) -> Tensor:
    """argmin over S of ½‖residual - S‖² + `penalty`(S), exact, entry by entry; any shape.

    hard: entries above λ stay as they are (DSEE eq. 2, which calls it soft and keeps |x| = λ: equally good). soft: all
    entries move by λ towards 0.
    """
    if kind == "hard":
        return torch.hardshrink(residual, threshold, out=out)
    return torch.sub(residual, residual.clamp(-threshold, threshold), out=out)


def penalty(S: Tensor, threshold: float, kind: str, *, scratch: Tensor | None = None) -> float:
    """(λ²/2)‖S‖₀ for hard, λ‖S‖₁ for soft. `scratch`, shaped like S, avoids an allocation."""
    if kind == "hard":
        return 0.5 * threshold**2 * float(torch.ne(S, 0, out=scratch).sum())
    return threshold * float(torch.abs(S, out=scratch).sum())


def schedule(weight: Tensor, setting: Setting) -> Iterator[tuple[int, float]]:
    """(rank, λ) of every phase for a weight (out, in), until the rank is `setting.rank`, or full, and λ is the smallest."""
    last_rank = min(setting.rank, *weight.shape)
    rank, threshold = 1, setting.threshold
    if setting.schedule == "falling":
        threshold = max(threshold, START_IN_RMS * float(weight.square().mean().sqrt()))
    yield rank, threshold
    while rank < last_rank or threshold > setting.threshold:
        rank, threshold = min(rank + setting.rank_step, last_rank), max(threshold * FALL, setting.threshold)
        yield rank, threshold


def settled(objective: list[float], tol: float) -> bool:
    return len(objective) > 1 and objective[-2] - objective[-1] <= tol * objective[-2]


@torch.no_grad()
def decompose(weight: Tensor, setting: Setting = SETTINGS["default"], *, seed: int = 0) -> Decomposition:
    """min ½‖W - U V - S‖² + penalty(S) over U V of rank `setting.rank` and S (DSEE section 3.2, eq. 2).

    `weight` is (out, in), float32 or float64; half precisions are computed in float32. The rank is at most its smaller side.
    In each phase of `schedule`, U (Q of a QR), V (least squares) and S (`shrink`) are updated in turn, so the objective never
    rises within a phase. One iteration is three products of out·in·rank and a thin QR: O(out·in·rank). `seed` draws the first
    V and its growth. Raises UserError E409 where a weight is not finite.
    """
    weight = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    require_finite(weight, "the weights", most=LARGEST_WEIGHT)
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=weight.dtype).to(weight.device)

    V, S, phases = draw(1, weight.shape[1]), torch.zeros_like(weight), []
    # all written in place: from 2048x2048 up, memory for a new matrix costs more than computing it
    target, error = torch.empty_like(weight), torch.empty_like(weight)
    for rank, threshold in schedule(weight, setting):
        if new := rank - len(V):
            # qr: the first rows of R in error = Q R need only the first columns of Q
            fresh = torch.linalg.qr(error[:, :new]).Q.T if setting.growth == "qr" else draw(new, len(weight))
            V = torch.cat([V, fresh @ error])
        if setting.restart:
            S.zero_()
        objective: list[float] = []
        while len(objective) < setting.iterations and not settled(objective, setting.tol):
            torch.sub(weight, S, out=target)
            U = torch.linalg.qr(target @ V.T).Q
            V = U.T @ target
            torch.addmm(weight, U, V, alpha=-1, out=error)
            shrink(error, threshold, setting.kind, out=S)
            error -= S
            fit = 0.5 * float(torch.linalg.vector_norm(error)) ** 2
            objective.append(fit + penalty(S, threshold, setting.kind, scratch=target))
        phases.append(Phase(rank, threshold, objective))
    return Decomposition(U, V, S, phases)


def sparse_residual(weight: Tensor, *, seed: int, setting: SettingName = "default", rank: int | None = None) -> Tensor:
    """S of `decompose`: (out, in), zero where the low-rank part explains the weight to within λ, everywhere at full rank.

    `rank` of that part, where it is not that of the setting.
    """
    named = SETTINGS[setting]
    return decompose(weight, named if rank is None else replace(named, rank=rank), seed=seed).S
