"""Checkpoints of an interrupted training, which resumes with identical results; their folder is never published.

Only trainable parameters and changing buffers are stored, with Trainer's optimizer, schedule and random state. The manifest is
written last, so an incomplete checkpoint is never used.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compressor.deltas.links import Change
from compressor.digests import sha256_of
from compressor.models.files.weight_files import not_finite
from compressor.tensor_file import write_tensors

MANIFEST = "manifest.json"
CHANGING = "changing.safetensors"
ARRAYS_OF_ANY_NUMPY = [(np.empty(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
"""What makes an array, by the name that numpy 1 writes and by numpy 2's: Trainer's random state is read where only its own
is allowed, and a package installed in between may bring the other numpy."""


def changing(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that training changes: trainable parameters (shared ones once), and the `moving` buffers of changes."""
    moved = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for path, module in model.named_modules():
        if isinstance(module, Change):
            moved |= {f"{path}.{name}": module.get_buffer(name) for name in module.moving}
    return moved


def save_changing(model: nn.Module, folder: Path) -> None:
    """Write `changing(model)`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors({name: tensor.detach().contiguous() for name, tensor in changing(model).items()}, folder / CHANGING)


@torch.no_grad()
def load_changing(model: nn.Module, folder: Path) -> None:
    """Copy the tensors from `save_changing` into the model."""
    stored = load_file(folder / CHANGING)
    for name, tensor in changing(model).items():
        tensor.copy_(stored[name])


def seal(folder: Path) -> None:
    """Mark a checkpoint, or another folder of files, as complete: write the sha256 of every file in it."""
    digests = {path.name: sha256_of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=1))


def newest(work: Path) -> Path | None:
    """The newest complete and finite checkpoint below `work`; others are deleted in favour of the one before.

    Raises ValueError where one is of another program: Trainer, too, would delete it.
    """
    folders = [*work.glob("checkpoint-*")]
    if foreign := sorted(folder.name for folder in folders if not _is_ours(folder)):
        raise ValueError(f"{work} holds {foreign[0]}, which is of another program: give the training a folder of its own")
    for folder in sorted(folders, key=_step, reverse=True):
        if is_complete(folder) and is_finite(folder):
            return folder
        shutil.rmtree(folder)
    return None


def keep_newest(work: Path) -> None:
    """Delete all checkpoints but the last and, in case that is damaged, the one before, whatever their file times."""
    folders = [folder for folder in work.glob("checkpoint-*") if _is_ours(folder)]
    for folder in sorted(folders, key=_step)[:-2]:
        shutil.rmtree(folder, ignore_errors=True)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_ours(folder: Path) -> bool:
    """Whether a checkpoint, or what a kill left of one, was written here: those of other programs hold a whole model."""
    if not (folder.is_dir() and folder.name.rpartition("-")[2].isdecimal()):
        return False
    return not any(path.name.startswith(("model", "pytorch_model", "adapter_model")) for path in folder.iterdir())


def is_complete(folder: Path) -> bool:
    """Whether the folder was sealed, and every file in it is as it was then."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    return present == set(digests) and all(sha256_of(folder / name) == digest for name, digest in digests.items())


def is_finite(folder: Path) -> bool:
    """Whether no tensor of `save_changing` contains NaN or infinity, from which a training cannot recover."""
    return not_finite(load_file(folder / CHANGING)) is None
