"""What belongs to another user, in tests that root may run, who may write anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def for_reading_alone(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Refuse that the file at `path`, while it is there, is opened for writing."""
    opened, opened_path = os.open, Path.open

    def require(name: object, writes: bool) -> None:
        if writes and name == path and path.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def by_flags(name, flags, *mode, **options):
        require(Path(os.fsdecode(name)), bool(flags & (os.O_RDWR | os.O_WRONLY)))
        return opened(name, flags, *mode, **options)

    def by_mode(self, mode="r", *arguments, **options):
        require(self, "r" not in mode or "+" in mode)
        return opened_path(self, mode, *arguments, **options)

    monkeypatch.setattr(os, "open", by_flags)
    monkeypatch.setattr(Path, "open", by_mode)
