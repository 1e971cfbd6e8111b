"""What a run deployed: from a run folder to the model repository in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from pipelines.finished import artifact_of, lock_of
from pipelines.store import Store


@dataclass(frozen=True)
class Served:
    """A deployed Triton model repository, and whether its models take pairs of texts."""

    repository: Path
    pairs: bool


def find_repository(run: Path) -> Served:
    """The repository of the last deploy in a run folder, its files compared with their sha256s.

    Raises UserError E805 (no run, or nothing deployed) and E803 (damaged).
    """
    lock = lock_of(run)
    stage = next((stage for stage in reversed(lock["stages"]) if stage["kind"] == "repository"), None)
    if stage is None:
        raise UserError("E805", "this run has deployed nothing", "Run its deploy stage first", str(run))
    artifact = artifact_of(run, lock, stage)
    Store(artifact.folder.parent).verify(artifact)
    text = lock["task"]["text"]
    return Served(artifact.folder / "repository", isinstance(text, list) and len(text) == 2)
