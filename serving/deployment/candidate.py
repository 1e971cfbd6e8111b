"""A new version on trial: it runs under a name of its own, NAME-candidate, where no client sends requests.

Its answers must be the recorded ones, and its latency within a limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from compressor.errors import CheckError, UserError
from serving.answer_bounds import TOLERANCE, least_concordance, tolerance_alone
from serving.deployment.answers import Answer, differences
from serving.deployment.source import Options, Source
from serving.deployment.target import Target, new_record
from serving.deployment.triton_control import Control, Refused

CANDIDATE = "candidate"
"""In the name of a candidate, and the mark in its record."""
WARM_UP, ROUNDS = 3, 10
"""Untimed requests, and times that each recorded request is sent for the latency."""
SLOWER, SLACK_MS = 2.0, 5.0
"""A version is not published if the lower quartile of its requests is more than SLOWER times that of the version before, and
SLACK_MS more."""
WHAT_NEXT = "What was served before goes on; see the server's log, and compress verify RUN"


def candidate_of(model: str) -> str:
    """The name under which new versions of a model are tried."""
    return f"{model}-{CANDIDATE}"


def require_free_names(models: Sequence[str], target: Target) -> None:
    """Raises UserError E720 where the candidate of a model would have the name of another model."""
    for model in models:
        name = candidate_of(model)
        if target.files.find(target.path(name)) and not _is_marked(name, target):
            what = f"the repository has a model '{name}', and under this name new versions of '{model}' are tried"
            fix = "Choose another deploy.name; or delete that folder, if an interrupted deployment of an older release left it"
            raise UserError("E720", what, fix, target.root)


def _is_marked(name: str, target: Target) -> bool:
    versions = target.versions(name)
    return bool(versions) and all(target.record(name, version).get(CANDIDATE) for version in versions)


def drop_candidate(model: str, target: Target, control: Control | None) -> None:
    """Remove the candidate of a model that a killed deployment left; another model of that name stays."""
    name = candidate_of(model)
    if _is_marked(name, target):
        target.remove(target.path(name))
        if control is not None:
            unload(name, control)


def tried(
    source: Source, answers: Sequence[Answer], target: Target, control: Control, options: Options
) -> dict[str, float | None]:
    """Run a version as a candidate, and remove it; returns the latencies in ms, fields of `Published`.

    Raises CheckError E758 if it fails, UserError E712, E755.
    """
    name = candidate_of(source.name)
    options.say(f"{source.name}: trying the new version as {name}")
    try:
        target.put(source.version, name, 1, {}, new_record(options.run, source.sha256) | {CANDIDATE: True})
        target.set_beside(name, source.beside_as(name))
        load(source.name, control, name)
        bounds = {"tolerance": tolerance_alone(source.version), "concordance": least_concordance(source.version)}
        require_answers(source.name, answers, control, name, **bounds)
        return _require_latency(source.name, name, answers, control, options)
    finally:
        target.remove(target.path(name))  # first: a server that is gone, or closed to us, unloads nothing
        try:
            unload(name, control)
        except UserError as error:  # not raised: it would hide why the trial ended
            options.say(f"{name} is not unloaded: {error}")


def load(model: str, control: Control, name: str) -> None:
    """Load the new version of a model as `name`. Raises CheckError E758 if the server refuses, UserError E712, E755."""
    try:
        control.load(name)
    except Refused as refusal:
        raise failed(model, f"it does not load: {refusal.reason}") from refusal


def unload(name: str, control: Control) -> None:
    """Raises UserError E712, E755."""
    with contextlib.suppress(Refused):  # it was never loaded
        control.unload(name)


def failed(model: str, reason: str) -> CheckError:
    """E758: why the new version of a model is not published."""
    return CheckError("E758", f"the new version of '{model}' is not published: {reason}", WHAT_NEXT)


def require_answers(
    model: str,
    answers: Sequence[Answer],
    control: Control,
    name: str,
    version: int | None = None,
    tolerance: float = TOLERANCE,
    times: int = 1,
    concordance: float = 0.0,
) -> None:
    """Raises CheckError E758 where what is served as `name` does not answer as recorded, UserError E712."""
    try:
        wrong = differences(answers, lambda answer: control.ask(name, answer, version), tolerance, times, concordance)
    except Refused as refusal:
        raise failed(model, f"it refuses a recorded request: {refusal.reason}") from refusal
    if wrong:
        raise failed(model, f"{len(wrong)} of {len(answers)} recorded answers differ: {wrong[0]}")


def _require_latency(
    model: str, candidate: str, answers: Sequence[Answer], control: Control, options: Options
) -> dict[str, float | None]:
    """Latencies of the recorded requests, sent alone, interleaved with the version that is served now. Two versions are
    compared by their lower quartiles, which other work on the machine disturbs least; `most_ms` limits the median.

    Raises CheckError E758 above the limit."""
    names = [candidate, model] if control.ready(model) else [candidate]
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(WARM_UP + ROUNDS):
        for answer in answers:
            for name in names:
                seconds = _seconds(name, answer, control)
                if round_ >= WARM_UP and seconds is not None:
                    times[name].append(1000 * seconds)
    ms, ms_before = (_quantile(times.get(name), 0.25) for name in (candidate, model))
    median_ms = _quantile(times[candidate], 0.5)
    if options.most_ms is not None and median_ms is None:
        raise failed(model, "it answered none of the recorded requests when their time was taken")
    if options.most_ms is not None and median_ms > options.most_ms:
        raise failed(model, f"the median latency of a request is {median_ms:.3g} ms, allowed {options.most_ms:g}")
    if options.most_ms is None and ms_before is not None and ms > max(SLOWER * ms_before, ms_before + SLACK_MS):
        what = (
            f"the lower quartile of the latencies is {ms:.3g} ms, {ms / ms_before:.1f} times that before ({ms_before:.3g} ms)"
        )
        raise failed(model, f"{what}; --max-ms allows it")
    return {"median_ms": median_ms, "ms": ms, "ms_before": ms_before}


def _quantile(milliseconds: list[float] | None, share: float) -> float | None:
    return float(np.quantile(milliseconds, share)) if milliseconds else None


def _seconds(name: str, answer: Answer, control: Control) -> float | None:
    """None where the version that is served does not take these inputs."""
    try:
        return control.seconds(name, answer)
    except Refused:
        return None
