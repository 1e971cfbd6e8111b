"""Stage `prune`: physically remove the heads and FFN neurons of least importance, or set single weights to zero."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from compressor.account import Plan
from compressor.models.modules import MODULES, STRUCTURES
from compressor.pruning_criteria import CRITERIA
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig
from pipelines.file import limits
from pipelines.stages.generating_cost import decided_by_texts, work_of_texts
from pipelines.stages.prune import prune_weights
from pipelines.stages.prune.prune_units import MODULES_OF, PruneItem, counts_to_remove, least_units
from pipelines.stages.prune.prune_weights import WeightsItem, modules_moved
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
from pipelines.stages.training_config import merged_problems


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


def check(config: PruneConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    tuned = [entry for entry in earlier if entry.row.trains]
    if not tuned:
        yield Problem(
            "E503", "nothing is tuned yet", "Put a tune before prune: its deltas, task head and quality are needed here"
        )
        return
    yield from merged_problems("prune", earlier)
    touched, in_every_block = modules_moved(earlier), modules_moved(earlier, in_every_block=True)
    some = next((entry for entry in tuned if entry.config.top is not None), None)
    for number, item in enumerate(config.items):
        if item.structure == "weights":
            yield from prune_weights.problems(item, number, touched, in_every_block, some)
    for key, item in config.scored:
        modules = item.modules or MODULES_OF.get(item.structure, MODULES)
        if CRITERIA[item.criterion].needs_change and in_every_block is not None and not in_every_block & set(modules):
            why, fix = f"no stage tunes {' or '.join(modules)}", "Tune one of these modules"
            if some:
                why, fix = f"'{some.id}' trains the last {some.config.top} blocks alone", "Leave out top there"
            what = f"{item.structure} by criterion {item.criterion}, but {why}"
            yield Problem("E502", what, f"{fix}, or use taylor or weight", key)


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


PRICED, REFITTED = 5, 4
"""Forward passes of a row: for the price of a sublayer, and of a refit, through both models for each sublayer of a block."""


def _passes_of(scored: ScoreSettings | WeightsItem) -> int:
    """Forward passes of a row for one structure's scores."""
    row = CRITERIA[scored.criterion]
    return row.passes_of_layers if scored.structure == "layers" else row.passes


def estimate(config: PruneConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    needs = needs_of_timing(config.search.target, before) if config.search else {}
    if config.refit:  # a merged copy of the model before and of the pruned one, and the hidden states of both
        states = 8 * config.refit * rows["sequences"] * rows["mean"] * before.shape.hidden
        needs["memory"] = max(4 * before.shape.bytes + states, needs.get("memory", 0))
    train, of_weights = rows["train"], [item for item in config.items if item.structure == "weights"]
    if of_weights:
        most = max(prune_weights.memory_of(item, before.shape) for item in of_weights)
        needs["memory"] = max(most, needs.get("memory", 0))
    passes = REFITTED * min(config.refit or 0, train)
    passes += sum(_passes_of(item) * min(item.rows, train) for item in [*(item for _, item in config.scored), *of_weights])
    if config.search:
        passes += PRICED * min(config.search.price_rows, train) * len(config.search.structures) * len(before.shape.layers)
    needs["flops"] = (passes * rows["sequences"] + rows["validation"]) * before.shape.flops(rows["mean"])
    if config.refit:
        from compressor.pruning.refit import flops_under_masks

        needs["flops"] += flops_under_masks(plan)
    if decided_by_texts(rows):
        generating, waiting = work_of_texts(plan.shape, rows, 1)
        needs |= {"flops": needs["flops"] + generating, "seconds": needs.get("seconds", 1.0) + waiting}
    return needs


def _surroundings(config: PruneConfig) -> dict[str, Any]:
    """Where the result depends on this machine, what of it."""
    timed = config.search is not None and config.search.target.timed
    return surroundings(config.search.target) if timed else {}


STAGE = Stage(
    name="prune",
    summary="physically remove attention heads, FFN neurons and layers, or hold single weights at zero",
    config=PruneConfig,
    produces="model",
    accepts=("model",),
    packages=("torch", "transformers", "tokenizers", "torch-pruning"),
    run="pipelines.stages.prune.run:run",
    version=12,
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
)
