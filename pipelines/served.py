"""What a run deployed: from a run folder to the model repository in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from compressor.errors import UserError
from pipelines.runner import LOCK_FILE
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
    path = run / LOCK_FILE
    if not path.is_file():
        raise UserError("E805", f"no {LOCK_FILE} here", "Give a run's folder, such as runs/quickstart", str(run))
    lock = yaml.safe_load(path.read_text(encoding="utf-8"))
    stage = next((stage for stage in reversed(lock["stages"]) if stage["kind"] == "repository"), None)
    if stage is None:
        raise UserError("E805", "this run has deployed nothing", "Run its deploy stage first", str(run))
    # the name is the folder's place below `--out`: a sweep's variant lies two deep
    out = run.absolute().parents[len(Path(lock["name"]).parts) - 1]
    store = Store(out / ".store")
    artifact = store.find(stage["stage"], stage["fingerprint"], stage["id"])
    if artifact is None:
        raise UserError("E805", f"its artifact {stage['artifact']} is gone", "Run the pipeline again", str(store.root))
    store.verify(artifact)
    text = lock["task"]["text"]
    return Served(artifact.folder / "repository", isinstance(text, list) and len(text) == 2)
