"""A finished run, read from its folder: its lock file, and its artifacts in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compressor.errors import UserError
from compressor.models.files.damage import door
from compressor.models.reference import Reference, resolve
from compressor.models.row_file import use_stored_row
from compressor.run_store import LOCK_FILE, RUN_AGAIN, store_of
from compressor.tasks import TaskConfig
from pipelines.engine.attempt import Attempt, last_attempt
from pipelines.engine.lockfile import Failure, read_lock
from pipelines.engine.stage import Artifact, Inputs, dense_of
from pipelines.engine.store import Store, digest
from pipelines.file.yaml_source import dotted
from pipelines.reporting.kept import layers_left


@dataclass(frozen=True)
class FinishedRun:
    """The last run that finished in `folder`: `lock` is its pipeline.lock.yaml, `attempt` the run.json of the last
    attempt, which may be a later one."""

    folder: Path
    lock: dict[str, Any]
    attempt: Attempt | None = None

    @property
    def store(self) -> Store:
        last = self.lock["stages"][-1]["artifact"] if self.lock["stages"] else ""
        return Store(store_of(self.folder, self.lock["name"], last))

    @property
    def model(self) -> str:
        """The folder where its pretrained model was found, or else the reference as written."""
        attempt, model = self.attempt, self.lock["model"]
        # a later attempt may have used another model
        same_model = attempt and attempt.model_folder and attempt.model_sha256 in ("", model["sha256"])
        if same_model and Path(attempt.model_folder).is_dir():
            return attempt.model_folder
        made = self.store.root / model.get("artifact", "")
        return str(made) if model.get("artifact") and made.is_dir() else model["reference"]

    @property
    def task(self) -> TaskConfig:
        """The task of a run of one. Raises UserError E803 for one that this version refuses, and the run's did not."""
        try:
            return TaskConfig(**self.lock["task"])
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            reason = f"{dotted(fault['loc'])}: {fault['msg'].removeprefix('Value error, ')}"
            fix = "Change it in the pipeline and run that again, or use the version that made the run"
            where = str(self.folder / LOCK_FILE)
            raise UserError("E803", f"its task is refused by this version: {reason}", fix, where) from None

    def inputs(
        self, threads: int | None = None, base: Reference | None = None, artifacts: Sequence[Artifact] | None = None
    ) -> Inputs:
        """The inputs of a stage behind some of its artifacts, by default all; `base` is by default its model, resolved anew.

        Raises UserError E803, E805, and of the model as `resolve`.
        """
        base = resolve(self.model) if base is None else base
        earlier = tuple(map(self.artifact, self.lock["stages"]) if artifacts is None else artifacts)
        return Inputs(base, self.task, self.lock["seed"], earlier, dense_of(earlier), threads=threads)

    @property
    def failures(self) -> list[Failure]:
        """The checks that failed in it without stopping it."""
        return [Failure(**failure) for failure in self.lock.get("failures", ())]

    @property
    def outdated(self) -> str:
        """Note for the user where a later attempt did not finish; '' where this run is the last attempt's."""
        if self.attempt is None or self.attempt.finished:
            return ""
        reason = " ".join(self.attempt.error.shown()) if self.attempt.error else ""
        return f"note: {self.attempt.headline()}{f' ({reason})' if reason else ''}; this is the run before it, which finished"

    def artifact(self, stage: dict[str, Any]) -> Artifact:
        """The artifact of one row of the lock's `stages`, unchecked. Raises UserError E805 (gone), E803."""
        artifact = self.store.find(stage["stage"], stage["fingerprint"], stage["id"])
        if artifact is None:
            raise UserError("E805", f"its artifact {stage['artifact']} is gone", "Run the pipeline again", str(self.store.root))
        if (artifact.id, artifact.kind) != (stage["artifact"], stage["kind"]):
            what = f"'{stage['id']}' does not match its artifact {artifact.id}"
            raise UserError("E803", what, RUN_AGAIN, str(self.folder / LOCK_FILE))
        return artifact

    def recorded(self, stage: dict[str, Any]) -> Artifact:
        """The same, its manifest checked by the lock. Raises UserError E803, E805."""
        artifact = self.artifact(stage)
        if digest(artifact) != stage["sha256"]:
            what = f"artifact {artifact.id} is not that of this run: it was made again (--force in another run), or changed"
            raise UserError("E803", what, "Run the pipeline again: it takes what is there", str(artifact.folder))
        return artifact

    @contextlib.contextmanager
    def in_use(self, kinds: Collection[str] = ()) -> Iterator[None]:
        """Until its end no other process replaces its artifacts (of some `kinds`, or all): `--force` in another run waits.

        Nothing is held in a store that this user cannot write, or without locks.
        """
        with contextlib.ExitStack() as uses:
            for stage in (stage for stage in self.lock["stages"] if not kinds or stage["kind"] in kinds):
                with contextlib.suppress(OSError, UserError):
                    uses.enter_context(self.store.in_use(stage["stage"], stage["fingerprint"]))
            yield

    def verify(self, stage: dict[str, Any]) -> Artifact:
        """The same, with every file checked by the manifest. Raises UserError E803, E805."""
        artifact = self.recorded(stage)
        self.store.verify(artifact)
        return artifact


def open_run(folder: Path) -> FinishedRun:
    """The last run that finished in a folder such as runs/quickstart.

    Raises UserError E805 (there is none), E803 (its lock file or run.json is damaged).
    """
    attempt, path = last_attempt(folder), folder / LOCK_FILE
    if not path.is_file() and attempt is not None:
        raise UserError("E805", f"no run has finished here: {attempt.headline()}", "See: compress report RUN", str(folder))
    if not path.is_file():
        raise UserError("E805", f"no {LOCK_FILE} here", "Give a run's folder, such as runs/quickstart", str(folder))
    lock = read_lock(path)
    if len(folder.absolute().parents) < len(Path(lock["name"]).parts):
        raise UserError("E803", "the run's name is not a relative path", RUN_AGAIN, str(path))
    with door("E803", "the run", str(path)):
        use_stored_row(lock["model"])
    return FinishedRun(folder, lock, attempt)


def plan_of(folder: Path) -> list[dict[str, Any]]:
    """`layers_left` of the last model of the run in `folder`; [] where no unit was removed. Raises UserError E805, E803."""
    run = open_run(folder)
    models = [run.recorded(stage) for stage in run.lock["stages"] if stage["kind"] == "model"]
    first = next((artifact for artifact in models if artifact.metadata.get("found")), None)
    if first is None:
        return []
    kept = next((artifact.metadata["kept"] for artifact in reversed(models) if artifact.metadata.get("kept")), {})
    return layers_left(kept, first.metadata["found"])
