"""Stage `prune`: physically remove the heads and FFN neurons that matter least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compressor.cost import Plan
from compressor.errors import UserError
from compressor.modules import MODULES, STRUCTURES
from compressor.pruning.names import LOSS_POWER, Criterion, Structure
from pipelines.stage import CountOrShare, Entry, Inputs, Problem, Stage, StageConfig, Workspace
from pipelines.stages.tune import DEFAULT_MODULES, merged_problems

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.anatomy import Layer
    from compressor.cost import LayerShape
    from compressor.pruning.surgery import Removal
    from pipelines.loading import Data

MODULES_OF = {name: span.rows for name, span in STRUCTURES.items()} | {"neurons": ("ffn_in", "ffn_gate", "ffn_out")}
"""Where a structure's |ΔW| can come from."""


class PruneItem(BaseModel):
    """Remove `remove` units from every layer, or of the whole model, the lowest score first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Structure
    criterion: Criterion = "delta"
    scope: Literal["layer", "global"] = Field(
        default="layer", description="the same count in every layer, or the lowest of the whole model (always so for layers)"
    )
    normalize: bool = Field(default=False, description="global: divide the scores of each layer by their norm first")
    remove: CountOrShare = Field(description="a count (per layer, or in all with scope global), or a share in (0, 1)")
    rows: int = Field(default=512, ge=1, description="training rows that taylor and fisher look at")

    @property
    def everywhere(self) -> bool:
        """Whether the units of all layers compete with each other."""
        return self.scope == "global" or self.structure == "layers"

    @model_validator(mode="after")
    def _normalize_means_something(self) -> PruneItem:
        if self.normalize and self.scope == "layer":
            raise ValueError("normalize compares layers: it goes with scope: global")
        return self


class PruneConfig(StageConfig):
    """One item or a list of them, carried out in order."""

    items: list[PruneItem] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"items": value}
        if isinstance(value, dict) and "items" not in value:
            own = {key: item for key, item in value.items() if key != "id"}
            return {**({"id": value["id"]} if "id" in value else {}), "items": [own]}
        return value


def count_to_remove(remove: int | float, available: int, stay: int, what: str) -> int:
    """How many of `available` units go, where `stay` must be left. Raises UserError E501 when none would go, or too many."""
    count = round(remove * available) if isinstance(remove, float) else remove
    if count == 0:
        raise UserError(
            "E501", f"remove: {remove} is less than one of the {available} {what}", f"Use at least {1 / available:.2g}"
        )
    if count > available - stay:
        mend = f"Use at most {available - stay}"
        left = max(available - count, 0) or "none"
        raise UserError("E501", f"remove: {remove} leaves {left} of the {available} {what}", mend)
    return count


def least_units(item: PruneItem, layers: Sequence[Layer] | Sequence[LayerShape]) -> list[int]:
    """How many units of an item's structure each layer must keep."""
    return [int(layer.needed and item.structure in ("heads", "layers")) for layer in layers]


def counts_to_remove(item: PruneItem, units: Sequence[int], stay: Sequence[int]) -> list[int]:
    """How many units leave each layer; as evenly as can be where all layers are ranked together. Raises UserError E501."""
    if not any(units):
        raise UserError("E501", f"there are no {item.structure} to remove", "Leave out this item")
    if not item.everywhere:
        of = f"{item.structure} of a layer"
        return [count_to_remove(item.remove, there, 1, of) if there else 0 for there in units]
    left, counts = count_to_remove(item.remove, sum(units), max(sum(stay), 1), item.structure), [0] * len(units)
    while left:
        layer = max(range(len(units)), key=lambda number: units[number] - stay[number] - counts[number])
        counts[layer], left = counts[layer] + 1, left - 1
    return counts


