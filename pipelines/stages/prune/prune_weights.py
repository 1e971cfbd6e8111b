"""Items of stage `prune` that remove single weights: their config, their closed form, and their application."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictFloat, Tag, model_validator

from compressor.account import Plan, Sparsity
from compressor.cost import ModelShape, share
from compressor.errors import UserError
from compressor.methods import method
from compressor.models.modules import MODULES, STRUCTURES, Modules
from compressor.pruning_criteria import (
    CRITERIA,
    LOSS_POWER,
    UNSTRUCTURED,
    Hides,
    NofM,
    Pattern,
    WeightCriterion,
    require_rows_used,
)
from pipelines.engine.stage import Entry, Problem
from pipelines.file import limits
from pipelines.stages.prune.uneven_layers import check_pattern_fits
from pipelines.stages.training_config import DEFAULT_MODULES, on_of

Share = Annotated[StrictFloat, Field(gt=0, lt=1)]


class Shares(BaseModel):
    """Shares to remove from each pool of `delta_or_weight`: of the matrices that have a ΔW, and of the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapted: Share = Field(description="share removed from the matrices with a ΔW")
    others: Share = Field(description="share removed from all other matrices")


OneOrTwo = Annotated[
    Annotated[Share, Tag("one")] | Annotated[Shares, Tag("two")],
    Discriminator(lambda value: "two" if isinstance(value, dict | Shares) else "one"),
]
"""Config type of a share, or of one share for each pool."""


