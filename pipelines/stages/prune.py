"""Stage `prune`: physically remove the heads and FFN neurons that matter least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compressor.cost import Plan
from compressor.errors import UserError
from pipelines.stage import CountOrShare, Entry, Inputs, Problem, Stage, StageConfig, Workspace
from pipelines.stages.tune import DEFAULT_MODULES, merged_problems

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.pruning.surgery import Removal
    from pipelines.loading import Data

MODULES_OF = {"heads": ("query", "key", "value"), "neurons": ("ffn_in", "ffn_out")}
"""Where a structure's |ΔW| can come from."""


class PruneItem(BaseModel):
    """Remove `remove` structures from every layer, the lowest score first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Literal["heads", "neurons"]
    criterion: Literal["delta", "weight", "weight_plus_delta", "taylor", "random"] = "delta"
    scope: Literal["layer"] = "layer"
    remove: CountOrShare = Field(description="a count per layer, or a share of them in (0, 1)")
    rows: int = Field(default=512, ge=1, description="training rows that taylor looks at")


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


def count_to_remove(remove: int | float, available: int, structure: str) -> int:
    """How many of a layer's `available` structures go. Raises UserError E501 when none would go, or none be left."""
    count = round(remove * available) if isinstance(remove, float) else remove
    if count == 0:
        what = f"remove: {remove} is less than one of the {available} {structure} of a layer"
        raise UserError("E501", what, f"Use at least {1 / available:.2g}")
    if count >= available:
        raise UserError(
            "E501", f"remove: {remove} leaves none of the {available} {structure} of a layer", f"Use at most {available - 1}"
        )
    return count


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
        if item.criterion == "delta" and touched is not None and not touched & set(MODULES_OF[item.structure]):
            yield Problem(
                "E502",
                f"{item.structure} by criterion delta, but no stage tunes {' or '.join(MODULES_OF[item.structure])}",
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
    from compressor.pruning.scores import changes_of, random_scores, taylor_scores, weight_scores
    from pipelines.loading import tensor_batches

    if item.criterion == "random":
        return random_scores(model, item.structure, seed)
    if item.criterion != "taylor":
        return weight_scores(model, item.structure, item.criterion, changes_of(model, base))
    rows = data.train.sample(item.rows)
    with workspace.progress(f"scoring {item.structure} by taylor", len(rows)) as bar:
        return taylor_scores(model, item.structure, tensor_batches(rows, data.pad_id, 32), bar.advance)


def removals_of(item: PruneItem, model: nn.Module, scores: list) -> dict[int, Removal]:
    """Scores -> what leaves each layer. Raises UserError E501."""
    from compressor.anatomy import layers_of
    from compressor.pruning.scores import lowest
    from compressor.pruning.surgery import Removal

    counts = [count_to_remove(item.remove, getattr(layer, item.structure), item.structure) for layer in layers_of(model)]
    return {number: Removal(**{item.structure: gone}) for number, gone in enumerate(lowest(scores, counts))}


def run(config: PruneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Carry out every item, compare removed against masked on validation rows, write the state."""
    from compressor.checkpoint import load_state
    from pipelines.loading import load_data, load_model, publish_model

    data, previous = load_data(inputs), inputs.nearest("model")
    model, moved = load_model(previous, inputs.base), previous.metadata["weights_moved"]
    # after full tuning |ΔW| is the distance from the base, which is cut along to keep the shapes equal
    base = load_state(previous.folder, inputs.base.folder, changes=False) if moved else None
    steps = [carry_out(item, model, base, inputs.seed, data, workspace) for item in config.items]
    published = publish_model(model, inputs, data, workspace)
    parity = [step["parity"] for step in steps]
    return {**published, "method": previous.metadata["method"], "items": steps, "parity": parity}


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
        heads, neurons = [s.heads for s in shape.layers], [s.neurons for s in shape.layers]
        counts = heads if item.structure == "heads" else neurons
        counts[:] = [count - count_to_remove(item.remove, count, item.structure) for count in counts]
        shape = shape.pruned(heads, neurons)
    return replace(plan, shape=shape)


STAGE = Stage(
    name="prune",
    summary="physically remove attention heads and FFN neurons",
    config=PruneConfig,
    produces="model",
    accepts=("model",),
    packages=("torch", "transformers", "torch-pruning", "tokenizers"),
    run=run,
    version=2,
    check=check,
    plan=plan,
)
