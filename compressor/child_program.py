"""Modules of this project that run in a process of their own: their command, and where that process finds the project."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that this project is imported from."""


def program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this project; no file of the current folder takes the place of a package (-P)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def importing_environment() -> dict[str, str]:
    """This process's environment, in which the project can be imported, also from a source tree that is not installed."""
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": places}
