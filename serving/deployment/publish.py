"""Publish new versions of a run's models beside those that are served, prove them, and take them back if they fail.

A new version first runs under a name of its own (NAME-candidate), where no client sends requests: its answers must be the
recorded ones, and its latency within a limit. Then it is published, loaded and asked again. Versions in use are never unloaded:
Triton serves the old one until the new one is ready, and the old one again where the new one is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from compressor.digests import sha256_of
from compressor.errors import CheckError, UserError
from serving.answer_bounds import TOLERANCE, tolerance_in_batches
from serving.deployment.answers import Answer, differences, read_answers
from serving.deployment.target import CONFIG, Target, new_record
from serving.deployment.triton_control import Control, Refused
from serving.repository import model_names, read_config

CANDIDATE = "candidate"
WARM_UP, ROUNDS = 3, 10
"""Untimed requests, and times that each recorded request is sent for the latency."""
TIMES = 5
"""How often a recorded request is asked of a version that other clients ask too, before its answer counts as another."""
SLOWER, SLACK_MS = 2.0, 5.0
"""A version is not published if a request takes more than SLOWER times as long as in the version before, and SLACK_MS more."""


@dataclass(frozen=True)
class Options:
    """`most_ms`: largest latency of a request, the lower quartile over all; None: relative to the version before."""

    run: str
    most_ms: float | None = None
    keep: int = 3
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Source:
    """One model of a repository that a run wrote: version 1, its config and the files that this names."""

    name: str
    folder: Path

    @property
    def version(self) -> Path:
        return self.folder / "1"

    @property
    def beside(self) -> dict[str, bytes]:
        """The config and the files that it names: path -> content."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_relative_to(self.version))
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}

    def beside_as(self, name: str) -> dict[str, bytes]:
        """The same for the model under another name."""
        config = read_config(self.folder)
        config.name = name
        return self.beside | {CONFIG: text_format.MessageToString(config).encode()}

    @cached_property
    def sha256(self) -> str:
        """Over every file: names and contents."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        listed = "".join(f"{path.relative_to(self.folder).as_posix()} {sha256_of(path)}\n" for path in files)
        return hashlib.sha256(listed.encode()).hexdigest()


@dataclass(frozen=True)
class Published:
    """A model's versions after a deployment; `fresh` is false where this very version was there already. After one is taken
    back, `version` is that which serves: None where the model is gone."""

    model: str
    version: int | None
    before: int | None
    fresh: bool
    ms: float | None = None
    ms_before: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def deploy(repository: Path, target: Target, control: Control | None, options: Options) -> list[Published]:
    """Publish every model of the folder `repository` as a new version in `target`, and load them through `control`.

    Without `control` the files are published only. Raises CheckError E758 for a version that failed; what was published is then
    taken back and what was served before goes on. Raises UserError E712, E754 to E757.
    """
    sources = [Source(name, repository / name) for name in model_names(repository)]
    answers = {source.name: read_answers(source.version) for source in sources}
    if control is not None:
        control.require_live()
    with target.locked():
        _recover([source.name for source in sources], target, control, options)
        timed = {source.name: _tried(source, answers[source.name], target, control, options) for source in sources}
        done: list[Published] = []
        try:
            for source in sources:
                published = replace(_written(source, target, options), **timed[source.name])
                done.append(published)
                if published.fresh:
                    target.set_beside(source.name, source.beside)
                if control is not None:
                    _loaded(published, source, answers[source.name], control)
                    target.mark(published.model, published.version, proven=True)
                options.say(_told(published, loaded=control is not None))
            for published in done:
                if published.fresh:
                    target.mark(published.model, published.version, finished=True)
        except BaseException:
            with contextlib.ExitStack() as each:  # the last first, and all of them, whichever fails
                for published in done:
                    each.callback(_take_back, published, target, control, options)
            raise
        for published in done:
            _prune(published.model, target, options)
    return done


def _recover(models: Sequence[str], target: Target, control: Control | None, options: Options) -> list[Published]:
    """Take back the versions of a deployment that was killed: the files of one may stand beside the config of another."""
    taken = []
    for model in models:
        _drop(f"{model}-{CANDIDATE}", target, control)
        while (versions := target.versions(model)) and not target.finished(model, versions[-1]):
            version, before = versions[-1], max(versions[:-1], default=None)
            _return(model, version, before, target, control)
            options.say(f"{model}: version {version}, whose deployment was interrupted, is taken back")
            taken.append(Published(model, before, version, fresh=False))
    return taken


def _drop(candidate: str, target: Target, control: Control | None) -> None:
    """Remove a candidate that a killed deployment left."""
    if target.versions(candidate):
        target.remove(target.path(candidate))
        if control is not None:
            _unload(candidate, control)


def _tried(
    source: Source, answers: Sequence[Answer], target: Target, control: Control | None, options: Options
) -> dict[str, Any]:
    """Run the version under a name of its own; its latency and that of the version that is served."""
    if control is None or _latest(source, target) is not None:
        return {}
    name = f"{source.name}-{CANDIDATE}"
    options.say(f"{source.name}: trying the new version as {name}")
    try:
        target.put(source.version, name, 1, {}, {})
        target.set_beside(name, source.beside_as(name))
        _load(name, control)
        _require_answers(source.name, answers, control, name)
        return _require_latency(source.name, name, answers, control, options)
    finally:
        target.remove(target.path(name))  # first: a server that is gone, or closed to us, unloads nothing
        _unload(name, control)


def _unload(candidate: str, control: Control) -> None:
    with contextlib.suppress(Refused):  # it was never loaded
        control.unload(candidate)


def _load(name: str, control: Control) -> None:
    try:
        control.load(name)
    except Refused as refusal:
        raise _failed(name, f"it does not load: {refusal.reason}") from refusal


def _failed(name: str, reason: str) -> CheckError:
    return CheckError(
        "E758", f"the new version of '{name.removesuffix(f'-{CANDIDATE}')}' is not published: {reason}", WHAT_NEXT
    )


WHAT_NEXT = "What was served before goes on; see the server's log, and compress verify RUN"


def _require_answers(
    model: str,
    answers: Sequence[Answer],
    control: Control,
    name: str,
    version: int | None = None,
    tolerance: float = TOLERANCE,
    times: int = 1,
) -> None:
    try:
        wrong = differences(answers, lambda answer: control.ask(name, answer, version), tolerance, times)
    except Refused as refusal:
        raise _failed(model, f"it refuses a recorded request: {refusal.reason}") from refusal
    if wrong:
        raise _failed(model, f"{len(wrong)} of {len(answers)} recorded answers differ: {wrong[0]}")


def _require_latency(
    model: str, candidate: str, answers: Sequence[Answer], control: Control, options: Options
) -> dict[str, float | None]:
    """Milliseconds of a recorded request, sent alone, interleaved with the version that is served now: lower quartiles, which
    other work on the machine disturbs least.

    Raises CheckError E758 above the limit."""
    names = [candidate, model] if control.ready(model) else [candidate]
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(WARM_UP + ROUNDS):
        for answer in answers:
            for name in names:
                seconds = _seconds(name, answer, control)
                if round_ >= WARM_UP and seconds is not None:
                    times[name].append(1000 * seconds)
    ms, ms_before = (_quartile(times.get(name)) for name in (candidate, model))
    if options.most_ms is not None and ms > options.most_ms:
        raise _failed(model, f"a request takes {ms:.3g} ms, allowed {options.most_ms:g}")
    if options.most_ms is None and ms_before is not None and ms > max(SLOWER * ms_before, ms_before + SLACK_MS):
        what = f"a request takes {ms:.3g} ms, {ms / ms_before:.1f} times as long as before ({ms_before:.3g} ms)"
        raise _failed(model, f"{what}; --max-ms allows it")
    return {"ms": ms, "ms_before": ms_before}


def _quartile(milliseconds: list[float] | None) -> float | None:
    return float(np.quantile(milliseconds, 0.25)) if milliseconds else None


def _seconds(name: str, answer: Answer, control: Control) -> float | None:
    """None where the version that is served does not take these inputs."""
    try:
        return control.seconds(name, answer)
    except Refused:
        return None


def _latest(source: Source, target: Target) -> int | None:
    """The latest version in `target` where it is this very one."""
    versions = target.versions(source.name)
    return versions[-1] if versions and target.record(source.name, versions[-1]).get("sha256") == source.sha256 else None


def _written(source: Source, target: Target, options: Options) -> Published:
    """The version folder, written if it is not there; what stands beside the versions is not replaced yet."""
    if (latest := _latest(source, target)) is not None:
        return Published(source.name, latest, latest, fresh=False)
    before = max(target.versions(source.name), default=None)
    if before is not None:
        target.keep_beside(source.name, before)
    version = (before or 0) + 1
    target.put(source.version, source.name, version, source.beside, new_record(options.run, source.sha256))
    return Published(source.name, version, before, fresh=True)


def _loaded(published: Published, source: Source, answers: Sequence[Answer], control: Control) -> None:
    """Load the version and ask it again, now under its own name, where clients' rows may share its batches."""
    _load(published.model, control)
    if not control.ready(published.model, published.version):
        raise _failed(published.model, f"version {published.version} is not ready after loading")
    tolerance = tolerance_in_batches(source.version)
    _require_answers(published.model, answers, control, published.model, published.version, tolerance, TIMES)


