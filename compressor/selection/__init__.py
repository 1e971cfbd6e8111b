"""Choosing Ω: a score for every weight, then exactly N places per matrix.

A new score is a function (weight, seed) -> scores in `SCORES`; RPCA's lives in rpca.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.errors import UserError


def _rpca(weight: Tensor, seed: int) -> Tensor:
    from compressor.selection.rpca import sparse_residual

    return sparse_residual(weight, seed=seed).abs()


def _magnitude(weight: Tensor, seed: int) -> Tensor:
    return weight.abs()


def _pafi(weight: Tensor, seed: int) -> Tensor:
    """The smallest |θ| first (Liao et al. 2023). In float64, where no two magnitudes of float32 share a reciprocal."""
    return weight.double().abs().reciprocal()


def _random(weight: Tensor, seed: int) -> Tensor:
    # + 1: a uniform draw may be exactly 0, which would read as "not a candidate"
    return torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) + 1.0


SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rpca": _rpca,
    "magnitude": _magnitude,
    "pafi": _pafi,
    "random": _random,
}


def choose(scores: Tensor, count: int) -> Tensor:
    """The `count` places with the highest scores, as sorted flat int32 indices; equal scores go to the lowest index.

    `scores` is (out, in), 0 where a place is no candidate. Raises UserError E401 when fewer than `count` candidates exist
    (the papers' code then silently selects every weight).
    """
    flat = scores.flatten()
    candidates = int((flat > 0).sum())
    if candidates < count:
        raise UserError(
            "E401",
            f"only {candidates} of {flat.numel()} places of a {tuple(scores.shape)} matrix have a score, {count} were asked",
            "Ask for a smaller select.count",
        )
    # a stable sort gives equal scores in index order, which topk does not promise
    order = torch.sort(flat, descending=True, stable=True).indices
    return torch.sort(order[:count]).values.to(torch.int32)


def select(weight: Tensor, score: str, count: int, seed: int) -> Tensor:
    """Ω of one matrix (out, in): `count` sorted flat int32 indices. Raises UserError E401."""
    return choose(SCORES[score](weight.detach().float(), seed), count)
