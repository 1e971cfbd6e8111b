"""Scores from gradients of the task's loss over some batches, at the current weights.

`sam` is (Σ g)², the second-order approximation with |λmax| I for the Hessian (Fu et al. 2023, theorem 3); `fish` is Σ g², the
empirical Fisher information (Sung et al. 2021), which is per row when the batch holds one; `d3` is |Σ g| / (|θ| + ε)^exp (ID3).
Where gradients cancel between batches the first and the second rank differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.arguments import require_one_of
from compressor.deltas.links import original
from compressor.models.anatomy import Matrix
from compressor.selection.finite import require_finite
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.task_kind import TaskKind


@dataclass(frozen=True)
class Heuristic:
    """H = |g| / (|θ| + ε)^exp of ID3 section 3. exp 0 is the plain gradient; the paper uses 2 and, at its best, -1."""

    exp: float = 0.0
    eps: float = 1.0

    def __call__(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient.abs() / (weight.detach().abs() + self.eps) ** self.exp


@dataclass(frozen=True)
class GradientScore:
    """`summed`: the gradient of a batch -> what is added up; `finished`: (that sum, the weight, ID3's heuristic) -> scores."""

    summed: Callable[[Tensor], Tensor]
    finished: Callable[[Tensor, Tensor, Heuristic], Tensor]


GRADIENT_SCORES = {
    "fish": GradientScore(torch.square, lambda total, weight, heuristic: total),
    "sam": GradientScore(lambda gradient: gradient, lambda total, weight, heuristic: total.square()),
    "d3": GradientScore(lambda gradient: gradient, lambda total, weight, heuristic: heuristic(total, weight)),
}


@dataclass(frozen=True)
class GradientSettings:
    """How the gradients are computed: dropout on (`train`) or off, each batch's gradient clipped to a norm or not."""

    train: bool = False
    clip: float | None = None


def gradient_scores(
    model: nn.Module,
    matrices: Sequence[Matrix],
    score: str,
    batches: Iterable[tuple[dict[str, Tensor], Tensor]],
    *,
    batch_size: int | None = None,
    settings: GradientSettings = GradientSettings(),
    heuristic: Heuristic = Heuristic(),
    kind: TaskKind = CLASSIFICATION,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> dict[str, Tensor]:
    """Scores (out, in) of every matrix, by path. `batches` are (inputs, labels); the loss is the mean loss of `kind`.
    A batch of fewer rows than `batch_size` counts as so much less: its gradient is weighed by its share of them.

    The matrices must be plain parameters but for masks (`merge_deltas`); masked entries have no gradient, so they score 0 and
    are not candidates. Afterwards the model is frozen and in eval mode. Raises UserError E409 where a gradient is not finite,
    ValueError for another score.
    """
    require_one_of("score", score, GRADIENT_SCORES)
    row = GRADIENT_SCORES[score]
    model.requires_grad_(False)
    # matrices of one fused weight share it
    weights = {
        (id(matrix.owner), matrix.tensor): original(matrix.owner, matrix.tensor).requires_grad_(True) for matrix in matrices
    }
    totals = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    model.train(settings.train)
    for encoding, labels in batches:
        loss = kind.loss(model(**encoding).logits, labels)
        gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)  # unused ones have 0
        if settings.clip is not None:
            of = dict(zip(weights, gradients, strict=True))
            # of a fused weight only the matrices that are asked for
            parts = [matrix.place.read(of[id(matrix.owner), matrix.tensor]) for matrix in matrices]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts]))
            gradients = [gradient * torch.clamp(settings.clip / (norm + 1e-6), max=1.0) for gradient in gradients]
        if batch_size and len(labels) < batch_size:
            gradients = [gradient * (len(labels) / batch_size) for gradient in gradients]
        for total, gradient in zip(totals.values(), gradients, strict=True):
            total += row.summed(gradient)
        on_batch(len(labels))
    model.eval().requires_grad_(False)
    scores = {}
    for matrix in matrices:
        total = matrix.place.read(totals[id(matrix.owner), matrix.tensor])
        scores[matrix.path] = row.finished(total, matrix.original.detach(), heuristic).contiguous()
    for path, values in scores.items():
        require_finite(values, f"score {score}: the gradient scores of {path}")
    return scores