def _take_back(published: Published, target: Target, control: Control | None, options: Options) -> None:
    """Remove a version that was just published and return to the one before."""
    if published.fresh:
        _return(published.model, published.version, published.before, target, control)
        options.say(f"{published.model}: version {published.version} is taken back")


def _return(model: str, version: int, before: int | None, target: Target, control: Control | None) -> None:
    """Remove `version`, and serve `before` with the config and files that it had; without `before` the model goes."""
    if before is None:
        target.remove(target.path(model))
        if control is not None:
            _unload(model, control)
        return
    target.restore(model, before)
    target.remove(target.path(model, version))
    if control is not None:
        _load_again(model, before, control)


def _load_again(model: str, version: int, control: Control) -> None:
    try:
        control.load(model)
    except Refused as refusal:
        what = f"'{model}': version {version}, which served before, does not load: {refusal.reason}"
        raise CheckError("E758", what, "See the server's log, and compress deploy --status") from refusal


def _told(published: Published, *, loaded: bool) -> str:
    state = "is served and proven" if loaded else "is published, not loaded"
    if not published.fresh:
        state = f"{state} already"
    before = "" if published.ms_before is None else f", {published.ms_before:.3g} ms before"
    speed = "" if published.ms is None else f" ({published.ms:.3g} ms a request{before})"
    return f"{published.model}: version {published.version} {state}{speed}"


