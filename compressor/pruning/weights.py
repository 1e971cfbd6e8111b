"""Unstructured and n:m pruning: scores of single weights, which of them to mask, and how many a model has left.

Shapes do not change: a mask over W + ΔW keeps them at zero until merging writes the zeros. Counts are exact, ties
deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from compressor.arguments import require_one_of
from compressor.deltas.kinds.mask import Mask, WeightMask
from compressor.deltas.links import attach, chains, detach, merged_copy
from compressor.deltas.sources import top_mask
from compressor.errors import UserError
from compressor.models.anatomy import Matrix, layers_of
from compressor.pruning.scores import VALUES, Changes
from compressor.pruning_criteria import CRITERIA, LOSS_POWER, UNSTRUCTURED, Hides, NofM, WeightCriterion
from compressor.selection.finite import require_finite, require_ranks
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.task_kind import TaskKind

HIDDEN = -1.0
"""Score of an already masked weight: below every other, so that it is chosen first and counts as removed."""


def importance(matrices: Sequence[Matrix], criterion: WeightCriterion, changes: Changes, seed: int) -> dict[str, Tensor]:
    """Score (out, in) of every entry, by the matrix's path: |ΔW|, |W|, |W + ΔW|, |ΔW| or |W|, or uniform draws.

    W is the frozen weight, as in DSEE. Raises UserError E502 when the criterion is delta and a matrix has none, E409 for scores
    that are not finite.
    """
    require_one_of("criterion", criterion, [name for name, row in CRITERIA.items() if row.weights and not row.passes])
    row, generator, scores = CRITERIA[criterion], torch.Generator().manual_seed(seed), {}
    for matrix in matrices:
        bare = row.by_change and matrix.path not in changes
        if bare and row.needs_change:
            what = f"weights by criterion {criterion}: nothing was tuned on {matrix.path}"
            raise UserError("E502", what, "Name the tuned modules, or use delta_or_weight")
        if row.of == "chance":
            scores[matrix.path] = torch.rand(matrix.original.shape, generator=generator).to(matrix.original.device)
        else:
            scores[matrix.path] = VALUES["weight" if bare else row.of](matrix, changes).detach().abs()
    return _candidates(matrices, scores, criterion)


def loss_importance(
    model: nn.Module,
    matrices: Sequence[Matrix],
    criterion: WeightCriterion,
    encodings: Iterable[tuple[dict[str, Tensor], Tensor]],
    on_batch: Callable[[int], None] = lambda rows: None,
    *,
    kind: TaskKind = CLASSIFICATION,
) -> dict[str, Tensor]:
    """Σ over batches of |w · g| (taylor) or of (w · g)² (fisher), (out, in) by path: first-order loss change without a weight.

    w is W + ΔW and g the gradient of a batch's summed loss at it; within a batch rows may cancel. `encodings` are
    (inputs, labels). `model` is left alone. Raises UserError E409 for scores that are not finite.
    """
    require_one_of("criterion", criterion, LOSS_POWER)
    merged = merged_copy(model).eval().requires_grad_(False)
    names = {matrix.path for matrix in matrices}
    copies = [matrix for layer in layers_of(merged) for matrix in map(layer.matrix, layer.names) if matrix.path in names]
    # parts of a fused weight share it
    stored = {id(matrix.owner): matrix.owner.weight.requires_grad_(True) for matrix in copies}
    totals = {owner: torch.zeros_like(weight) for owner, weight in stored.items()}
    for encoding, labels in encodings:
        loss = kind.loss(merged(**encoding).logits, labels, "sum")
        gradients = torch.autograd.grad(loss, list(stored.values()), materialize_grads=True)  # unused ones have 0
        for (owner, weight), gradient in zip(stored.items(), gradients, strict=True):
            totals[owner] += (weight.detach() * gradient).abs().pow(LOSS_POWER[criterion])
        on_batch(len(labels))
    scores = {matrix.path: matrix.place.read(totals[id(matrix.owner)]) for matrix in copies}
    return _candidates(matrices, scores, criterion)


def _candidates(matrices: Sequence[Matrix], scores: Mapping[str, Tensor], criterion: WeightCriterion) -> dict[str, Tensor]:
    """The scores of `matrices`, with those of masked weights HIDDEN. Raises UserError E409 where one is not finite."""
    for matrix in matrices:
        require_finite(scores[matrix.path], f"criterion {criterion}: the scores of {matrix.path}")
    return {matrix.path: overwritten(matrix, scores[matrix.path], HIDDEN) for matrix in matrices}


def overwritten(matrix: Matrix, values: Tensor, hidden: float) -> Tensor:
    """The values (out, in), with `hidden` wherever a mask of either kind hides W."""
    for mask in (matrix.mask, matrix.weight_mask):
        values = values if mask is None else torch.where(mask.keep, values, hidden)
    return values


def hide_lowest(
    matrices: Sequence[Matrix],
    scores: Mapping[str, Tensor],
    count: int,
    hides: Hides = "both",
    *,
    second: Mapping[str, Tensor] | None = None,
) -> None:
    """Mask exactly the `count` entries of all `matrices` with the lowest scores, those already masked included.

    Equal scores: those with the lowest `second` scores (out, in, by path) are removed first, then the lowest flat index of the
    first matrix. Raises UserError E501 if more are already masked, E409 for scores that are NaN.
    """
    for matrix in matrices:
        require_ranks(scores[matrix.path], f"the scores of {matrix.path}")
    flat = torch.cat([scores[matrix.path].flatten() for matrix in matrices])
    before = int((flat == HIDDEN).sum())
    if before > count:
        what = f"{before:,} of these {flat.numel():,} weights are zero already, {count:,} are to be zero in all"
        raise UserError("E501", what, "remove counts those too: give a larger share")
    decisive = torch.cat([second[matrix.path].flatten() for matrix in matrices]) if second else None
    kept = ~_lowest(flat, count, decisive)
    for matrix, part in zip(matrices, kept.split([matrix.original.numel() for matrix in matrices]), strict=True):
        hide(matrix, part.view(matrix.original.shape).clone(), UNSTRUCTURED, hides)


def _lowest(flat: Tensor, count: int, second: Tensor | None) -> Tensor:
    """Boolean (entries,), true at the `count` lowest of `flat`; of equal ones at the lowest of `second`, then of the index."""
    lowest = top_mask(-flat, count)
    if second is None or not count:
        return lowest
    equal = flat == flat[lowest].max()
    among = torch.where(equal, -second, -torch.inf)
    return (lowest & ~equal) | top_mask(among, int((lowest & equal).sum()))


def hide_all_but(matrix: Matrix, scores: Tensor, pattern: NofM, hides: Hides = "both", *, second: Tensor | None = None) -> None:
    """In every run of m consecutive inputs of an output keep the n with the highest scores; of equal ones that with the lowest
    `second` score (out, in) is masked, then the first.

    Raises UserError E505 if the number of inputs is not a multiple of m, E409 for scores that are NaN.
    """
    require_ranks(scores, f"the scores of {matrix.path}")
    check_width(matrix.path, scores.shape[1], pattern)
    runs = scores.unflatten(1, (-1, pattern.run))
    if second is None:
        order = runs.argsort(dim=2, stable=True)
    else:
        order = second.unflatten(1, (-1, pattern.run)).argsort(dim=2, stable=True)
        order = order.gather(2, runs.gather(2, order).argsort(dim=2, stable=True))
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order[..., -pattern.keep :], True)
    hide(matrix, kept.flatten(1), f"{pattern.keep}:{pattern.run}", hides)


def check_width(name: str, inputs: int, pattern: NofM) -> None:
    """Raise UserError E505 where the number of input columns is not a multiple of the pattern's run."""
    if inputs % pattern.run:
        what = f"{name} has {inputs:,} inputs, no multiple of {pattern.run}: the pattern {pattern.keep}:{pattern.run}"
        raise UserError("E505", f"{what} does not fit", "Leave out this module, or remove units in multiples of that")


