"""The deployed models of a run: from a run folder to the model repository in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from pipelines.runs.finished import open_run


@dataclass(frozen=True)
class Served:
    """A deployed Triton model repository, and whether its models take pairs of texts. `outdated` as in its run."""

    repository: Path
    pairs: bool
    outdated: str = ""


def find_repository(run: Path) -> Served:
    """The repository of the last deploy in a run folder, its files verified by their sha256s.

    Raises UserError E805 (no run, or nothing deployed) and E803 (damaged).
    """
    finished = open_run(run)
    stage = next((stage for stage in reversed(finished.lock["stages"]) if stage["kind"] == "repository"), None)
    if stage is None:
        raise UserError("E805", "this run has deployed nothing", "Run its deploy stage first", str(run))
    artifact = finished.verify(stage)
    text = (finished.lock.get("task") or {}).get("text")
    return Served(artifact.folder / "repository", isinstance(text, list) and len(text) == 2, finished.outdated)