def _prune(model: str, target: Target, options: Options) -> None:
    """Remove versions older than the last `keep`."""
    for version in target.versions(model)[: -options.keep]:
        target.remove(target.path(model, version))
        options.say(f"{model}: version {version} is removed, {options.keep} are kept")


def roll_back(models: Sequence[str], target: Target, control: Control | None, options: Options) -> list[Published]:
    """Remove the latest version of each model and serve the one before it, or only what an interrupted deployment left. Where
    one model fails, all keep their latest version.

    Raises UserError E759 where there is no earlier version, CheckError E758 where it does not load, UserError E712, E755, E756.
    """
    with target.locked():
        if taken := _recover(models, target, control, options):
            return taken
        plans = []
        for model in models:
            versions = target.versions(model)
            if len(versions) < 2:
                what = f"'{model}' has no earlier version to return to"
                raise UserError("E759", what, "Deploy the run that you want instead", target.root)
            plans.append(Published(model, versions[-2], versions[-1], fresh=False))
        aside: dict[str, str] = {}
        try:
            for plan in plans:  # where this is killed, the next deployment goes on with it
                target.mark(plan.model, plan.before, finished=False)
            for plan in plans:
                target.restore(plan.model, plan.version)
                aside[plan.model] = target.set_aside(plan.model, plan.before)
            for plan in plans if control is not None else ():
                _load_again(plan.model, plan.version, control)
        except BaseException:
            with contextlib.ExitStack() as each:
                for plan in plans:
                    each.callback(_keep, plan, aside.get(plan.model), target, control)
            raise
        for plan in plans:
            target.remove(aside[plan.model])
            options.say(f"{plan.model}: version {plan.before} is removed, version {plan.version} serves")
    return plans


def _keep(plan: Published, aside: str | None, target: Target, control: Control | None) -> None:
    """Undo what was done to return to `plan.version`: `plan.before` serves again."""
    if aside is not None:
        target.bring_back(aside, plan.model, plan.before)
    target.restore(plan.model, plan.before)
    target.mark(plan.model, plan.before, finished=True)
    if control is not None and aside is not None:
        _load_again(plan.model, plan.before, control)


@dataclass(frozen=True)
class State:
    """One version of a model; `ready` is None where no server was asked, `finished` false while its deployment is at work, or
    where that was interrupted."""

    model: str
    version: int
    run: str
    published: str
    proven: bool
    ready: bool | None
    finished: bool = True

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def status(target: Target, control: Control | None) -> list[State]:
    """Every version of every model in `target`."""
    found = []
    for model in target.models():
        for version in target.versions(model):
            record = target.record(model, version)
            ready = None if control is None else control.ready(model, version)
            facts = (record.get("run", "?"), record.get("published", "?"), bool(record.get("proven")))
            found.append(State(model, version, *facts, ready, target.finished(model, version)))
    return found