def check(config: PruneConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    tuned = [entry for entry in earlier if entry.name in ("tune", "recover")]
    if not tuned:
        yield Problem(
            "E503", "nothing is tuned yet", "Put a tune before prune: its deltas, task head and quality are needed here"
        )
        return
    yield from merged_problems("prune", earlier)
    touched = _modules_tuned(earlier)
    for number, item in enumerate(config.items):
        modules = MODULES_OF.get(item.structure, MODULES)
        if item.criterion == "delta" and touched is not None and not touched & set(modules):
            yield Problem(
                "E502",
                f"{item.structure} by criterion delta, but no stage tunes {' or '.join(modules)}",
                "Tune one of these modules, or use taylor or weight",
                ("items", number, "criterion"),
            )


def _modules_tuned(earlier: tuple[Entry, ...]) -> set[str] | None:
    """Modules that carry a delta so far; None when everything was tuned in full."""
    touched: set[str] = set()
    selected: tuple[str, ...] = ()
    for entry in earlier:
        if entry.name == "select":
            selected = entry.config.modules
        if entry.name in ("tune", "recover") and entry.config.method == "full":
            return None
        if entry.name in ("tune", "recover") and entry.config.method != "same":
            touched |= set(entry.config.modules or selected or DEFAULT_MODULES)
    return touched


def score(
    item: PruneItem, model: nn.Module, base: nn.Module | None, seed: int, data: Data, workspace: Workspace
) -> list[Tensor]:
    """One tensor of scores a layer, by the item's criterion. `base` (same shapes) is given after full tuning."""
    from compressor.pruning.scores import changes_of, loss_scores, random_scores, weight_scores
    from pipelines.loading import tensor_batches

    if item.criterion == "random":
        return random_scores(model, item.structure, seed)
    if item.criterion not in LOSS_POWER:
        return weight_scores(model, item.structure, item.criterion, changes_of(model, base))
    rows = data.train.sample(item.rows)
    with workspace.progress(f"scoring {item.structure} by {item.criterion}", len(rows)) as bar:
        batches = tensor_batches(rows, data.pad_id, 32)
        return loss_scores(model, item.structure, item.criterion, batches, bar.advance)


def removals_of(item: PruneItem, model: nn.Module, scores: list) -> dict[int, Removal]:
    """Scores -> what leaves each layer. Raises UserError E501."""
    from compressor.anatomy import layers_of
    from compressor.pruning.scores import lowest, lowest_of_all, units_of
    from compressor.pruning.surgery import Removal

    stay = least_units(item, layers_of(model))
    counts = counts_to_remove(item, units_of(model, item.structure), stay)
    gone = lowest_of_all(scores, sum(counts), stay, normalize=item.normalize) if item.everywhere else lowest(scores, counts)
    if item.structure == "layers":
        return {number: Removal(whole=True) for number, units in enumerate(gone) if units}
    return {number: Removal(**{item.structure: units}) for number, units in enumerate(gone)}


def run(config: PruneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Carry out every item, compare removed against masked on validation rows, write the state."""
    from compressor.anatomy import layers_of
    from compressor.checkpoint import load_state
    from pipelines.loading import load_data, load_model, publish_model

    data, previous = load_data(inputs), inputs.nearest("model")
    model, moved = load_model(previous, inputs.base), previous.metadata["weights_moved"]
    # after full tuning |ΔW| is the distance from the base, which is cut along to keep the shapes equal
    base = load_state(previous.folder, inputs.base.folder, changes=False) if moved else None
    found = [{name: layer.units(name) for name in STRUCTURES} for layer in layers_of(model)]
    steps = [carry_out(item, model, base, inputs.seed, data, workspace) for item in config.items]
    published = publish_model(model, inputs, data, workspace)
    parity = [step["parity"] for step in steps]
    return {**published, "method": previous.metadata["method"], "items": steps, "parity": parity, "found": found}


def carry_out(
    item: PruneItem, model: nn.Module, base: nn.Module | None, seed: int, data: Data, workspace: Workspace
) -> dict[str, Any]:
    """Score, remove and prove one item, in place. Raises CheckError E6xx when removed and masked differ."""
    from compressor.deltas import merged_copy
    from compressor.pruning.surgery import remove, silence
    from compressor.tasks.features import torch_forward
    from export.parity import compare, require
    from pipelines.loading import PARITY_ROWS, predict_rows

    scores = score(item, model, base, seed, data, workspace)
    removals = removals_of(item, model, scores)
    masked = merged_copy(model)
    silence(masked, removals)
    for cut in (model, base):
        if cut is not None:
            remove(cut, removals)
    rows = data.validation.sample(PARITY_ROWS)
    reference = predict_rows(torch_forward(masked), rows, data, workspace, f"{item.structure} masked")
    candidate = predict_rows(torch_forward(model), rows, data, workspace, f"{item.structure} removed")
    result = compare(f"{item.structure} masked -> removed", "removed", reference, candidate, rows.labels)
    require(result)
    return {**item.model_dump(), "parity": result.to_json()}


def plan(config: PruneConfig, plan: Plan) -> Plan:
    """Raises UserError E501 and E307 before anything runs."""
    from compressor.pruning.surgery import check_prunable

    check_prunable(plan.model)
    shape = plan.shape
    for item in config.items:
        whole = item.structure == "layers"
        units = [1 if whole else layer.units(item.structure) for layer in shape.layers]
        gone = counts_to_remove(item, units, least_units(item, shape.layers))
        left = [there - less for there, less in zip(units, gone, strict=True)]
        shape = shape.without({n for n, one in enumerate(left) if not one}) if whole else shape.left(item.structure, left)
    return replace(plan, shape=shape)


STAGE = Stage(
    name="prune",
    summary="physically remove attention heads and FFN neurons",
    config=PruneConfig,
    produces="model",
    accepts=("model",),
    packages=("torch", "transformers", "tokenizers"),
    run=run,
    version=4,
    check=check,
    plan=plan,
)
