"""A finished run, from its folder: what its lock file says, and its artifacts in the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import UserError
from pipelines.reporting.kept import layers_left
from pipelines.runner import LOCK_FILE
from pipelines.stage import Artifact
from pipelines.store import Store, digest


@dataclass(frozen=True)
class FinishedRun:
    """The run in `folder`; `lock` is its pipeline.lock.yaml."""

    folder: Path
    lock: dict[str, Any]

    @property
    def store(self) -> Store:
        # the name is the folder's place below `--out`: a sweep's variant lies two deep
        return Store(self.folder.absolute().parents[len(Path(self.lock["name"]).parts) - 1] / ".store")

    @property
    def model(self) -> str:
        """Where its pretrained model was found, or else the reference as it was written."""
        path = self.folder / "run.json"
        facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found = facts.get("model_folder")
        return found if found and Path(found).is_dir() else self.lock["model"]["reference"]

    def artifact(self, stage: dict[str, Any]) -> Artifact:
        """The artifact of one row of the lock's `stages`; its files are not looked at. Raises UserError E805 (gone), E803."""
        found = self.store.find(stage["stage"], stage["fingerprint"], stage["id"])
        if found is None:
            raise UserError("E805", f"its artifact {stage['artifact']} is gone", "Run the pipeline again", str(self.store.root))
        return found

    def verify(self, stage: dict[str, Any]) -> Artifact:
        """The same, every file compared with the manifest, and the manifest with the lock. Raises UserError E803, E805."""
        artifact = self.artifact(stage)
        self.store.verify(artifact)
        if digest(artifact) != stage["sha256"]:
            what, mend = f"artifact {artifact.id} is not what this run made", f"Run again with --force {stage['id']}"
            raise UserError("E803", what, mend, str(artifact.folder))
        return artifact


def open_run(folder: Path) -> FinishedRun:
    """The run in a folder such as runs/quickstart. Raises UserError E805 (there is none), E803 (its lock file is damaged)."""
    path = folder / LOCK_FILE
    if not path.is_file():
        raise UserError("E805", f"no {LOCK_FILE} here", "Give a run's folder, such as runs/quickstart", str(folder))
    try:
        return FinishedRun(folder, yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UserError("E803", "unreadable", "Run the pipeline again: what is finished is kept", str(path)) from None


def plan_of(folder: Path) -> list[dict[str, Any]]:
    """`layers_left` of the last model of the run in `folder`; [] where no unit was removed. Raises UserError E805, E803."""
    run = open_run(folder)
    models = [run.artifact(stage) for stage in run.lock["stages"] if stage["kind"] == "model"]
    first = next((artifact for artifact in models if artifact.stage == "prune"), None)
    if first is None:
        return []
    kept = next((artifact.metadata["kept"] for artifact in reversed(models) if artifact.metadata.get("kept")), {})
    return layers_left(kept, first.metadata["found"])
