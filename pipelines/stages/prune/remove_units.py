"""Removing heads, neurons and layers: score the units, remove the lowest, compare with the model in which they are masked."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compressor.accelerator import accelerated, batches_on
from compressor.deltas.links import merged_copy
from compressor.models.anatomy import layers_of
from compressor.pruning.scores import (
    changes_of,
    loss_scores,
    lowest,
    lowest_of_all,
    random_scores,
    reconstruction_scores,
    units_of,
    weight_scores,
)
from compressor.pruning.surgery import Removal, remove, silence
from compressor.pruning_criteria import CRITERIA, SUMS
from compressor.tasks.data import Data, tensor_batches
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import PARITY_ROWS
from pipelines.stages.parity_checks import compare_modules
from pipelines.stages.prune.prune_units import PruneItem, counts_to_remove, least_units
from pipelines.stages.prune.targets import ScoreSettings


def score(
    item: PruneItem | ScoreSettings, model: nn.Module, base: nn.Module | None, seed: int, data: Data, workspace: Workspace
) -> list[Tensor]:
    """One tensor of scores per layer, by the item's criterion. `base` (same shapes) is given after full tuning."""
    row = CRITERIA[item.criterion]
    if row.of == "chance":
        return random_scores(model, item.structure, seed)
    if item.criterion in SUMS:
        return weight_scores(model, item.structure, item.criterion, changes_of(model, base), item.modules)
    rows, by_states = data.train.sample(item.rows), row.of == "states"
    steps = len(rows) * (len(layers_of(model)) if by_states else 1)
    with workspace.progress(f"scoring {item.structure} by {item.criterion}", steps) as bar, accelerated(model) as device:
        batches = batches_on(device, tensor_batches(rows, data.pad_id, data.batch_size))
        if by_states:
            found = reconstruction_scores(model, item.structure, [inputs for inputs, _ in batches], bar.advance)
        else:
            found = loss_scores(model, item.structure, item.criterion, batches, bar.advance, kind=data.kind)
    return [units.cpu() for units in found]


def removals_of(item: PruneItem, model: nn.Module, scores: list) -> dict[int, Removal]:
    """Scores -> the units to remove from each layer. Raises UserError E501."""
    stay = least_units(item, layers_of(model))
    counts = counts_to_remove(item, units_of(model, item.structure), stay)
    gone = lowest_of_all(scores, sum(counts), stay, normalize=item.normalize) if item.everywhere else lowest(scores, counts)
    if item.structure == "layers":
        return {number: Removal(whole=True) for number, units in enumerate(gone) if units}
    return {number: Removal(**{item.structure: units}) for number, units in enumerate(gone)}


def carry_out(
    item: PruneItem, model: nn.Module, base: nn.Module | None, seed: int, data: Data, workspace: Workspace
) -> dict[str, Any]:
    """Score, remove and check one item, in place. Raises CheckError E6xx when removed and masked differ."""
    scores = score(item, model, base, seed, data, workspace)
    removals = removals_of(item, model, scores)
    # a key that was not given must not change what later stages are made from
    requested = item.model_dump(exclude={"modules"} if item.modules is None else set())
    return {**requested, "parity": cut(item.structure, removals, model, base, data, workspace)}


def cut(
    what: str, removals: dict[int, Removal], model: nn.Module, base: nn.Module | None, data: Data, workspace: Workspace
) -> dict[str, Any]:
    """Remove in place and compare with zeroing the same units, on validation rows; returns the record of that comparison.

    Raises CheckError E6xx when it is not.
    """
    masked = merged_copy(model)
    silence(masked, removals)
    for pruned in (model, base):
        if pruned is not None:
            remove(pruned, removals)
    rows = data.compared(PARITY_ROWS)
    result = compare_modules(f"{what} masked -> removed", "removed", masked, model, rows, data, workspace)
    return result.to_json()