def hide(matrix: Matrix, keep: Tensor, pattern: str, hides: Hides = "both") -> None:
    """Extend the matrix's mask, over W + ΔW or over W alone, to everything outside `keep` (out, in)."""
    mask = mask_of(matrix, hides)
    if mask is None:
        matrix.attach((Mask if hides == "both" else WeightMask)(keep, pattern))
        return
    mask.keep &= keep
    mask.pattern = mask.pattern if pattern == UNSTRUCTURED else pattern


def mask_of(matrix: Matrix, hides: Hides) -> Mask | None:
    """The mask of a matrix over W + ΔW, or over W alone."""
    require_one_of("hides", hides, get_args(Hides))
    return matrix.mask if hides == "both" else matrix.weight_mask


def require_zeros_kept(model: nn.Module) -> None:
    """Raises UserError E412 where merging would fill zeros: a mask hides W alone, and M ⊙ W + ΔW is dense."""
    if (matrix := filled_by_merge(model)) is not None:
        what = f"merging would fill the zeros of {matrix.path}: its mask hides W alone, and M ⊙ W + ΔW is dense"
        raise UserError("E412", what, "Export with merge: false, or prune again without hides: weight")


def filled_by_merge(model: nn.Module) -> Matrix | None:
    """The first matrix that is not zero everywhere where a mask hides W alone: there is a ΔW or a refit; None without one."""
    for matrix in (layer.matrix(name) for layer in layers_of(model) for name in layer.names):
        mask = matrix.weight_mask
        if mask is not None and bool((~mask.keep & (matrix.weight != 0)).any()):
            return matrix
    return None


