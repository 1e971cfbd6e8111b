"""Stage `prune`: physically remove the heads and FFN neurons of least importance, or set single weights to zero."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from compressor.account import Plan
from compressor.errors import UserError
from compressor.methods import method
from compressor.models.modules import MODULES, STRUCTURES, Modules
from compressor.pruning_criteria import LOSS_POWER, SUMS, Criterion, Structure, require_rows_used
from pipelines.engine.stage import CountOrShare, Entry, Problem, Stage, StageConfig
from pipelines.file import limits
from pipelines.stages.prune import prune_weights
from pipelines.stages.prune.prune_weights import WeightsItem
from pipelines.stages.prune.targets import (
    ScoreSettings,
    TargetSearch,
    closed_form,
    surroundings,
    tile_of,
    widths,
)
from pipelines.stages.prune.timed_file import check_timed, in_deployed_file, needs_of_timing, warnings_of
from pipelines.stages.prune.uneven_layers import steps_of_item, steps_of_search, uneven_warnings
from pipelines.stages.training_config import DEFAULT_MODULES, merged_problems, on_of

if TYPE_CHECKING:
    from compressor.cost import LayerShape
    from compressor.models.anatomy import Layer


MODULES_OF = {name: span.rows for name, span in STRUCTURES.items()} | {"neurons": ("ffn_in", "ffn_gate", "ffn_out")}
"""Modules whose |ΔW| scores a structure."""


class PruneItem(BaseModel):
    """Remove `remove` units from every layer, or from the whole model, those with the lowest scores first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Structure = Field(description="weights: another kind of item, with a pattern")
    criterion: Criterion = Field(
        default="taylor",
        description="removed first: least needed by the loss (taylor, fisher) or by the hidden states, the rest refitted "
        "(reconstruction), least tuned (delta, the papers' score), smallest (weight)",
    )
    scope: Literal["layer", "global"] = Field(
        default="layer", description="the same count in every layer, or the lowest of the whole model (always so for layers)"
    )
    normalize: bool = Field(default=False, description="global: divide the scores of each layer by their norm first")
    remove: CountOrShare = Field(description="a count (per layer, or in all with scope global), or a share in (0, 1)")
    rows: int = Field(default=512, ge=1, le=limits.ROWS, description="training rows that taylor, fisher and reconstruction use")
    # without a default value, so that results of pipelines without this key keep their fingerprints
    modules: Modules | None = Field(
        default=None, description="delta, weight: the linear layers whose entries are summed, default all of the structure"
    )

    @property
    def everywhere(self) -> bool:
        """Whether the units of all layers are ranked together."""
        return self.scope == "global" or self.structure == "layers"

    @model_validator(mode="after")
    def _normalize_means_something(self) -> PruneItem:
        if self.normalize and self.scope == "layer":
            raise ValueError("normalize compares layers: it goes with scope: global")
        return self

    @model_validator(mode="after")
    def _modules_are_scored(self) -> PruneItem:
        if self.modules is None:
            return self
        if self.criterion not in SUMS:
            raise ValueError(f"modules is not used by criterion {self.criterion}: it goes with {', '.join(SUMS)}")
        scored = MODULES_OF.get(self.structure, MODULES)
        if odd := [name for name in self.modules if name not in scored]:
            raise ValueError(f"{odd[0]} is not scored for {self.structure}: name some of {', '.join(scored)}")
        return self

    @model_validator(mode="after")
    def _rows_are_used(self) -> PruneItem:
        require_rows_used(self.model_fields_set, [self.criterion])
        return self


def _kind_of(item: Any) -> str:
    """The config for parsing an item; an item with an unknown structure gets its error from that of units."""
    structure = item.get("structure") if isinstance(item, dict) else getattr(item, "structure", None)
    return "weights" if structure == "weights" else "units"


Item = Annotated[Annotated[PruneItem, Tag("units")] | Annotated[WeightsItem, Tag("weights")], Discriminator(_kind_of)]


OF_STAGE = ("id", "refit")
"""Keys of the stage itself where its items or its search are written without a key of their own."""


