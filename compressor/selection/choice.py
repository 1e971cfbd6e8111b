"""Choosing the support Ω: a score for every weight, then exactly N entries of each matrix, each layer or the whole model.

A new score is a row in score_names.py, and what it computes: of the weights a function (weight, seed) -> scores in
`WEIGHT_SCORES`, of the gradients one in gradients.py. score_names.py and RPCA's settings.py do not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from compressor.account import Places
from compressor.arguments import require_one_of
from compressor.deltas.sources import top_mask
from compressor.errors import UserError
from compressor.selection.finite import LARGEST_WEIGHT, require_finite, require_ranks
from compressor.selection.rpca import sparse_residual
from compressor.selection.settings import SettingName


def _rpca(weight: Tensor, seed: int, setting: SettingName = "default", rank: int | None = None) -> Tensor:
    return sparse_residual(weight, seed=seed, setting=setting, rank=rank).abs()


def _magnitude(weight: Tensor, seed: int) -> Tensor:
    return weight.abs()


def _pafi(weight: Tensor, seed: int) -> Tensor:
    """Score that prefers the smallest |θ| (Liao et al. 2023). In float64, where float32 values have distinct reciprocals."""
    return weight.double().abs().reciprocal()


def _random(weight: Tensor, seed: int) -> Tensor:
    # + 1: a uniform draw may be exactly 0, which would read as "not a candidate"
    return torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) + 1.0


WEIGHT_SCORES: dict[str, Callable[..., Tensor]] = {
    "rpca": _rpca,
    "magnitude": _magnitude,
    "pafi": _pafi,
    "random": _random,
}


def choose_places(scores: Sequence[Tensor], count: int, where: str = "the model") -> list[Tensor]:
    """The `count` entries with the highest scores over all of `scores`, as sorted flat int32 indices into each of them.

    A score of 0 excludes an entry. Equal scores go to the lowest index of the first tensor. `where` names the scope in an
    error. Raises UserError E401 when fewer than `count` candidates exist (the papers' code then silently
    selects every weight), E409 for scores that are NaN.
    """
    flat = torch.cat([score.flatten() for score in scores])
    require_ranks(flat, f"the scores of {where}")
    candidates = int((flat > 0).sum())
    if candidates < count:
        short = f"only {candidates} of {flat.numel()} positions have a score"
        fix = "Ask for a smaller select.count or select.ratio, or name another score"
        if not candidates:
            short = f"nothing to choose, as all {flat.numel()} scores are 0"
            fix = "Name another score, a wider select.scope, or other select.modules"
        raise UserError("E401", f"{where}: {short}, {count} were requested", fix)
    chosen = top_mask(flat, count).split([score.numel() for score in scores])
    return [mask.nonzero().flatten().to(torch.int32) for mask in chosen]


def choose_all(scores: Mapping[str, Tensor], layer_of: Mapping[str, int], places: Places) -> dict[str, Tensor]:
    """Ω of every matrix: `scores` by the matrix's path, in the order of the model; `layer_of` is the layer of each matrix.

    The budget holds exactly in each scope of `places`; a matrix may get nothing if the scope is larger than it. Raises
    UserError E401 and E409 that name the matrix or the layer.
    """
    for path, score in scores.items():
        require_ranks(score, f"the scores of {path}")
    scope_of = {"matrix": lambda path: path, "layer": layer_of.__getitem__, "global": lambda path: None}[places.scope]
    named = {"matrix": str, "layer": "layer {}".format, "global": lambda scope: "the model"}[places.scope]
    omega = {}
    for scope, group in groupby(scores, scope_of):
        paths = list(group)
        tensors = [scores[path] for path in paths]
        count = places.of(sum(tensor.numel() for tensor in tensors))
        omega |= dict(zip(paths, choose_places(tensors, count, named(scope)), strict=True))
    return omega


def weight_score(weight: Tensor, score: str, seed: int, *, path: str = "this matrix", **settings) -> Tensor:
    """Scores of one matrix (out, in) from its weights alone; `settings` are the options of the score.

    Raises UserError E409, which names `path`, if a weight is not finite, or implausibly large, or a score is NaN; ValueError
    for another score.
    """
    require_one_of("score", score, WEIGHT_SCORES)
    require_finite(weight, f"score {score}: the weights of {path}", most=LARGEST_WEIGHT)
    scores = WEIGHT_SCORES[score](weight.detach().float(), seed, **settings)
    require_ranks(scores, f"score {score}: the scores of {path}")
    return scores
