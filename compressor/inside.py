"""Whether a file lies in a folder, links followed: what another made may hold links to any file of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SHARED = ".huggingface-shared-blobs"
"""File in the folder of what repositories of the hub's cache share: files of their own `blobs` are links to some there."""


def is_inside(path: Path, folder: Path) -> bool:
    """Whether what `path` leads to lies below `folder`, which may be a link itself, or, where that is a snapshot in the hub's
    cache or a folder in one, in its `blobs`, or in those that the cache's repositories share: there every file is a link.

    Raises OSError, RuntimeError or ValueError for circular links and invalid characters.
    """
    target, root = path.resolve(), folder.resolve()
    return any(target.is_relative_to(place) for place in (root, *_blobs(root)))


def _blobs(folder: Path) -> Iterator[Path]:
    """The folders of files of a snapshot in the hub's cache; none for any other folder."""
    for above in folder.parents:
        if above.name == "snapshots":
            yield above.parent / "blobs"
            if (shared := above.parent.parent / "blobs").joinpath(SHARED).is_file():
                yield shared
