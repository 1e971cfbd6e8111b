"""Cost of removing units: the increase of the loss on some rows, measured with the units masked, sublayer by sublayer.

Scores rank the units of a sublayer. They do not give the cost of removing many of them, nor how many neurons equal a head:
first-order changes do not add up until a sublayer is empty, and Σ|W| has no unit at all. So every sublayer is masked in steps,
its lowest scores first, and the resulting increase of the loss is its price (ZipLM, Kurtic et al. 2023, section 3.3, prices
widths too, by the error of the sublayer's own output).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from compressor.errors import UserError
from compressor.pruning.scores import lowest, units_of
from compressor.pruning.search import Prices
from compressor.pruning.surgery import Removal, silenced
from compressor.tasks.task_kind import TaskKind

KNOTS = (0.75, 0.5, 0.25, 0.125, 0.0)
"""Shares of units left at which a sublayer's price is measured; in between it is interpolated linearly."""
PRICE_FLOOR = 1e-6
"""Minimum price of all units of a sublayer: a measured price of 0 must not make their removal free."""
HOW = (1, PRICE_FLOOR, *KNOTS)
"""How prices are measured, for those that are kept: raise the first number with every change of the code that moves them."""


def knots_of(units: int) -> list[int]:
    """The numbers of units left at which a sublayer of `units` is measured, descending; none for an empty sublayer."""
    return sorted({int(share * units) for share in KNOTS}, reverse=True) if units else []


def trials(model: nn.Module, structures: Sequence[str]) -> int:
    """Number of measurements that `prices_of` makes on each batch."""
    return sum(len(knots_of(units)) for structure in structures for units in units_of(model, structure))


@torch.no_grad()
def prices_of(
    model: nn.Module,
    scores: Mapping[str, Sequence[Tensor]],
    batches: Sequence[tuple[dict[str, Tensor], Tensor]],
    kind: TaskKind,
    on_trial: Callable[[int], None] = lambda count: None,
) -> Prices:
    """Loss increase when each block loses its lowest units of each structure in `scores` (one tensor (units,) per block).

    It is the rise of `kind.distillation`, the mean over the rows of `batches` ((inputs, labels) each), against the labels and
    the outputs of the model as it is; more units never cost less. The model must have no parametrizations; afterwards its
    weights are unchanged and it is in eval mode. Raises UserError E521 where a loss is not finite.
    """
    model.eval()
    blocks = [(name, place, block) for name, each in scores.items() for place, block in enumerate(each)]
    trials = [(name, place, count) for name, place, block in blocks for count in knots_of(len(block))]
    rises, rows = dict.fromkeys(trials, 0.0), sum(len(labels) for _, labels in batches)
    for inputs, labels in batches:
        # one batch at a time: logits over a vocabulary for all rows would not fit into memory
        reference = model(**inputs).logits
        start = _finite(kind.distillation(reference, reference, labels))
        for name, place, count in trials:
            with silenced(model, {place: _without(name, scores[name][place], count)}):
                loss = _finite(kind.distillation(model(**inputs).logits, reference, labels))
            rises[name, place, count] += (loss - start) * len(labels) / rows
            on_trial(1)

    def curve(structure: str, place: int, block: Tensor) -> np.ndarray:
        rise_at = {len(block): 0.0}
        for count in knots_of(len(block)):
            rise_at[count] = max(rises[structure, place, count], *rise_at.values())
        gone = np.arange(len(block) + 1)
        return np.interp(gone, len(block) - np.array(list(rise_at)), list(rise_at.values())) + PRICE_FLOOR * gone / max(
            len(block), 1
        )

    return {name: [curve(name, place, block) for place, block in enumerate(blocks)] for name, blocks in scores.items()}


def _finite(loss: Tensor) -> float:
    if not loss.isfinite():
        raise UserError("E521", "the loss on training rows is not finite", "Tune again with a lower learning rate")
    return float(loss.double())


def _without(structure: str, block: Tensor, count: int) -> Removal:
    """The removal that leaves the `count` units of a block with the highest scores."""
    if structure == "layers":
        return Removal(whole=True)
    return Removal(**{structure: lowest([block], [len(block) - count])[0]})
