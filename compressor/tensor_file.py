"""Safetensors files with the permissions of every other file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that whoever may read the files beside it may read, too; one that is there keeps its mode.

    safetensors puts a private temporary file (mode 0600) in its place: another account could not load the model.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, dict(metadata) if metadata else None)
    path.chmod(mode)
