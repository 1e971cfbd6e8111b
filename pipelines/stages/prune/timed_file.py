"""The file that a target is timed in: the one that is deployed, where the target names none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from compressor.errors import CheckError, UserError
from compressor.tasks.task_kind import kind_of
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import CPU, CUDA, Entry
from pipelines.stages.prune.targets import timed_packages

if TYPE_CHECKING:
    from compressor.account import Plan
    from pipelines.stages.prune.targets import Target, TargetSearch


def deployed(later: Sequence[Entry]) -> tuple[str, str] | None:
    """Runtime and precision of the file that is deployed on the CPU, of the last export before it; None where no stage does,
    the export chooses it, or has none that can be (of which `deploy` tells)."""
    place = next((place for place, entry in enumerate(later) if entry.row.serves), 0)
    exports = [entry.config for entry in later[:place] if entry.row.exports]
    if not exports or later[place].config.device != CPU:
        return None
    with contextlib.suppress(CheckError):
        return later[place].config.of_exported(exports[-1])
    return None


def in_deployed_file(search: TargetSearch, later: Sequence[Entry], kinds: Sequence[str]) -> TargetSearch:
    """A target that names neither runtime nor precision is timed in those that are deployed. Of a model that generates the
    pass over a prompt is timed, whatever is deployed."""
    if not search.target.timed or {"runtime", "precision"} & search.target.model_fields_set:
        return search
    chosen = None if any(kind_of(kind).generates for kind in kinds) else deployed(later)
    if chosen is None:
        return search
    target = search.target.model_copy(update=dict(zip(("runtime", "precision"), chosen, strict=True)))
    return search.model_copy(update={"target": target})


def warnings_of(target: Target, later: Sequence[Entry]) -> Iterable[str]:
    """Where the time of a target is not that of the file that will be deployed."""
    exports = [entry for entry in later if entry.row.exports]
    if not (target.timed and exports):
        return
    if apart := next((entry for entry in exports if not entry.config.merge), None):
        yield f"the target is timed with merged deltas, and '{apart.id}' keeps them apart (merge: false), which is slower"
    if on_card := next((entry for entry in later if entry.row.serves and entry.config.device == CUDA), None):
        yield f"the target is timed on the CPU, and '{on_card.id}' serves on CUDA, which may gain less or more"
    timed, chosen = (target.runtime, target.precision), deployed(later)
    if chosen not in (None, timed) and "precision" not in target.model_fields_set:
        one, other = (f"{RUNTIMES[runtime].title} {precision}" for runtime, precision in (timed, chosen))
        fix = "name target.runtime and target.precision (of a model that writes texts a prompt is timed, in fp32 alone)"
        yield f"the target is timed in {one}, and {other} is deployed, which may gain less or more: {fix}"


def check_timed(target: Target, plan: Plan) -> None:
    """Raises UserError E646 where the timed file would be another than the one `export` writes, E242 where it writes two for a
    model; E901 and E904 where this machine cannot time it."""
    from compressor.models.build import GENERATES, TEXT2TEXT, auto_class_of

    timed_packages(target)
    if auto_class_of(plan.model) == TEXT2TEXT:
        what = f"a target of {target.goal} times one exported file, and a model from text to text is two"
        raise UserError("E242", what, "Give a target of flops or parameters, or what to remove")

    able = [row for row in RUNTIMES.values() if row.generating]
    written = RUNTIMES[target.runtime] in able and target.precision == "fp32"
    if auto_class_of(plan.model) == GENERATES and not written:
        titles = " or ".join(row.title for row in able)
        what = f"of a model that generates the pass over a prompt is timed, in fp32 by {titles} alone"
        raise UserError("E646", what, "Leave out target.runtime and target.precision")


SECONDS_A_TABLE = 60.0
"""Estimated seconds to measure a latency table."""


def needs_of_timing(target: Target, before: Plan) -> dict[str, float]:
    """What the estimate of a timed target has of its latency table, whose models are files of a temporary folder and all open
    at once, beside the dense model and the one that is pruned; nothing for a target in closed form."""
    if not target.timed:
        return {}
    from export.latency.open_files import memory_of, table_files

    files = table_files(before.tuned or before.shape, before.model, target.precision)
    memory = 2 * before.shape.bytes + memory_of(files)
    return {"seconds": SECONDS_A_TABLE, "memory": memory, "temporary": sum(files)}
