"""Robust PCA by greedy bilateral smoothing (GreBsmo, Zhou & Tao 2013), as DSEE section 3.2 uses it: W ≈ U V + S.

U V is low-rank and grown in steps; S is sparse; the places of S's largest entries are where DSEE puts its sparse update.
The papers' code runs to rank 496 without a convergence test, where S is noise; this one stops at a small rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decomposition:
    """U (out, rank) with orthonormal columns, V (rank, in), S (out, in) sparse; `objective` after every inner iteration."""

    U: Tensor
    V: Tensor
    S: Tensor
    objective: list[float]


def decompose(
    weight: Tensor,
    *,
    rank: int = 16,
    rank_step: int = 5,
    threshold: float = 0.01,
    iterations: int = 20,
    tol: float = 1e-3,
    seed: int = 0,
) -> Decomposition:
    """min ½‖W - U V - S‖² + (λ²/2)‖S‖₀ with λ = `threshold`: its exact S step is the hard threshold at λ (DSEE eq. 2).

    `weight` is (out, in). The rank starts at 1 and grows by `rank_step` directions of the residual up to `rank`; at each
    rank U, V, S are updated in turn (Q of QR, least squares, hard threshold) until the objective falls by less than
    `tol` of itself or `iterations` are done. The objective never rises within one rank. `seed` draws the first V.
    """
    rank = min(rank, *weight.shape)
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(1, weight.shape[1], generator=generator, dtype=weight.dtype)
    S = torch.zeros_like(weight)
    history: list[float] = []
    while True:
        before = float("inf")
        for _ in range(iterations):
            U = torch.linalg.qr((weight - S) @ V.T).Q
            V = U.T @ (weight - S)
            residual = weight - U @ V
            S = torch.where(residual.abs() >= threshold, residual, 0.0)
            error = residual - S
            objective = 0.5 * float(error.square().sum()) + 0.5 * threshold**2 * int(S.count_nonzero())
            history.append(objective)
            if before - objective <= tol * before:
                break
            before = objective
        if V.shape[0] >= rank:
            return Decomposition(U, V, S, history)
        # the first rows of R span where the remaining residual is largest (GreBsmo's growth step)
        grow = min(rank_step, rank - V.shape[0])
        V = torch.cat([V, torch.linalg.qr(residual).R[:grow]])


def sparse_residual(weight: Tensor, *, seed: int) -> Tensor:
    """S of `decompose` with its defaults: (out, in), zero where the low-rank part explains the weight to within λ."""
    return decompose(weight, seed=seed).S
