"""Search for the widths that meet a target at the least loss: one width per sublayer, by dynamic programming.

The cost of removing the k lowest units of a sublayer is its price (`compressor.pruning.prices`); what that saves (time, FLOPs,
parameters) is given by a measure of the whole model. Losses and savings add up over sublayers, so the best set of widths is a
covering knapsack (ZipLM, Kurtic et al. 2023, section 3.3; the same program as SPDY's, Frantar & Alistarh 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compressor.cost import LayerShape, ModelShape
from compressor.models.modules import TILED

Measure = Callable[[ModelShape], float]
"""Cost of a model, in any unit; the part of a sublayer must not depend on other blocks."""

Prices = dict[str, list[np.ndarray]]
"""Structure -> for each block (units + 1,): the price of removing so many units, starting at 0 and never falling. A whole
block is one unit of `layers`."""

BINS = 10_000
"""Number of bins that the amount to save is divided into. Savings are rounded down, so that a choice never misses the target:
with n sublayers at most n / BINS of the amount is saved beyond it."""


@dataclass(frozen=True)
class Option:
    """One width: units left, what it saves compared with the current model, and the loss that it costs."""

    units: int
    saved: float
    lost: float


@dataclass(frozen=True)
class Block:
    """The choices for one block: `options` of each structure, the first of which keeps all units, and the option to drop
    the whole block (None: it must stay)."""

    options: dict[str, tuple[Option, ...]]
    drop: Option | None = None


Widths = list[dict[str, int] | None]
"""For each block the units left of each structure; None if the block is removed."""


def step_of(units: int, tile: int) -> int:
    """Step between widths, which are multiples of it: matrix kernels work in tiles, of `tile` columns where that is known. A
    layer of fewer than four tiles takes a finer step."""
    usual = next((step for least, step in ((512, 32), (128, 8)) if units >= least), 1)
    return max(usual, tile) if units >= 4 * tile else usual


def widths_of(structure: str, units: int, least: int, tile: int) -> list[int]:
    """Numbers of units that may be left of `units`, starting with all of them, each at least `least`."""
    step = step_of(units, tile) if structure in TILED else 1
    return [units, *(count for count in range((units - 1) // step * step, -1, -step) if least <= count < units)]


def even_prices(shape: ModelShape, structures: Sequence[str]) -> Prices:
    """Uniform prices: all units of a structure cost the same, every sublayer costs 1, a block as much as its sublayers."""
    inside = max(len(set(structures) - {"layers"}), 1)

    def price(structure: str, layer: LayerShape) -> np.ndarray:
        return np.array([0.0, inside]) if structure == "layers" else np.linspace(0, 1, layer.units(structure) + 1)

    return {structure: [price(structure, layer) for layer in shape.layers] for structure in structures}


def blocks_of(
    shape: ModelShape,
    prices: Prices,
    measure: Measure,
    least: Mapping[str, int],
    staying: Sequence[int] = (),
    tile: int = 1,
) -> list[Block]:
    """The choices for a model: `least` is the number of units that a block keeps of each structure, `staying` are blocks that
    are not dropped, `tile` is that of `step_of`. A block whose attention other blocks need stays and keeps a head."""
    now = measure(shape)

    def saved(place: int, layer: LayerShape) -> float:
        return now - measure(replace(shape, layers=(*shape.layers[:place], layer, *shape.layers[place + 1 :])))

    blocks = []
    for place, layer in enumerate(shape.layers):
        options = {}
        for structure, by_block in prices.items():
            units = 0 if structure == "layers" else layer.units(structure)
            if units:
                stay = max(least.get(structure, 0), int(layer.needed and structure == "heads"))
                options[structure] = tuple(
                    Option(count, saved(place, layer.with_units(structure, count)), float(by_block[place][units - count]))
                    for count in widths_of(structure, units, stay, tile)
                )
        droppable = "layers" in prices and place not in staying and not layer.needed
        drop = Option(0, now - measure(shape.without({place})), float(prices["layers"][place][-1])) if droppable else None
        blocks.append(Block(options, drop))
    return blocks


@dataclass(frozen=True)
class _Bundle:
    """One combination of a block's options; `widths` is None where the block is dropped."""

    widths: dict[str, int] | None
    saved: float
    lost: float


def _bundles(block: Block) -> list[_Bundle]:
    """All combinations of a block's options that no other beats in both loss and saving, the lowest loss first."""
    bundles = [
        _Bundle(
            {name: option.units for name, option in zip(block.options, chosen, strict=True)},
            sum(option.saved for option in chosen),
            sum(option.lost for option in chosen),
        )
        for chosen in itertools.product(*block.options.values())
    ]
    if block.drop:
        bundles.append(_Bundle(None, block.drop.saved, block.drop.lost))
    bundles.sort(key=lambda bundle: (bundle.lost, -bundle.saved))
    front: list[_Bundle] = []
    for bundle in bundles:
        if not front or bundle.saved > front[-1].saved:
            front.append(bundle)
    return front


def most_saved(blocks: Sequence[Block]) -> float:
    """The largest saving that is possible."""
    return sum(_bundles(block)[-1].saved for block in blocks)


def choose_widths(blocks: Sequence[Block], need: float, bins: int = BINS) -> Widths | None:
    """The widths that save `need` (> 0) or more at the least loss; None where nothing saves that much.

    Exact for savings rounded down to multiples of need / bins.
    """
    # lost[b]: the least loss that saves b bins, the last: all of them or more
    lost, steps = np.full(bins + 1, np.inf), []
    lost[0] = 0.0
    for block in blocks:
        bundles = _bundles(block)
        lost, taken, origin = _added(lost, [(_rounded(bundle.saved, need, bins), bundle.lost) for bundle in bundles])
        steps.append((bundles, taken, origin))
    if not np.isfinite(lost[bins]):
        return None
    place, widths = bins, []
    for bundles, taken, origin in reversed(steps):
        widths.append(bundles[taken[place]].widths)
        place = origin[place]
    return widths[::-1]


def _rounded(saved: float, need: float, bins: int) -> int:
    """Number of whole bins in a saving; 1e-9 is added against rounding, so that 3 x 0.1 is not less than 0.3."""
    return max(0, min(int(saved / need * bins + 1e-9), bins))


def _added(before: np.ndarray, choices: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add one block with `choices` of (bins saved, loss): least loss, choice taken and previous bin, one value per bin."""
    last = len(before) - 1
    lost = np.full(last + 1, np.inf)
    taken, origin = np.zeros(last + 1, dtype=np.int32), np.zeros(last + 1, dtype=np.int32)
    for number, (saved, loss) in enumerate(choices):
        source = np.arange(last + 1) - saved
        # savings beyond the last bin count as the last
        source[last] = last - saved + int(np.argmin(before[last - saved :]))
        candidate = np.where(source >= 0, before[np.maximum(source, 0)], np.inf) + loss
        better = candidate < lost
        lost[better], taken[better], origin[better] = candidate[better], number, source[better]
    return lost, taken, origin
