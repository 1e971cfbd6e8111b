"""Meeting the target of a prune: widths are chosen from measured prices, tested, and applied."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.accelerator import accelerated, batches_on
from compressor.cost import shape_of
from compressor.deltas.links import merge_all, merged_copy
from compressor.errors import UserError
from compressor.pruning.prices import HOW, prices_of, trials
from compressor.pruning.scores import lowest, units_of
from compressor.pruning.search import Prices, Widths
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.data import Data, tensor_batches
from export.latency.core_time import disturbance
from export.latency.passes import Pass, passes_of, rows_of
from export.latency.table import KNOTS, LatencyTable, Workload, exported, measure_table, steps, times_of, turns
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.environment import accelerator, distribution
from pipelines.engine.stage import Inputs, Workspace
from pipelines.engine.store import digest, fingerprint
from pipelines.stages.loading import load_model
from pipelines.stages.once import once
from pipelines.stages.prune.remove_units import cut, score
from pipelines.stages.prune.targets import ScoreSettings, Target, TargetSearch, closed_form, surroundings, widths

MISS = 0.03
"""Relative excess over the target's time that is accepted; above it the widths are chosen again."""

GIVEN_AWAY = 0.03
"""Share of the target's time that a model may stay below it; below that more units are kept, for quality's sake."""

OFF = 0.1
"""Largest relative error of a latency table that is corrected: it limits how much the next widths change."""

DISTURBED = 1.25
"""Factor between the measurement and the prediction of the first widths beyond which other work is suspected."""

DISTURBANCE = "these differ as if other work had disturbed the measurement"

AGAIN = "--force STAGE measures again"

TRIES = 4
"""Largest number of times that widths are chosen and measured."""

ORDINALS = ("first", "second", "third", "fourth")

UNTIMED = ("id2label", "label2id", "_name_or_path", "architectures", "transformers_version")
"""Keys of config.json that do not affect the latency of a graph beyond its shape."""

TABLE = 2
"""Version of how a latency table is measured: increased when equal facts give other times, so that it is measured again."""


@dataclass(frozen=True)
class TargetTrial:
    """Measured widths (None: nothing is removed): milliseconds of the dense and of the pruned model, and the table's
    prediction; `waited` is the share of time that their processes waited for a core."""

    widths: Widths | None
    predicted: float
    dense_ms: float
    ms: float
    waited: float = 0.0

    def excess(self, target: Target) -> float:
        """The measured time over the maximum allowed: at most 1 where the target is met."""
        return self.ms / target.budget(self.dense_ms)

    def to_json(self, target: Target) -> dict[str, float]:
        """Record of the trial, `measured` in the target's unit."""
        measured = target.reached(self.ms, self.dense_ms)
        times = {"dense_ms": self.dense_ms, "ms": self.ms, "waited": self.waited}
        return {"predicted": self.predicted, "measured": measured, **times}


def settled(
    choose: Callable[..., Widths | None],
    trial: Callable[[Widths], TargetTrial],
    target: Target,
    first: tuple[float, TargetTrial] | None = None,
) -> list[TargetTrial]:
    """The trials made until the measured time meets a timed target from both sides; `best_of` says which to use.

    `choose` finds the widths that cost a share (1) of what the target allows by the latency table, or raises UserError E520.
    If they measure slower than allowed, or faster than requested, the table is corrected for the next ones. `first` is a trial
    that there is already, with its share.
    """
    share, attempt = first or (1.0, trial(choose()))
    shares, tried = [share], [attempt]
    while len(tried) < TRIES and not 1 - GIVEN_AWAY <= tried[-1].excess(target) <= 1 + MISS:
        shares.append(next_share(shares, [attempt.excess(target) for attempt in tried]))
        try:
            chosen = choose(shares[-1])
        except UserError:  # E520: no more can be saved
            break
        if chosen is None or chosen in [attempt.widths for attempt in tried]:
            break
        tried.append(trial(chosen))
    return tried


