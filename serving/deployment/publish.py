"""Publish new versions of a run's models beside those that are served, prove them, and take them back if they fail.

A new version first runs under a name of its own (NAME-candidate), where no client sends requests: its answers must be the
recorded ones, and its latency within a limit. Then it is published, loaded and asked again. Versions in use are never unloaded:
Triton serves the old one until the new one is ready, and the old one again where the new one is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import CheckError, UserError
from serving.answer_bounds import least_concordance, tolerance_in_batches
from serving.deployment.answers import Answer, read_answers
from serving.deployment.candidate import drop_candidate, failed, load, require_answers, require_free_names, tried, unload
from serving.deployment.source import Options, Source
from serving.deployment.target import ASIDE, RECORD, Target, new_record
from serving.deployment.triton_control import Control, Refused
from serving.repository import model_names
from serving.repository_safety import refuse_unsafe

TIMES = 5
"""How often a recorded request is asked of a version that other clients ask too, before its answer counts as another."""


@dataclass(frozen=True)
class Published:
    """A model's versions after a deployment; `fresh` is false where this very version was there already. After one is taken
    back, `version` is that which serves: None where the model is gone.

    Of a trial: `median_ms` of a request, and the lower quartiles `ms` and `ms_before`, that of the version before.
    """

    model: str
    version: int | None
    before: int | None
    fresh: bool
    median_ms: float | None = None
    ms: float | None = None
    ms_before: float | None = None

    @property
    def on_trial(self) -> bool:
        """Whether it is another than the version before, to which the model returns if this one fails."""
        return self.version != self.before

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def deploy(repository: Path, target: Target, control: Control | None, options: Options) -> list[Published]:
    """Publish every model of the folder `repository` as a new version in `target`, and load them through `control`.

    Without `control` the files are published only; a later deployment with one tries them first. Raises CheckError E758 for a
    version that failed; it is then taken back and what was served before goes on. Raises UserError E712, E720 (a model has the
    name of a candidate), E724 (a model that is not served here, or links out of the repository), E727, E754 to E757.
    """
    names = model_names(repository)
    refuse_unsafe(repository, names)
    sources = [Source(name, repository / name) for name in names]
    for source in sources:
        source.refuse_links()
    answers = {source.name: read_answers(source.version) for source in sources}
    if control is not None:
        control.require_live()
    with target.locked():
        if control is not None:
            require_free_names(names, target)
        _recover(names, target, control, options)
        plans = [_planned(source, target, control) for source in sources]
        for plan in plans:
            _keep_before(plan, target)
        undo = [plan for plan in plans if plan.on_trial and not plan.fresh]
        loaded = {plan.model for plan in undo if control.ready(plan.model, plan.version)}
        with _undone(undo, loaded, target, control, options):
            if control is not None:
                plans = [
                    replace(plan, **tried(source, answers[plan.model], target, control, options)) if plan.on_trial else plan
                    for source, plan in zip(sources, plans, strict=True)
                ]
            for source, plan in zip(sources, plans, strict=True):
                if plan.fresh:
                    _write(source, plan, target, options)
                    undo.append(plan)
                    target.set_beside(plan.model, source.beside)
                if control is not None:
                    loaded.add(plan.model)
                    _load(source, plan, answers[plan.model], control)
                    target.mark(plan.model, plan.version, proven=True)
                options.say(_told(plan, loaded=control is not None))
            for plan in plans:
                if plan.fresh:
                    target.mark(plan.model, plan.version, finished=True)
        for plan in plans:
            _prune(plan.model, target, options)
    return plans


@contextlib.contextmanager
def _undone(
    plans: Sequence[Published], loaded: Collection[str], target: Target, control: Control | None, options: Options
) -> Iterator[None]:
    """Context that takes versions back where it fails, the last first, and all of them, whichever fails. Those that were there
    before stay, unless one failed its check; models that are not in `loaded` are not loaded again."""
    try:
        yield
    except BaseException as error:
        with contextlib.ExitStack() as each:
            for plan in plans:
                if plan.fresh or isinstance(error, CheckError):
                    each.callback(_take_back, plan, target, control if plan.model in loaded else None, options)
        raise


def _recover(models: Sequence[str], target: Target, control: Control | None, options: Options) -> list[Published]:
    """Take back the versions of a deployment that was killed: the files of one may stand beside the config of another; and end
    a rollback that was killed."""
    for model in models:
        drop_candidate(model, target, control)
    taken = _recover_rollback(models, target, control, options)
    for model in models:
        while (versions := target.versions(model)) and not target.finished(model, versions[-1]):
            version, before = versions[-1], max(versions[:-1], default=None)
            _return(model, version, before, target, control)
            options.say(f"{model}: version {version}, whose deployment was interrupted, is taken back")
            taken.append(Published(model, before, version, fresh=False))
    return taken


def _recover_rollback(models: Sequence[str], target: Target, control: Control | None, options: Options) -> list[Published]:
    """Undo a rollback that was killed before all versions were aside, for no server was asked yet; else finish it. Clear away
    what a storage kept of one that was undone. Returns what is rolled back now."""
    plans = []
    for model in models:
        versions = target.versions(model)
        leaving = {version for version in versions[-1:] if target.leaves(model, version)}
        for version in sorted(leaving.union(target.versions_aside(model))):
            # both are there where an object store was copying one to the other
            left = max((other for other in versions if other != version), default=None)
            if target.returned(model, version):
                target.remove_aside(model, version)
            elif left or version in leaving:
                plans.append(Published(model, left, version, fresh=False))
    if any(target.leaves(plan.model, plan.before) for plan in plans):
        _keep_all(plans, target, control)
        return []
    if all(target.record(plan.model, f"{ASIDE}{plan.before}") for plan in plans):  # else it had ended
        with _kept(plans, target, control):
            _go_back(plans, target, control)
    _remove(plans, target, options)
    return plans


def _planned(source: Source, target: Target, control: Control | None) -> Published:
    """The version that this one becomes: the latest where it is this very one, and whole, else the next. There is nothing to
    try where no server is asked, or one has proven it already."""
    versions = target.versions(source.name)
    latest = max(versions, default=None)
    record = {} if latest is None else target.record(source.name, latest)
    if record.get("sha256") != source.sha256 or not target.holds(source.name, latest, source.version):
        return Published(source.name, (latest or 0) + 1, latest, fresh=True)
    is_tried = control is not None and not record.get("proven")
    return Published(source.name, latest, max(versions[:-1], default=None) if is_tried else latest, fresh=False)


def _keep_before(plan: Published, target: Target) -> None:
    """Keep what a new version replaces beside the one before, which returns if the new one fails. Raises UserError E757."""
    if plan.fresh and plan.before is not None:
        target.keep_beside(plan.model, plan.before)
        target.require_return(plan.model, plan.before)


def _write(source: Source, plan: Published, target: Target, options: Options) -> None:
    """Write the version folder; what stands beside the versions is not replaced yet."""
    target.put(source.version, plan.model, plan.version, source.beside, new_record(options.run, source.sha256))


def _load(source: Source, plan: Published, answers: Sequence[Answer], control: Control) -> None:
    """Load the version and ask it again, now under its own name, where clients' rows may share its batches."""
    load(plan.model, control, plan.model)
    if not control.ready(plan.model, plan.version):
        raise failed(plan.model, f"version {plan.version} is not ready after loading")
    bounds = tolerance_in_batches(source.version), TIMES, least_concordance(source.version)
    require_answers(plan.model, answers, control, plan.model, plan.version, *bounds)


