"""The selection scores by name, with what a pipeline file may say of each: one row a score, without torch.

What a score computes is a function in choice.py (of the weights) or gradients.py (of the task's gradients).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["matrix", "layer", "global"]
SCOPES: tuple[str, ...] = Scope.__args__

DEFAULT_SAMPLES = 1024
"""Training rows that the gradients are of, or all of fewer."""
OF_DATA = ("samples", "batch_size", "mode", "clip")
OF_HEURISTIC = ("exp", "eps")


def without_eps(exp: float | None, eps: float | None) -> bool:
    """Whether an `eps` other than the default is given that |g|/(|θ|+eps)^exp, of these keys of a file, does not use."""
    return not exp and eps not in (None, 1)


@dataclass(frozen=True)
class Score:
    """A way to rank positions.

    - `reads`: the keys of `select` that it uses;
    - `batch`: rows of a gradient by default; 0 for a score of the weights alone;
    - `of_blocks`: it takes the pretrained matrices of the blocks only;
    - `own_seed`: each matrix has a seed of its own: with one, those of equal shape would get equal positions;
    - `blind`: the factor of a new LoRA or adapter, of which one is drawn and the other 0, in which every score is 0;
    - `width`: the bytes of a score.
    """

    reads: tuple[str, ...] = ()
    batch: int = 0
    of_blocks: bool = False
    own_seed: bool = False
    blind: Literal["drawn", "zero"] | None = None
    width: int = 4


SCORES = {
    "rpca": Score(("setting", "rank"), of_blocks=True),
    "magnitude": Score(blind="zero"),
    "pafi": Score(width=8),
    "random": Score(own_seed=True),
    "fish": Score(OF_DATA, batch=1, blind="drawn"),
    "sam": Score(OF_DATA, batch=16, blind="drawn"),
    "d3": Score((*OF_DATA, *OF_HEURISTIC), batch=16, blind="drawn"),
}
DATA_SCORES = tuple(name for name, row in SCORES.items() if row.batch)
"""Scores computed from the task's gradients; the others use only the weights."""
