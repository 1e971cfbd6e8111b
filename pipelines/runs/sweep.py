"""Several runs of one pipeline that differ in a few keys, summarized by mean and standard deviation of quality.

A sweep over values runs the same pipeline at several values of one key (a family of targets, say) and compares them; a target
out of reach is a result, too, and does not end the sweep.

Three independent parts: `variants_of` lists the runs, `in_turn` runs them (the part that a distributed
engine replaces), `summarize` computes the result. The stability measure is that of the SAM paper (Fu et al., 2023, tables 1
and 2): the standard deviation over seeds, or over random 90 % subsets of the training data.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from compressor.errors import CompressError, UserError, UserErrors
from compressor.tasks.reading import check_data
from pipelines.engine.attempt import last_attempt
from pipelines.engine.preflight import check_folder, check_inputs
from pipelines.engine.runner import run_pipeline
from pipelines.engine.store import write_atomic
from pipelines.file.config import Pipeline, load_pipeline
from pipelines.file.yaml_source import parse

SHARE = 0.9
"""Share of the training rows in each random subset, as in the SAM paper."""

COLUMNS = ("stage", "metric", "N", "mean", "std", "min", "max", "each run")

Kind = Literal["seeds", "subsets", "values"]

Quality = dict[str, dict[str, float]]
"""Stage id -> metric -> value, of one run; with a target, also its predicted and measured values."""

Outcome = Quality | UserError
"""Result of a variant: an error means that its target is out of reach."""

OUT_OF_REACH = "E520"


@dataclass(frozen=True)
class SweepVariant:
    """One run of a sweep: its name, and the keys it sets in the pipeline file, `task.subset` -> value."""

    name: str
    overrides: dict[str, Any]

    @property
    def settings(self) -> list[str]:
        """The overrides in the form of `compress run --set`: JSON is valid YAML."""
        return [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]


@dataclass(frozen=True)
class Spread:
    """One metric of one stage over the runs that have it. `std` is the sample's standard deviation (n - 1), 0 for a single run;
    `values` are in the order of the variants, None for one without the metric."""

    stage: str
    metric: str
    runs: int
    mean: float
    std: float
    min: float
    max: float
    values: tuple[float | None, ...]

    def cells(self) -> tuple[str, ...]:
        """The table row for COLUMNS."""
        mean, std, low, high, *values = (f"{value:.4f}" for value in (self.mean, self.std, self.min, self.max, *self.values))
        return self.stage, self.metric, str(self.runs), mean, std, low, high, " ".join(values)


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep: the folder with sweep.json, sweep.md and a run folder for each variant; the summary, and its table; the
    errors of variants whose target is out of reach; the checks that failed and ended no run, as `RunResult.failures`, each with
    its variant in `stage`."""

    folder: Path
    spreads: list[Spread]
    columns: tuple[str, ...] = COLUMNS
    rows: tuple[tuple[str, ...], ...] = ()
    unreached: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[dict[str, Any], ...] = ()


Execute = Callable[[Sequence[SweepVariant], Callable[[SweepVariant], Outcome], Callable[[str], None]], list[Outcome]]
"""An engine: runs every variant with the given function and reports progress; returns outcomes in the variants' order."""


def in_turn(
    variants: Sequence[SweepVariant], run: Callable[[SweepVariant], Outcome], say: Callable[[str], None]
) -> list[Outcome]:
    """The local engine: runs one variant after the other in this process. The first that fails ends the sweep."""
    outcomes: list[Outcome] = []
    for number, variant in enumerate(variants, start=1):
        say(f"variant {number} of {len(variants)}: {variant.name}")
        try:
            outcomes.append(run(variant))
        except CompressError:
            say(f"{len(outcomes)} of {len(variants)} variants are finished and kept. The same command continues.")
            raise
    return outcomes