class WeightsItem(BaseModel):
    """Set single weights to zero, the lowest scores first: a share of them, or all but n of m in a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    structure: Literal["weights"] = Field(description="single weights, which are held at zero")
    pattern: Pattern = Field(default=UNSTRUCTURED, description="unstructured, or n:m: at most n of m consecutive inputs stay")
    criterion: WeightCriterion = Field(
        default="delta_or_weight", description="delta_or_weight: |ΔW| where a matrix has one, |W| where not, two pools"
    )
    scope: Literal["matrix", "global"] | None = Field(
        default=None, description="unstructured: a share of each matrix, or of all together (default)"
    )
    remove: OneOrTwo | None = Field(
        default=None, description="unstructured: the share that is zero afterwards, or {adapted: , others: } of delta_or_weight"
    )
    modules: Modules = Field(default=MODULES, description="linear layers whose weights may be removed, default all")
    rows: int = Field(default=512, ge=1, le=limits.ROWS, description="training rows that taylor and fisher use")
    # without a default value, so that results of pipelines without this key keep their fingerprints
    hides: Hides | None = Field(
        default=None, description="what the mask hides: base and delta (both, default), or the base's weight alone (weight)"
    )

    @model_validator(mode="after")
    def _keys_fit_the_pattern(self) -> WeightsItem:
        if self.nm is not None and (self.remove is not None or self.scope is not None):
            raise ValueError(f"pattern {self.pattern} fixes what is removed: leave out remove and scope")
        if self.nm is None and self.remove is None:
            raise ValueError("an unstructured item needs remove, the share of the weights to remove")
        if isinstance(self.remove, Shares) and not CRITERIA[self.criterion].two_pools:
            raise ValueError(f"criterion {self.criterion} has one pool: give remove as one share")
        return self

    @model_validator(mode="after")
    def _rows_are_used(self) -> WeightsItem:
        require_rows_used(self.model_fields_set, [self.criterion], LOSS_POWER)
        return self

    @property
    def nm(self) -> NofM | None:
        """The numbers of an n:m pattern; None for unstructured."""
        return NofM.parse(self.pattern)

    def share_of(self, adapted: bool) -> float:
        """Share to remove from the pool of adapted matrices, or from that of the others."""
        if isinstance(self.remove, Shares):
            return self.remove.adapted if adapted else self.remove.others
        return self.remove


EVERYWHERE = ("query", "key", "value", "output", "ffn_in", "ffn_out")
"""Modules that every architecture has."""


def problems(
    item: WeightsItem, number: int, touched: set[str] | None, in_every_block: set[str] | None, of_last_blocks: Entry | None
) -> Iterable[Problem]:
    """Faults that can be found without a model; `touched` are the modules with a ΔW in some block, `in_every_block` those in
    all blocks, None for all; `of_last_blocks` is the stage that trained the last blocks alone."""
    if item.hides == "weight" and touched is None:
        what = "hides: weight keeps ΔW apart from the weight that it hides, after method full there is no such ΔW"
        yield Problem("E412", what, "Leave out hides, or tune by another method", ("items", number, "hides"))
    if not CRITERIA[item.criterion].needs_change or in_every_block is None:
        return
    modules = EVERYWHERE if item.modules == MODULES else item.modules
    if bare := [name for name in modules if name not in in_every_block]:
        why, fix = f"no stage tunes {', '.join(bare)}", "Name the tuned modules"
        if of_last_blocks:
            trained = of_last_blocks.config.top
            why, fix = f"'{of_last_blocks.id}' trains the last {trained} blocks alone", "Leave out top there"
        what, fix = f"weights by criterion {item.criterion}, but {why}", f"{fix}, or use delta_or_weight"
        yield Problem("E502", what, fix, ("items", number, "criterion"))


def modules_moved(earlier: tuple[Entry, ...], *, in_every_block: bool = False) -> set[str] | None:
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


def filled_problems(what: str, earlier: tuple[Entry, ...], moved: set[str] | None) -> Iterable[Problem]:
    """Fault of a stage that would merge ΔW into weights that an earlier prune with hides: weight keeps at zero: the modules
    `moved` have one, and those that were refitted before that prune; None where all weights are to be trained."""
    items = [
        (place, entry.id, item)
        for place, entry in enumerate(earlier)
        if entry.row.removes
        for item in entry.config.items
        if item.structure == "weights"
    ]
    mixed = any(item.hides != "weight" for _, _, item in items)
    for number, (place, name, item) in enumerate(items):
        later = [after for _, _, after in items[number + 1 :]]
        if item.hides == "weight" and (moved is None or _is_filled(item, later, moved | _refitted(earlier[:place]))):
            told = f"{what} would fill the zeros of '{name}', which hides W alone: M ⊙ W + ΔW is dense"
            fix = "Leave out" if mixed else "Use merge: false in export, or leave out"
            yield Problem("E412", told, f"{fix} hides: weight in the prune")
            return


def _is_filled(item: WeightsItem, later: Iterable[WeightsItem], moved: set[str]) -> bool:
    """Whether `moved` modules have weights that `item` hides of W alone, and no later item has all of them under a mask over
    the sum: a share counts what is hidden already and hides it first, n:m keeps n of each group, hidden ones included."""
    filled = set(item.modules) & moved
    return bool(filled) and not any(
        after.hides != "weight" and not after.nm and filled <= set(after.modules) for after in later
    )


def _refitted(earlier: Iterable[Entry]) -> set[str]:
    """Modules whose weights an earlier refit may have changed."""
    refits = any(entry.row.removes and entry.config.refit for entry in earlier)
    return {span.columns for span in STRUCTURES.values()} if refits else set()


@dataclass(frozen=True)
class Pool:
    """Matrices (`members`: indices in a list) whose `entries` are ranked together, and the share of these to remove."""

    name: str
    members: tuple[int, ...]
    entries: int
    share: float

    @property
    def count(self) -> int:
        """⌊share × entries⌋. Raises UserError E501 when that is 0."""
        count = share(self.share, self.entries)
        if not count:
            what = f"remove: {self.share} is less than one of the {self.entries:,} weights of {self.name}"
            raise UserError("E501", what, f"Use at least {1 / self.entries:.2g}")
        return count


def pools_of(item: WeightsItem, names: Sequence[str], sizes: Sequence[int], adapted: Sequence[bool]) -> list[Pool]:
    """The pools of an unstructured item over matrices of these names and sizes, in order; `adapted`: which have a ΔW."""
    two = CRITERIA[item.criterion].two_pools
    groups: dict[tuple[str, bool], list[int]] = {}
    for number, name in enumerate(names):
        with_delta = adapted[number] and two
        pool = ("the adapted matrices" if with_delta else "the other matrices") if two else "all matrices"
        groups.setdefault((name if item.scope == "matrix" else pool, with_delta), []).append(number)
    return [
        Pool(name, tuple(members), sum(sizes[number] for number in members), item.share_of(with_delta))
        for (name, with_delta), members in groups.items()
    ]


def plan(item: WeightsItem, plan: Plan) -> Plan:
    """Count the weights to be masked. Raises UserError E302, E501 and E505 before anything runs."""
    from compressor.models.anatomy import matrices_of
    from compressor.pruning.weights import check_width

    matrices_of(plan.model, item.modules)
    matrices = plan.shape.matrices(item.modules)
    if not matrices:
        raise UserError("E501", f"no weights are left in {', '.join(item.modules)}", "Leave out this item")
    names, sizes = [name for name, _, _ in matrices], [rows * columns for _, rows, columns in matrices]
    # a number appended to each name: with scope matrix every matrix is its own pool
    places = [f"{name} {names[:number].count(name)}" for number, name in enumerate(names)]
    if item.nm:
        for name, _, columns in matrices:
            check_pattern_fits(name, item.nm, plan)
            check_width(name, columns, item.nm)
        gone = item.nm.run - item.nm.keep
        parts = [(frozenset([place]), size * gone // item.nm.run) for place, size in zip(places, sizes, strict=True)]
    else:
        blocks = zip(plan.shape.layers, tuned_modules(plan), strict=True)
        adapted = [name in tuned for layer, tuned in blocks for name in layer.modules if name in item.modules]
        pools = pools_of(item, places, sizes, adapted)
        parts = [(frozenset(places[number] for number in pool.members), pool.count) for pool in pools]
        whole = ("these modules", frozenset(places), sum(pool.count for pool in pools))
        for name, members, count in [*((pool.name, *part) for pool, part in zip(pools, parts, strict=True)), whole]:
            _more_than_before(plan, name, members, count)
    over = bool(item.nm) and any(set(names) & set(masked.modules) for masked in plan.sparsity)
    hidden, modules = sum(count for _, count in parts), tuple(dict.fromkeys(names))
    made = Sparsity(item.pattern, modules, sum(sizes), hidden, over, item.hides or "both", tuple(parts))
    return replace(plan, sparsity=(*plan.sparsity, made))


def _more_than_before(plan: Plan, name: str, members: frozenset[str], count: int) -> None:
    """Raise UserError E501 where earlier prunes are known to hide more than `count` weights of the matrices `members`."""
    gone = _known_hidden(plan, members)
    if gone > count:
        what = f"{gone:,} weights of {name} are zero already, {count:,} are to be zero in all"
        raise UserError("E501", what, "remove counts those too: give a larger share")


def _known_hidden(plan: Plan, members: frozenset[str]) -> int:
    """How many weights of the matrices `members` are zero at least: as many as one earlier prune hides in its pools, or as all
    of them hide matrix by matrix."""
    most, alone = 0, {}
    for masked in plan.sparsity:
        if not masked.nonzeros(plan.shape)[1]:  # removed units may have taken some of them
            continue
        inside = {part: hidden for part, hidden in masked.parts if part <= members}
        most = max(most, sum(inside.values()))
        alone |= {part: max(hidden, alone.get(part, 0)) for part, hidden in inside.items() if len(part) == 1}
    return max(most, sum(alone.values()))


def memory_of(item: WeightsItem, shape: ModelShape) -> int:
    """Bytes that the model and its merged copy take, and the scores of an item: of what is ranked together joined, negated and
    copied, with an int64 index and masks. Measured: a BERT's by |W|, all together, take 28 bytes a weight."""
    sizes = [rows * columns for _, rows, columns in shape.matrices(item.modules)]
    ranked = sum(sizes) if item.scope != "matrix" and not item.nm else max(sizes)
    row = CRITERIA[item.criterion]
    joined = 28 if row.by_change else 24  # with the second score
    return 2 * shape.bytes + row.held * sum(sizes) + joined * ranked


def tuned_modules(plan: Plan) -> list[set[str]]:
    """The modules with a ΔW at this point of the plan, of each block."""
    blocks = [set() for _ in plan.shape.layers]
    for trained in plan.trained:
        row, options = method(trained.method), trained.options
        if row.trains_base:
            moved, last = MODULES, options.top or len(blocks)
        else:
            moved, last = options.modules if row.moves_modules(options, options.on) else (), len(blocks)
        for block in blocks[-last:]:
            block.update(moved)
    return blocks