class PruneConfig(StageConfig):
    """One item or a list of them, applied in order; or a search for the widths that meet a target."""

    items: list[Item] = Field(
        default=[], max_length=limits.LIST, description="what is removed, one after the other; may be written without this key"
    )
    search: TargetSearch | None = Field(default=None, description="instead: a target to meet; may be written without this key")
    refit: int | None = Field(
        default=None,
        ge=1,
        le=limits.ROWS,
        description="training rows on which outgoing matrices are refitted to the unpruned model, without labels; default none",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"items": value}
        if isinstance(value, dict) and "items" not in value and "search" not in value:
            prune = {key: item for key, item in value.items() if key not in OF_STAGE}
            stage = {key: value[key] for key in OF_STAGE if key in value}
            if "target" not in prune:
                return {**stage, "items": [prune]}
            if ignored := {"structure", "scope", "normalize", "remove"} & set(prune):
                raise ValueError(f"{min(ignored)} beside target: the target decides how much of `structures` is removed")
            return {**stage, "search": prune}
        return value

    @model_validator(mode="after")
    def _one_way(self) -> PruneConfig:
        if bool(self.items) == (self.search is not None):
            raise ValueError("give items to remove, or a target to meet")
        return self

    @classmethod
    def amend_schema(cls, schema: dict[str, Any]) -> None:
        # items that prune weights have their own config
        schema["$defs"]["PruneItem"]["properties"]["structure"]["enum"].remove("weights")

    @classmethod
    def short_forms(cls, definitions: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Without the keys `items` and `search`: a list of items, one item, or a search."""
        keys = definitions[cls.__name__]["properties"]
        forms = [("", {"type": "array", "items": keys["items"]["items"], "minItems": 1})]
        for name in ("PruneItem", "WeightsItem", "TargetSearch"):
            form = copy.deepcopy(definitions[name])
            form["properties"] |= {key: keys[key] for key in OF_STAGE}
            forms.append((f"{name}Alone", form))
        return forms

    @property
    def scored(self) -> list[tuple[tuple[str | int, ...], ScoreSettings]]:
        """Every structure of units with its criterion, and the criterion's key."""
        if self.search is None:
            units = [(number, item) for number, item in enumerate(self.items) if item.structure != "weights"]
            return [
                (("items", number, "criterion"), ScoreSettings(item.structure, item.criterion, item.rows, item.modules))
                for number, item in units
            ]
        rows = self.search.rows
        return [(("search", "criterion"), ScoreSettings(*pair, rows)) for pair in self.search.criteria.items()]


def count_to_remove(remove: int | float, available: int, stay: int, units: str) -> int:
    """Number of units to remove of `available`, leaving `stay`: a share is rounded to the nearest, a half downwards.

    Raises UserError E501 when none would be removed, or too many.
    """
    if available <= stay:
        what = f"none of the {available} {units} can be removed: {stay} must stay"
        raise UserError("E501", what, "Leave out this item")
    # the share as written, as in `compressor.cost.share`
    count = math.ceil(Fraction(str(remove)) * available - Fraction(1, 2)) if isinstance(remove, float) else remove
    if count == 0:
        raise UserError(
            "E501", f"remove: {remove} is less than one of the {available} {units}", f"Use at least {1 / available:.2g}"
        )
    if count > available - stay:
        fix = f"Use at most {available - stay}"
        kept = max(available - count, 0) or "none"
        raise UserError("E501", f"remove: {remove} leaves {kept} of the {available} {units}", fix)
    return count


def least_units(item: PruneItem, layers: Sequence[Layer] | Sequence[LayerShape]) -> list[int]:
    """Number of units of an item's structure that each layer must keep."""
    return [int(layer.needed and item.structure in ("heads", "layers")) for layer in layers]


def counts_to_remove(item: PruneItem, units: Sequence[int], stay: Sequence[int]) -> list[int]:
    """Number of units to remove from each layer; spread evenly where all layers are ranked together. Raises UserError E501."""
    if not any(units):
        raise UserError("E501", f"there are no {item.structure} to remove", "Leave out this item")
    if not item.everywhere:
        of = f"{item.structure} of a layer"
        return [count_to_remove(item.remove, available, 1, of) if available else 0 for available in units]
    remaining, counts = count_to_remove(item.remove, sum(units), max(sum(stay), 1), item.structure), [0] * len(units)
    while remaining:
        layer = max(range(len(units)), key=lambda number: units[number] - stay[number] - counts[number])
        counts[layer], remaining = counts[layer] + 1, remaining - 1
    return counts


def check(config: PruneConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    tuned = [entry for entry in earlier if entry.row.trains]
    if not tuned:
        yield Problem(
            "E503", "nothing is tuned yet", "Put a tune before prune: its deltas, task head and quality are needed here"
        )
        return
    yield from merged_problems("prune", earlier)
    touched, in_every_block = _modules_tuned(earlier), _modules_tuned(earlier, in_every_block=True)
    some = next((entry for entry in tuned if entry.config.top is not None), None)
    for number, item in enumerate(config.items):
        if item.structure == "weights":
            yield from prune_weights.problems(item, number, touched, in_every_block, some)
    for key, item in config.scored:
        modules = item.modules or MODULES_OF.get(item.structure, MODULES)
        if item.criterion == "delta" and in_every_block is not None and not in_every_block & set(modules):
            why, fix = f"no stage tunes {' or '.join(modules)}", "Tune one of these modules"
            if some:
                why, fix = f"'{some.id}' trains the last {some.config.top} blocks alone", "Leave out top there"
            yield Problem("E502", f"{item.structure} by criterion delta, but {why}", f"{fix}, or use taylor or weight", key)


def _modules_tuned(earlier: tuple[Entry, ...], *, in_every_block: bool = False) -> set[str] | None:
    """Modules that have a delta so far, of some or of every block; None when all of them have."""
    touched: set[str] = set()
    omega: Entry | None = None
    for entry in earlier:
        if entry.row.chooses_places:
            omega = entry
        if not entry.row.trains or entry.config.method == "same":
            continue
        row = method(entry.config.method)
        if row.trains_base and not (in_every_block and entry.config.top):
            return None
        if not row.trains_base and row.moves_modules(entry.config, on_of(entry.config, row, omega)):
            touched |= set(entry.config.modules or (omega.config.modules if omega else DEFAULT_MODULES))
    return touched


def plan(config: PruneConfig, plan: Plan) -> Plan:
    """The plan after this stage. Raises UserError E501 and E307 before anything runs."""
    plan = pruned_plan(config, replace(plan, tuned=plan.tuned or plan.shape))
    if config.refit:
        from compressor.pruning.refit import announce

        announce(plan.model)
    return plan


def pruned_plan(config: PruneConfig, plan: Plan) -> Plan:
    """The plan after the items or the search."""
    from compressor.pruning.surgery import check_blocks, check_heads

    if config.search:
        if "heads" in config.search.structures:
            check_heads(plan.model)
        if "layers" in config.search.structures:
            check_blocks(plan.model)
        steps = steps_of_search(config.search.ranked, plan, tile_of(config.search.target))
        return replace(planned(config.search, plan), steps=steps)
    for item in config.items:
        if item.structure == "weights":
            plan = prune_weights.plan(item, plan)
            continue
        if item.structure == "heads":
            check_heads(plan.model)
        layers = plan.shape.layers
        whole_layers = item.structure == "layers"
        units = [1 if whole_layers else layer.units(item.structure) for layer in layers]
        gone = counts_to_remove(item, units, least_units(item, layers))
        kept = [total - less for total, less in zip(units, gone, strict=True)]
        if whole_layers:
            plan = without_blocks(plan, {place for place, count in enumerate(kept) if not count})
        else:
            plan = replace(plan, shape=plan.shape.with_units(item.structure, kept), steps=steps_of_item(item, plan.steps))
    return plan


def without_blocks(plan: Plan, gone: set[int]) -> Plan:
    """The plan without the blocks at these indices; a later stage must not add anything to them."""
    from compressor.pruning.surgery import Removal, remove

    remove(plan.model, {place: Removal(whole=True) for place in gone})
    return replace(plan, shape=plan.shape.without(gone))


def planned(search: TargetSearch, plan: Plan) -> Plan:
    """The plan with the shape that meets a closed-form target if all units of a structure matter equally; unchanged, as an
    upper bound, where only a measurement can decide. Raises UserError E520, E646."""
    if search.target.timed:
        check_timed(search.target, plan)
        return plan
    shape = plan.shape
    chosen = widths(search, shape, plan.tuned or plan.shape, closed_form(search.target), None)
    for structure in STRUCTURES if chosen else ():
        kept = [
            layer.units(structure) if block is None else block.get(structure, layer.units(structure))
            for block, layer in zip(chosen, shape.layers, strict=True)
        ]
        shape = shape.with_units(structure, kept)
    return without_blocks(replace(plan, shape=shape), {place for place, block in enumerate(chosen or ()) if block is None})


def lengths(config: PruneConfig) -> Iterable[tuple[tuple[str | int, ...], int]]:
    """The row length in tokens that a target refers to; none for a target of parameters."""
    if config.search and config.search.target.goal != "parameters" and config.search.target.lengths == "fixed":
        yield ("search", "target", "length"), config.search.target.length


def completed(config: PruneConfig, later: Sequence[Entry], kinds: Sequence[str]) -> PruneConfig:
    update = {"search": in_deployed_file(config.search, later, kinds)} if config.search else {}
    return config.model_copy(update=update)


def warns(config: PruneConfig, later: Sequence[Entry]) -> Iterable[str]:
    yield from warnings_of(config.search.target, later) if config.search else ()
    yield from uneven_warnings(config.items, config.search.structures if config.search else (), later)


SCORING = 6 * 512
"""Forward passes of a row that scores take, with their gradients, on some hundred rows."""
PRICED, REFITTED = 5, 4
"""Forward passes of a row: for the price of a sublayer, and of a refit, through both models for each sublayer of a block."""


def estimate(config: PruneConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    needs = needs_of_timing(config.search.target, before) if config.search else {}
    if config.refit:  # a merged copy of the model before and of the pruned one, and the hidden states of both
        states = 8 * config.refit * rows["sequences"] * rows["mean"] * before.shape.hidden
        needs["memory"] = max(4 * before.shape.bytes + states, needs.get("memory", 0))
    passes = REFITTED * (config.refit or 0)
    if config.search:
        passes += PRICED * config.search.price_rows * len(config.search.structures) * len(before.shape.layers)
    if passes:
        needs["flops"] = ((SCORING + passes) * rows["sequences"] + rows["validation"]) * before.shape.flops(rows["mean"])
    if config.refit:
        from compressor.pruning.refit import flops_under_masks

        needs["flops"] += flops_under_masks(plan)
    return needs


def _surroundings(config: PruneConfig) -> dict[str, Any]:
    """Where the result depends on this machine, what of it."""
    timed = config.search is not None and config.search.target.timed
    return surroundings(config.search.target) if timed else {}


def corrected(config: PruneConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """What an earlier version computed otherwise: `reconstruction` by Σ|W + ΔW|, or by states that did not fit where a token's
    were huge; of rows with choices the loss of each pair; targets of own lengths of prompts with their targets behind them, and
    of a last batch of fewer rows; a refit gave back what a mask hides of W alone."""
    from export.latency.passes import was_cut

    criteria = {item.criterion for item in config.items} | set(config.search.criteria.values() if config.search else ())
    of_choices = "choices" in kinds and criteria & LOSS_POWER.keys()
    of_own_lengths = config.search is not None and config.search.target.lengths == "data"
    return {
        **({"reconstruction": 3} if "reconstruction" in criteria else {}),
        **({"choices": 2} if of_choices else {}),
        **({"prompts": 2} if of_own_lengths and "generation" in kinds else {}),
        **({"rows": 2} if of_own_lengths and was_cut(config.search.target.batch) else {}),
        **({"refit": 2} if config.refit else {}),
    }


STAGE = Stage(
    name="prune",
    summary="physically remove attention heads, FFN neurons and layers, or hold single weights at zero",
    config=PruneConfig,
    produces="model",
    accepts=("model",),
    packages=("torch", "transformers", "tokenizers", "torch-pruning"),
    run="pipelines.stages.prune.run:run",
    version=11,
    scores_texts=True,
    removes=True,
    outcome="pruned",
    check=check,
    completed=completed,
    warns=warns,
    plan=plan,
    estimate=estimate,
    uses_dense=True,
    lengths=lengths,
    surroundings=_surroundings,
    corrected=corrected,
)
