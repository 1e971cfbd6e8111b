"""Programs that measure in a process of their own: their environment, what they print, and how one is asked."""

from __future__ import annotations

import json
import os
import subprocess
from typing import IO, Any

from compressor.child_program import importing_environment, program


def worker_environment() -> dict[str, str]:
    """The environment of a process that is timed: this project is importable, and idle threads do not spin."""
    return {**importing_environment(), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}


def private_stdout() -> IO[str]:
    """The real stdout, line by line, for results alone: what libraries print there goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def result_of(module: str, *arguments: str, given: str | None = None, timeout: float) -> Any:
    """The JSON that the program `python -m MODULE` prints, with `given` on its stdin; None if it fails, or takes too long."""
    options = {"capture_output": True, "text": True, "env": worker_environment(), "timeout": timeout, "check": True}
    try:
        return json.loads(subprocess.run(program(module, *arguments), input=given, **options).stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