@dataclass(frozen=True)
class Density:
    """Remaining weights of all matrices with the same pruning pattern; `pattern` '' for those without a mask."""

    pattern: str
    matrices: int
    entries: int
    nonzeros: int


def densities(model: nn.Module) -> list[Density]:
    """Densities of the blocks' matrices by pattern, counted on W + ΔW as it would be merged, under a mask of W alone on M ⊙ W
    unless a merge of the model keeps its zeros.

    A mask whose n:m groups were broken since (by removed neurons, say) counts as unstructured.
    """
    weights_of: dict[str, list[Tensor]] = {}
    apart = filled_by_merge(model) is not None
    for layer in layers_of(model):
        for matrix in map(layer.matrix, layer.names):
            alone = apart and _hides_alone(matrix)
            weight = overwritten(matrix, matrix.original, 0.0) if alone else matrix.weight
            weights_of.setdefault(_pattern_of(matrix, alone), []).append(weight.detach())
    return [
        Density(pattern, len(weights), sum(w.numel() for w in weights), sum(int((w != 0).sum()) for w in weights))
        for pattern, weights in weights_of.items()
    ]


def densities_apart(model: nn.Module) -> list[Density]:
    """Densities of an unmerged model with masks of W alone, whether a merge would fill their zeros or keep them; none for other
    models."""
    masked = any(layer.matrix(name).weight_mask is not None for layer in layers_of(model) for name in layer.names)
    return densities(model) if masked else []


def _hides_alone(matrix: Matrix) -> bool:
    """Whether W alone is masked, and not all of that by a mask over W + ΔW, too."""
    alone, both = matrix.weight_mask, matrix.mask
    return alone is not None and (both is None or bool((both.keep & ~alone.keep).any()))


def _pattern_of(matrix: Matrix, alone: bool) -> str:
    mask = matrix.weight_mask if alone else matrix.mask or matrix.weight_mask
    if mask is None:
        return ""
    pattern = NofM.parse(mask.pattern)
    name = mask.pattern if pattern is None or holds(mask.keep, pattern) else UNSTRUCTURED
    return f"{name}, of W alone" if alone else name


def holds(kept: Tensor, pattern: NofM) -> bool:
    """Whether every run of m entries in a row of `kept` (out, in) has at most n non-zeros."""
    if kept.shape[1] % pattern.run:
        return False
    return bool(((kept != 0).unflatten(1, (-1, pattern.run)).sum(dim=2) <= pattern.keep).all())


def nonzeros(model: nn.Module) -> int:
    """Number of non-zero scalars of a merged model, over all parameters; shared ones count once.

    With masks of W alone nothing is merged: M ⊙ W and the parameters of ΔW count.
    """
    hidden = sum(
        int(((matrix.original != 0) & (overwritten(matrix, matrix.original, 0.0) == 0)).sum())
        for layer in layers_of(model)
        for matrix in map(layer.matrix, layer.names)
        if matrix.mask is not None or matrix.weight_mask is not None
    )
    return sum(int((parameter != 0).sum()) for parameter in model.parameters()) - hidden


def unmasked(model: nn.Module) -> nn.Module:
    """Remove every mask from its chain, in place, and return the model."""
    for _, owner, name in list(chains(model)):
        for link in detach(owner, name):
            if not isinstance(link, Mask):
                attach(owner, link, name, check=False)
    return model