def _take_back(plan: Published, target: Target, control: Control | None, options: Options) -> None:
    """Remove a version that failed and return to the one before; without `control` no server has it loaded."""
    _return(plan.model, plan.version, plan.before, target, control)
    options.say(f"{plan.model}: version {plan.version} is taken back")


def _return(model: str, version: int, before: int | None, target: Target, control: Control | None) -> None:
    """Remove `version`, and serve `before` with the config and files that it had; without `before` the model goes."""
    if before is None:
        target.remove(target.path(model))
        if control is not None:
            unload(model, control)
        return
    target.restore(model, before)
    target.remove_version(model, version)
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
    if not published.on_trial:
        state = f"{state} already"
    before = "" if published.ms_before is None else f", {published.ms_before:.3g} ms before"
    quartile = "" if published.ms is None else f"; lower quartile {published.ms:.3g} ms{before}"
    speed = "" if published.median_ms is None else f" (median of a request {published.median_ms:.3g} ms{quartile})"
    return f"{published.model}: version {published.version} {state}{speed}"


def _prune(model: str, target: Target, options: Options) -> None:
    """Remove versions older than the last `keep`."""
    for version in target.versions(model)[: -options.keep]:
        target.remove_version(model, version)
        options.say(f"{model}: version {version} is removed, {options.keep} are kept")