def next_share(shares: Sequence[float], excesses: Sequence[float]) -> float:
    """The share to try after these gave these times, relative to the maximum allowed: interpolated between the nearest that
    were too slow and too fast; without both the last one, corrected by its error, by at most OFF."""
    points = sorted(zip(excesses, shares, strict=True))
    fast, slow = [point for point in points if point[0] < 1], [point for point in points if point[0] > 1]
    if not fast or not slow:
        return shares[-1] / min(max(excesses[-1], 1 - OFF), 1 + OFF)
    (below, smaller), (above, larger) = fast[-1], slow[0]
    return smaller * (larger / smaller) ** (math.log(below) / math.log(below / above))


def best_of(tried: Sequence[TargetTrial], target: Target) -> TargetTrial:
    """The trial to use: of those that meet the target the slowest, which keeps most; else the fastest."""
    met = [attempt for attempt in tried if attempt.excess(target) <= 1 + MISS]
    return max(met, key=lambda attempt: attempt.excess(target)) if met else min(tried, key=lambda attempt: attempt.ms)


def lowest_of(chosen: Widths, scores: Mapping[str, Sequence[Any]]) -> dict[int, Removal]:
    """The units to remove from every block: those with the lowest scores (tensors), until the widths are reached."""
    removals = {}
    for place, kept in enumerate(chosen):
        if kept is None:
            removals[place] = Removal(whole=True)
            continue
        own_scores = {name: scores[name][place] for name in kept}
        gone = {name: lowest([values], [len(values) - kept[name]])[0] for name, values in own_scores.items()}
        if any(gone.values()):
            removals[place] = Removal(**gone)
    return removals


