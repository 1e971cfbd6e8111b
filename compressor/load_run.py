"""The last model of a run folder, such as runs/quickstart, loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from compressor import checkpoint
from compressor.errors import UserError
from compressor.run_store import NAME, RUN_FILE, LastModel, last_model

if TYPE_CHECKING:
    from torch import nn


def load(folder: Path, base: Path | str | None = None) -> nn.Module:
    """The last model of the run in `folder`, in eval mode: the merged checkpoint, else the last stage's state on its base.

    `base` is the pretrained model where that is needed, by default where the run found it. Raises UserError E805 (the run
    has no model, or its artifact is gone), E305 (a damaged lock or artifact), and what `compressor.checkpoint.load` raises.
    """
    found = last_model(folder)
    _check_single(found, folder, f"Load one of its tasks: compressor.load(BASE, delta='{folder}/tasks/NAME.safetensors')")
    return checkpoint.load(found.folder, base=base or _base(folder, found))


def last_state(folder: Path) -> tuple[Path, str | None, str]:
    """The folder of the last state of the run in `folder`, before its merge; where the run found its pretrained model, if that
    is still there; the run's reference for it ('' if it is unknown): that in the state is of the run that made the state.
    Raises UserError E805, E305."""
    found = last_model(folder, checkpoint.STATE_FILE)
    _check_single(found, folder, f"Convert one of its tasks: compress delta convert {folder}/tasks/NAME.safetensors FILE")
    if checkpoint.STATE_FILE not in found.files:
        raise UserError("E805", f"no model of this run has a {checkpoint.STATE_FILE}", "Run its stages up to tune", str(folder))
    model = found.lock.get("model")
    return found.folder, _base(folder, found), _reference_in(model)


def _check_single(found: LastModel, folder: Path, fix: str) -> None:
    """Raises UserError E805 where the last model is that of many tasks, which are files of their own."""
    if not {checkpoint.STATE_FILE, "config.json"} & found.files:
        raise UserError("E805", "this run trained many tasks together and has no single model", fix, str(folder))


def _reference_in(model: object) -> str:
    """The reference of the pretrained model in a run's lock; '' if it is unknown."""
    reference = model.get("reference") if isinstance(model, dict) else None
    return reference if isinstance(reference, str) else ""


def _base(folder: Path, found: LastModel) -> str | None:
    """Folder where the run found its pretrained model, if it still exists; otherwise the state's reference is used. run.json
    may describe a later attempt, with another model: then it is the one in the store that the lock names, if any."""
    model = found.lock.get("model")
    try:
        facts = json.loads((folder / RUN_FILE).read_bytes())
        same = facts.get("model_sha256", "") in ("", model["sha256"])
        place = facts["model_folder"] if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        place = None
    if isinstance(place, str) and "\0" not in place and Path(place).is_dir():
        return place
    artifact = model.get("artifact") if isinstance(model, dict) else None
    if not isinstance(artifact, str) or not NAME.fullmatch(artifact):
        return None
    made = str(found.folder.parent / artifact)
    return made if os.path.isdir(made) else None
