"""A run that is over: from its folder to what its stages published in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compressor.errors import UserError
from pipelines.reporting.kept import layers_left
from pipelines.runner import LOCK_FILE
from pipelines.stage import Artifact
from pipelines.store import Store

Record = dict[str, Any]


def lock_of(run: Path) -> Record:
    """What pipeline.lock.yaml in a run folder says. Raises UserError E805 where there is none."""
    path = run / LOCK_FILE
    if not path.is_file():
        raise UserError("E805", f"no {LOCK_FILE} here", "Give a run's folder, such as runs/quickstart", str(run))
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def artifact_of(run: Path, lock: Record, stage: Record) -> Artifact:
    """The artifact of one of the lock's stages; `Store.verify` looks at its files. Raises UserError E805 (gone), E803."""
    # the name is the folder's place below `--out`: a sweep's variant lies two deep
    store = Store(run.absolute().parents[len(Path(lock["name"]).parts) - 1] / ".store")
    artifact = store.find(stage["stage"], stage["fingerprint"], stage["id"])
    if artifact is None:
        raise UserError("E805", f"its artifact {stage['artifact']} is gone", "Run the pipeline again", str(store.root))
    return artifact


def plan_of(run: Path) -> list[Record]:
    """`layers_left` of the last model of a run; [] where nothing was pruned. Raises UserError E805, E803."""
    lock = lock_of(run)
    models = [artifact_of(run, lock, stage) for stage in lock["stages"] if stage["kind"] == "model"]
    first = next((artifact for artifact in models if artifact.stage == "prune"), None)
    if first is None:
        return []
    kept = next(artifact.metadata["kept"] for artifact in reversed(models) if artifact.metadata.get("kept"))
    return layers_left(kept, first.metadata["found"])