def latency_table(target: Target, dense: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> LatencyTable:
    """The latency table for the dense model's shape on this machine: read from the cache if it was measured before, and not
    beside other work.

    Raises UserError E803 if the file belongs to another table, E901 if the runtime is missing.
    """
    workload = workload_of(target, inputs, data)
    if isinstance(workload, Pass) and (rows := workload.shapes[0][0]) < target.batch:
        workspace.say(f"the target is timed in a batch of {rows} rows, not {target.batch}: there are no more validation rows")
    facts = facts_of(target, workload, dense, inputs)
    name = table_name(facts)

    def measure() -> bytes:
        with workspace.progress(f"measuring {name}", steps(dense, turns(workload, target.rounds))) as bar:
            table = measure_table(
                dense,
                data.traced,
                facts,
                workload=workload,
                runtime=target.runtime,
                precision=target.precision,
                threads=inputs.threads,
                rounds=target.rounds,
                on_step=bar.advance,
            )
        return table.to_json().encode()

    def disturbed(content: bytes) -> str:
        return disturbance(LatencyTable.from_json(content.decode(), facts).waited)

    table = LatencyTable.from_json(once(name, measure, workspace, refused=disturbed).decode(), facts)
    if told := disturbance(table.waited):
        workspace.say(f"{name}: {told} ({AGAIN})")
    return table


def prices(
    search: TargetSearch,
    scores: Mapping[str, Sequence[Tensor]],
    model: nn.Module,
    inputs: Inputs,
    data: Data,
    workspace: Workspace,
) -> Prices:
    """Cost of removing the lowest units of every block, measured on training rows once per model and scores.

    Raises UserError E521, E803 where the file is damaged.
    """
    alike = [torch.zeros(units) for units in units_of(model, "layers")]
    order = {structure: scores.get(structure, alike) for structure in search.structures}

    def measure() -> bytes:
        inputs.require_unchanged()
        batches = list(tensor_batches(data.train.sample(search.price_rows), data.pad_id, data.batch_size))
        steps, merged = len(batches) * trials(model, search.structures), merged_copy(model)
        with workspace.progress("measuring the loss of removing units", steps) as bar, accelerated(merged) as device:
            losses = prices_of(merged, order, batches_on(device, batches), data.kind, bar.advance)
        return json.dumps({structure: [block.tolist() for block in blocks] for structure, blocks in losses.items()}).encode()

    before = inputs.nearest("model")
    ranks = {structure: [torch.argsort(block, stable=True).tolist() for block in blocks] for structure, blocks in order.items()}
    facts = {
        # the id stands for the task's rows, the digest for what training made of them, which --force may change
        "model": [before.id, digest(before)],
        "ranks": ranks,
        "rows": search.price_rows,
        "threads": inputs.threads,
        "how": [*HOW, distribution("torch"), *filter(None, [accelerator()])],
    }
    text = once(f"prices-{fingerprint(facts)[:16]}", measure, workspace)
    try:
        return {structure: [np.array(block, dtype=float) for block in blocks] for structure, blocks in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            "E803", "the measured losses of units are unreadable", "Delete the file: they are measured again"
        ) from error


def table_name(facts: Mapping[str, Any]) -> str:
    """The file name of a table of these facts."""
    return f"latency-{fingerprint(dict(facts))[:16]}"


def workload_of(target: Target, inputs: Inputs, data: Data) -> Workload:
    """What a timed target is timed on: a fixed shape, or the validation rows that `benchmark` times, as they come."""
    if target.lengths == "fixed":
        return target.batch, target.length
    rows = data.validation.draw(rows_of(target.batch), inputs.seed).requests
    return next(made for made in passes_of(rows, data.pad_id, [target.batch]) if made.order == "arrival")


def facts_of(target: Target, workload: Workload, dense: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Everything that affects the content of a latency table."""
    # the shape does not include the activation and the attention window
    config = {key: value for key, value in dense.config.to_dict().items() if key not in UNTIMED}
    return {
        "architecture": dense.config.model_type,
        "config": fingerprint(config),
        "shape": asdict(shape_of(dense)),
        "knots": KNOTS,
        "version": TABLE,
        "batch": target.batch,
        "length": workload.shapes if isinstance(workload, Pass) else target.length,
        "precision": target.precision,
        "rounds": target.rounds,
        "threads": inputs.threads,
        **surroundings(target),
    }


def measured(
    target: Target, dense: nn.Module, pruned: nn.Module, inputs: Inputs, data: Data, workspace: Workspace
) -> list[float]:
    """Milliseconds of the dense and the pruned model (no chains), exported and timed in one interleaved run, and the share of
    time in which their processes waited for a core."""
    workload = workload_of(target, inputs, data)
    with (
        tempfile.TemporaryDirectory() as scratch,
        workspace.progress("measuring the target", turns(workload, target.rounds)) as bar,
    ):
        pair = (("dense", dense), ("pruned", pruned))
        how = (target.precision, target.runtime)
        variants = [exported(name, model, data.traced, Path(scratch), *how) for name, model in pair]
        options = {"threads": inputs.threads, "seed": inputs.seed, "on_round": bar.advance}
        times = times_of(variants, workload, target.rounds, **options)
    return [times.ms["dense"], times.ms["pruned"], times.waited]


def meet(
    search: TargetSearch, model: nn.Module, base: nn.Module | None, inputs: Inputs, data: Data, workspace: Workspace
) -> dict[str, Any]:
    """Find the widths that meet a target, for a time by measuring the resulting models, and prune to them.

    Returns the target's record. Raises UserError E520 (out of reach), E803, E901, and what `cut` raises.
    """
    target = search.target
    dense = merge_all(load_model(inputs.dense, inputs.base))
    table = latency_table(target, dense, inputs, data, workspace) if target.timed else None
    measure = table.ms if table else closed_form(target)
    dense_cost, before = measure(shape_of(dense)), shape_of(model)
    record = request_of(search, table)

    def trial(chosen: Widths | None) -> TargetTrial:
        candidate = merged_copy(model)
        if chosen:
            remove(candidate, lowest_of(chosen, scores))
        predicted = target.reached(measure(shape_of(candidate)), dense_cost)
        return TargetTrial(chosen, predicted, *measured(target, dense, candidate, inputs, data, workspace))

    spent = measure(before) / target.budget(dense_cost)
    first = (spent, trial(None)) if table and spent <= 1 else None
    if spent <= 1 and (first is None or first[1].excess(target) <= 1 + MISS):
        workspace.say(f"{target.say(target.value)} is met already: nothing is removed")
        tried = [first[1]] if first else []
    else:
        find_widths = partial(widths, search, before, shape_of(dense), measure)
        with told_of_other_work(table):
            find_widths(None)  # report a target out of reach before prices are measured
        settings = [ScoreSettings(*pair, search.rows) for pair in search.criteria.items()]
        scores = {setting.structure: score(setting, model, base, inputs.seed, data, workspace) for setting in settings}
        choose = partial(find_widths, prices(search, scores, model, inputs, data, workspace))  # of the share that may be spent
        tried = settled(choose, trial, target, first) if table else []
        chosen = best_of(tried, target).widths if tried else choose()
        if chosen is not None:
            record["widths"] = chosen
            record["parity"] = cut("target", lowest_of(chosen, scores), model, base, data, workspace)
    record["tried"] = [attempt.to_json(target) for attempt in tried]
    used = tried.index(best_of(tried, target)) if tried else 0
    record |= record["tried"][used] if tried else {"predicted": target.reached(measure(shape_of(model)), dense_cost)}
    which = f"; the {ORDINALS[used]} widths are used" if used < len(tried) - 1 else ""
    sentence = f"target {target.say(target.value)}, {say_tried(target, record['tried'] or [record])}{which}"
    if why := disturbance_of(target, tried):
        sentence = f"{sentence}; {why} ({AGAIN})"
    timed_in = f" ({RUNTIMES[target.runtime].title} {target.precision})" if target.timed else ""
    workspace.say(f"{sentence}{timed_in}")
    return {**record, "told": sentence}


@contextlib.contextmanager
def told_of_other_work(table: LatencyTable | None) -> Iterator[None]:
    """Where a target is out of reach (UserError E520) by a table that was measured beside other work, say that first."""
    try:
        yield
    except UserError as error:
        told = disturbance(table.waited) if table else ""
        if error.code != "E520" or not told:
            raise
        fix = f"Stop what else runs on this machine, then {AGAIN}"
        raise UserError("E520", f"{error.what}; while the times were taken, {told}", fix) from error


def disturbance_of(target: Target, tried: Sequence[TargetTrial]) -> str:
    """What says that other work disturbed the measurements; '' where nothing does."""
    told = disturbance(max((attempt.waited for attempt in tried), default=0.0))
    return told or (DISTURBANCE if tried and is_disturbed(target, tried[0]) else "")


def is_disturbed(target: Target, first: TargetTrial) -> bool:
    """Whether the first measurement is farther from its prediction than the error of a latency table explains."""
    return not 1 / DISTURBED <= target.reached(first.ms, first.dense_ms) / first.predicted <= DISTURBED


def request_of(search: TargetSearch, table: LatencyTable | None) -> dict[str, Any]:
    """The part of the target's record that describes what was requested."""
    target = search.target
    record = {"goal": target.goal, "value": target.value, **search.model_dump(exclude={"target"}), "criterion": search.criteria}
    if table:
        record |= {"table": table_name(table.facts), **target.model_dump(include={"batch", "precision", "runtime"})}
        record["length"] = target.length if target.lengths == "fixed" else None
    return record


def say_tried(target: Target, tried: Sequence[Mapping[str, float]]) -> str:
    """'predicted 3.00x, measured 2.90x, then predicted 3.12x, measured 3.02x'."""
    kinds = ("predicted", "measured")
    return ", then ".join(
        ", ".join(f"{kind} {target.say(attempt[kind])}" for kind in kinds if kind in attempt) for attempt in tried
    )
