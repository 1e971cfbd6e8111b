"""Capture of a stage's output: file descriptors 1 and 2, logging and warnings go to its log file, not the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


def real_stdout() -> TextIO:
    """A separate stream on the current standard output: it still reaches the user while `captured` redirects the original."""
    return os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """Send everything that this process and its children print, log or warn to the file at `path`.

    At the level of file descriptors, because native libraries bypass sys.stdout. Output that does not fit on a full disk is
    lost; no result depends on it. Raises OSError if the file cannot be created.
    """
    root, level = logging.getLogger(), logging.getLogger().level
    with _log(path) as log:
        saved = [os.dup(1), os.dup(2)]
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _flush()
        try:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            root.addHandler(handler)
            root.setLevel(min(level, logging.INFO) if level else logging.INFO)
            logging.captureWarnings(True)
            # in a notebook or a test runner, sys.stdout has no file descriptor
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            root.setLevel(level)
            _flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


@contextlib.contextmanager
def _log(path: Path) -> Iterator[TextIO]:
    log = path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        yield log
    finally:
        with contextlib.suppress(OSError):
            log.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
