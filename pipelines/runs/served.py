"""The deployed models of a run: from a run folder to the model repository in the store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from compressor.run_store import MANIFEST, is_run
from pipelines.engine.store import served_lock, shared_lock
from pipelines.runs.finished import FinishedRun, open_run
from serving.deployment.target import LOCK
from serving.repository import model_names
from serving.server_registry import log_folder

REPOSITORY = "repository"


@dataclass(frozen=True)
class Served:
    """A deployed Triton model repository. `outdated` as in its run, and a note where another deploy of the run failed.

    `logs` is the folder for the logs of its servers, `run` that of the run; None for a repository alone.
    """

    repository: Path
    logs: Path
    outdated: str = ""
    run: Path | None = None


def find_repository(run: Path, *, empty: bool = False) -> Served:
    """The repository of the last deploy in a run folder, its files verified by their sha256s; or `run`, if it is a repository.

    With `empty` an empty folder, also as a deployment that failed leaves it, is a repository, too: models come to it later.
    Raises UserError E805 (no run, or nothing deployed) and E803 (damaged).
    """
    if _is_repository(run, empty):
        return Served(run, log_folder())
    finished = open_run(run)
    stage = next((stage for stage in reversed(finished.lock["stages"]) if stage["kind"] == REPOSITORY), None)
    if stage is None:
        raise UserError("E805", "this run has deployed nothing", "Run its deploy stage first", str(run))
    artifact = finished.verify(stage)
    logs = run / "logs"
    writable = os.access(logs if logs.exists() else run, os.W_OK)  # a run may be another user's, or on a read-only disk
    return Served(artifact.folder / "repository", logs if writable else log_folder(), _outdated(finished, stage["id"]), run)


def _outdated(finished: FinishedRun, deployed: str) -> str:
    made = {stage["id"] for stage in finished.lock["stages"]}
    # what failed and published nothing is an optional stage, which a deploy is
    failed = [failure for failure in finished.failures if failure.stage not in made]
    notes = [f"note: '{one.stage}' failed ({one.code}); this is what '{deployed}' deployed" for one in failed]
    return "\n".join(filter(None, [finished.outdated, *notes]))


@contextlib.contextmanager
def repository_in_use(run: Path, *, empty: bool = False) -> Iterator[Served]:
    """`find_repository`, for whoever reads its files: until the end `--force` in another run does not replace them."""
    with contextlib.nullcontext() if _is_repository(run, empty) else open_run(run).in_use([REPOSITORY]):
        yield find_repository(run, empty=empty)


@contextlib.contextmanager
def kept_while_served(repository: Path) -> Iterator[None]:
    """Until its end `compress store --remove-unused` leaves the artifact that a repository lies in, if it lies in one, which
    `--force` in another run may replace. Nothing is held in a store that this user cannot write, or that has no locks."""
    artifact = repository.resolve().parent
    with contextlib.ExitStack() as kept:
        if (artifact / MANIFEST).is_file():
            with contextlib.suppress(OSError, UserError):
                kept.enter_context(shared_lock(served_lock(artifact.parent, artifact.name)))
        yield


def _is_repository(folder: Path, empty: bool) -> bool:
    if is_run(folder):  # also one with a model's config in a folder of its own, as `compress loadtest --tune` writes
        return False
    if model_names(folder):
        return True
    return empty and folder.is_dir() and all(path.name == LOCK for path in folder.iterdir())