def roll_back(models: Sequence[str], target: Target, control: Control | None, options: Options) -> list[Published]:
    """Remove the latest version of each model and serve the one before it; or only take back what an interrupted deployment
    left, or finish an interrupted rollback. Where one model fails, all keep their latest version.

    Raises UserError E759 where there is no earlier version, E757 where what stood beside it is not kept whole, CheckError E758
    where it does not load, UserError E712, E755, E756.
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
            target.require_kept(model, versions[-2])
            plans.append(Published(model, versions[-2], versions[-1], fresh=False))
        for plan in plans:  # it serves again if the other does not load
            target.keep_beside(plan.model, plan.before)
        with _kept(plans, target, control):
            for plan in plans:  # where this is killed, the next deployment undoes it, or goes on with it
                target.mark(plan.model, plan.before, finished=None)
            _go_back(plans, target, control)
        _remove(plans, target, options)
    return plans


def _go_back(plans: Sequence[Published], target: Target, control: Control | None) -> None:
    """Move each `plan.before` aside, also where that is done in part, or was being undone, and load `plan.version`."""
    for plan in plans:
        target.restore(plan.model, plan.version)
        target.set_aside(plan.model, plan.before)
    for plan in plans if control is not None else ():
        _load_again(plan.model, plan.version, control)


@contextlib.contextmanager
def _kept(plans: Sequence[Published], target: Target, control: Control | None) -> Iterator[None]:
    """Context of a rollback: where it fails, all models keep their latest version."""
    try:
        yield
    except BaseException:
        _keep_all(plans, target, control)
        raise


def _keep_all(plans: Sequence[Published], target: Target, control: Control | None) -> None:
    """`_keep` of all of them, whichever fails; all are in their places first: killed meanwhile, the next undoes all, too."""
    aside = [plan for plan in plans if plan.before in target.versions_aside(plan.model)]
    with contextlib.ExitStack() as each:  # the last callback first
        for plan in plans:
            each.callback(_keep, plan, target, control if plan in aside else None)
        for plan in aside:
            each.callback(target.bring_back, plan.model, plan.before)


def _remove(plans: Sequence[Published], target: Target, options: Options) -> None:
    """Remove what is aside; the records of all first, and without them a killed rollback is known to have ended."""
    for plan in plans:
        target.remove_aside(plan.model, plan.before, RECORD)
    for plan in plans:
        target.remove_aside(plan.model, plan.before)
        options.say(f"{plan.model}: version {plan.before} is removed, version {plan.version} serves")


def _keep(plan: Published, target: Target, control: Control | None) -> None:
    """Undo what was done to return to `plan.version`: `plan.before`, which may be moved aside, or half moved, serves again."""
    target.bring_back(plan.model, plan.before)
    target.restore(plan.model, plan.before)
    target.mark(plan.model, plan.before, finished=True)
    if control is not None:
        _load_again(plan.model, plan.before, control)
    target.remove_aside(plan.model, plan.before)


@dataclass(frozen=True)
class State:
    """One version of a model; `ready` is None where no server was asked, `finished` false while its deployment or its rollback
    is at work, or where that was interrupted."""

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
        places = {version: version for version in target.versions(model)}
        aside = [version for version in target.versions_aside(model) if not target.returned(model, version)]
        places |= {version: f"{ASIDE}{version}" for version in aside}
        for version, place in places.items():
            record = target.record(model, place)
            ready = None if control is None else control.ready(model, version)
            facts = (record.get("run", "?"), record.get("published", "?"), bool(record.get("proven")))
            finished = place == version and bool(record.get("finished", True))
            found.append(State(model, version, *facts, ready, finished))
    return found