def sweep(
    path: Path,
    kind: Kind,
    runs: int | None,
    out: Path,
    *,
    share: float | None = None,
    over: str | None = None,
    overrides: Sequence[str] = (),
    until: str | None = None,
    stage: str | None = None,
    say: Callable[[str], None] = print,
    execute: Execute = in_turn,
) -> SweepResult:
    """Run a pipeline file `runs` times (with kind values, once for each value of `over`: 'KEY=VALUE,VALUE') and summarize the
    quality of `stage`, or of every stage up to `until`.

    Every variant is an ordinary run in `out`/NAME-sweep-KIND/VARIANT on the store of `out`: what they share is made once, and a
    sweep that was stopped goes on where it was. `until` defaults to the last stage that changes the model.

    Nothing is written before every variant's file and data are validated. Raises UserError E115 (invalid sweep), E111 (unknown
    stage id), E1xx, E2xx, E3xx, E801; and what `run_pipeline` raises, naming the variant (E520 only if no value is within
    reach).
    """
    pipeline = load_pipeline(path, overrides)
    variants = values_of(pipeline, over) if kind == "values" else variants_of(pipeline, kind, runs, share)
    until = until or last_model(pipeline)
    stages = measured(pipeline, until, stage)
    folder = out / f"{pipeline.name}-sweep-{kind}"
    check_inputs(pipeline)
    check_folder(out, folder.name)
    # all are read now: editing the file during a long sweep must not affect later variants
    pipelines = {variant.name: _pipeline_of(variant, path, overrides, folder.name) for variant in variants}

    def run(variant: SweepVariant) -> Outcome:
        try:
            with _naming(variant):
                return quality_of(run_pipeline(pipelines[variant.name], out, until=until).artifacts, stages)
        except UserError as error:
            if kind != "values" or error.code != OUT_OF_REACH:
                raise
            say(str(error))
            return error

    for name in ("sweep.json", "sweep.md"):  # left by an earlier sweep
        (folder / name).unlink(missing_ok=True)
    outcomes = execute(variants, run, say)
    errors = {
        variant.name: outcome for variant, outcome in zip(variants, outcomes, strict=True) if isinstance(outcome, UserError)
    }
    if len(errors) == len(variants):
        raise UserErrors(list(errors.values()))
    spreads = summarize([{} if isinstance(outcome, UserError) else outcome for outcome in outcomes])
    facts = {"pipeline": pipeline.name, "model": pipeline.model, "set": list(overrides), "stability": kind, "until": until}
    unreached = {name: error.what for name, error in errors.items()}
    failures = tuple(failure for variant in variants for failure in _failures(folder, variant))
    result = SweepResult(folder, spreads, *table_of(kind, variants, spreads), unreached, failures)
    write_summary(result, facts, variants)
    return result


def variants_of(pipeline: Pipeline, kind: Kind, runs: int, share: float | None = None) -> list[SweepVariant]:
    """Variants of a stability sweep: `seeds`, the pipeline's seed + 0, 1, ...; `subsets`, its seed and subset seeds 0, 1, ...

    Raises UserError E115.
    """
    _one_task(pipeline)
    if runs < 2:
        raise UserError("E115", f"--runs {runs}: a spread needs at least 2 runs", "Give 2 or more; the SAM paper takes 10")
    if kind == "seeds":
        if share is not None:
            raise UserError("E115", "--share is not used with --stability seeds", "Drop it, or use --stability subsets")
        return [SweepVariant(f"seed-{seed}", {"seed": seed}) for seed in range(pipeline.seed, pipeline.seed + runs)]
    share = SHARE if share is None else share
    if not 0 < share < 1:
        raise UserError("E115", f"--share {share:g} is no part of the training rows", "Give a number between 0 and 1, e.g. 0.9")
    if pipeline.task.subset is not None:
        where = pipeline.source.where(("task", "subset"))
        raise UserError("E115", "the pipeline trains on a subset already", "Remove the key: the sweep draws its own", where)
    return [SweepVariant(f"subset-{seed}", {"task.subset": {"share": share, "seed": seed}}) for seed in range(runs)]


def values_of(pipeline: Pipeline, over: str) -> list[SweepVariant]:
    """One variant for each value of 'KEY=VALUE,VALUE'. Raises UserError E115 (and E101, E104 for an invalid value)."""
    _one_task(pipeline)
    key, equals, text = over.partition("=")
    words = [word.strip() for word in text.split(",")]
    fix = "Write KEY=VALUE,VALUE with two values or more, each once, e.g. prune.target.speedup=1.5,2"
    if not equals or len(words) < 2 or "" in words:
        raise UserError("E115", f"--over {over}: no key with several values", fix)
    values = [parse(word, f"--over {over}").data for word in words]
    if any(values.count(value) > 1 for value in values):
        raise UserError("E115", f"--over {over}: a value appears twice", fix)
    names = [f"{key.split('.')[-1]}-{re.sub(r'[^A-Za-z0-9_.-]', '_', word)}" for word in words]
    if len(set(names)) < len(names):  # a/b and a b give the same folder name
        names = [f"{name}-{number}" for number, name in enumerate(names, start=1)]
    return [SweepVariant(name, {key: value}) for name, value in zip(names, values, strict=True)]


def _one_task(pipeline: Pipeline) -> None:
    if pipeline.tasks:
        raise UserError("E115", "a sweep measures one task, the pipeline has `tasks`", "Give it one: `task` instead of `tasks`")


