"""The deployed models of a run: from a run folder to the model repository in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from pipelines.runs.finished import open_run
from serving.repository import model_names
from serving.running import log_folder


@dataclass(frozen=True)
class Served:
    """A deployed Triton model repository, and whether its models take pairs of texts. `outdated` as in its run.

    `logs` is the folder for the logs of its servers, `run` that of the run; None for a repository alone.
    """

    repository: Path
    logs: Path
    pairs: bool = False
    outdated: str = ""
    run: Path | None = None


def find_repository(run: Path, *, empty: bool = False) -> Served:
    """The repository of the last deploy in a run folder, its files verified by their sha256s; or `run`, if it is a repository.

    With `empty` an empty folder is a repository, too: models come to it later. Raises UserError E805 (no run, or nothing
    deployed) and E803 (damaged).
    """
    if model_names(run) or (empty and run.is_dir() and not any(run.iterdir())):
        return Served(run, log_folder())
    finished = open_run(run)
    stage = next((stage for stage in reversed(finished.lock["stages"]) if stage["kind"] == "repository"), None)
    if stage is None:
        raise UserError("E805", "this run has deployed nothing", "Run its deploy stage first", str(run))
    artifact = finished.verify(stage)
    text = (finished.lock.get("task") or {}).get("text")
    pairs = isinstance(text, list) and len(text) == 2
    return Served(artifact.folder / "repository", run / "logs", pairs, finished.outdated, run)