def table_of(
    kind: Kind, variants: Sequence[SweepVariant], spreads: Sequence[Spread]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """(columns, rows) of the summary: mean and spread over runs that should agree, one column for each of several values."""
    if kind != "values":
        return COLUMNS, tuple(spread.cells() for spread in spreads)
    rows = (
        (spread.stage, spread.metric, *("" if value is None else f"{value:.4f}" for value in spread.values))
        for spread in spreads
    )
    return ("stage", "metric", *(variant.name for variant in variants)), tuple(rows)


def summarize(qualities: Sequence[Quality]) -> list[Spread]:
    """The spread of every metric of every stage over two or more runs; a run without a result is {}."""
    spreads = []
    for stage, metrics in next(filter(None, qualities)).items():
        for metric in metrics:
            values = tuple(quality[stage][metric] if quality else None for quality in qualities)
            reached = [value for value in values if value is not None]
            std = statistics.stdev(reached) if len(reached) > 1 else 0.0
            spreads.append(
                Spread(stage, metric, len(reached), statistics.fmean(reached), std, min(reached), max(reached), values)
            )
    return spreads


def last_model(pipeline: Pipeline) -> str:
    """The last stage that changes the model. Raises UserError E115 when there is none."""
    # a merged model is bit-equal to the model before it, so its quality is not measured again
    ids = [entry.id for entry in pipeline.stages if entry.row.publishes_model and not entry.row.merges]
    if not ids:
        raise UserError("E115", "no stage of this pipeline measures quality", "Add a tune", pipeline.source.where(("stages",)))
    return ids[-1]


def measured(pipeline: Pipeline, until: str, stage: str | None) -> tuple[str, ...]:
    """The stages whose quality is summarized: every one up to `until` that produces a model, or `stage` alone.

    Raises UserError E111 (unknown, or after `until`), E115 (yields no model).
    """
    last = pipeline.number(until, "--until")
    ids = tuple(entry.id for entry in pipeline.stages[: last + 1] if entry.row.publishes_model)
    if stage is None:
        if not ids:
            raise UserError("E115", f"--until {until}: nothing measures quality up to there", "Name a later stage, or drop it")
        return ids
    if pipeline.number(stage, "--stage") > last:
        raise UserError("E111", f"--stage {stage} comes after --until {until}", "Name a later --until")
    if stage not in ids:
        raise UserError("E115", f"--stage {stage}: it measures no quality", f"Stages that do: {', '.join(ids) or 'none'}")
    return (stage,)


def quality_of(artifacts: dict[str, Any], stages: Sequence[str]) -> Quality:
    """The metrics in the artifacts' metadata: every float of `quality`, which excludes its interval and row count, and of the
    `tests`, with the name of the file."""
    qualities = {}
    for stage in stages:
        metadata = artifacts[stage].metadata
        files, target = {"": metadata["quality"], **metadata.get("tests", {})}, metadata.get("target", {})
        qualities[stage] = {
            f"{name}, {file}" if file else name: value
            for file, facts in files.items()
            for name, value in facts.items()
            if isinstance(value, float)
        }
        qualities[stage] |= {name: target[name] for name in ("predicted", "measured") if name in target}
    return qualities


def write_summary(result: SweepResult, facts: dict[str, Any], variants: Sequence[SweepVariant]) -> None:
    """Write sweep.json and sweep.md, without times and machine, so that equal work gives equal bytes."""
    folder, columns, values = result.folder, result.columns, facts["stability"] == "values"
    left_out = ("runs", "mean", "std", "min", "max") if values else ()
    summary = [{key: value for key, value in asdict(spread).items() if key not in left_out} for spread in result.spreads]
    unreached = {"unreached": dict(result.unreached)} if result.unreached else {}
    content = {**facts, "variants": [asdict(variant) for variant in variants], "summary": summary, **unreached}
    write_atomic(folder / "sweep.json", f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode())
    rows = [columns, ("---", "---", *("---:",) * (len(columns) - 2)), *result.rows]
    keys = [("variant", "sets"), ("---", "---"), *((variant.name, f"`{' '.join(variant.settings)}`") for variant in variants)]
    text = "\n\n".join(
        (
            f"# {facts['pipeline']}: {'' if values else 'stability over '}{len(variants)} {facts['stability']}",
            f"Quality on all validation rows{'' if values else '; std is the standard deviation of the sample (n − 1)'}.",
            *("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, keys)),
            *(f"{name}: {reason}." for name, reason in result.unreached.items()),
        )
    )
    write_atomic(folder / "sweep.md", f"{text}\n".encode())


def _failures(folder: Path, variant: SweepVariant) -> Iterator[dict[str, Any]]:
    """The failed checks of a variant's run; read from its folder, because an engine may have run it anywhere."""
    attempt = last_attempt(folder / variant.name)
    for failure in attempt.failures if attempt else ():
        yield {**failure.model_dump(), "stage": f"{failure.stage} ({variant.name})"}


def _pipeline_of(variant: SweepVariant, path: Path, overrides: Sequence[str], folder: str) -> Pipeline:
    """The variant's pipeline, its data checked; its name is the path of its run folder below `out`."""
    pipeline = load_pipeline(path, [*overrides, *variant.settings])
    with _naming(variant):
        check_data(pipeline.task)
    return replace(pipeline, name=f"{folder}/{variant.name}")


@contextlib.contextmanager
def _naming(variant: SweepVariant) -> Iterator[None]:
    """Context in which errors keep their class and code, and name the variant."""
    try:
        yield
    except CompressError as error:
        several = error.errors if isinstance(error, UserErrors) else [error]
        place = f"variant {variant.name}"
        named = [
            type(fault)(fault.code, fault.what, fault.fix, f"{place}, {fault.where}" if fault.where else place)
            for fault in several
        ]
        raise UserErrors(named) if isinstance(error, UserErrors) else named[0] from error
