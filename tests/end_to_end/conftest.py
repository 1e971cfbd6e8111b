"""One whole run for all files here, whichever worker needs it first."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.made_once import made_once
from tests.tiny import EVERYTHING, write_pipeline

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}


class WholeRun(NamedTuple):
    """A pipeline file, its `--out` folder, and what the run printed. Who changes files, copies them first."""

    path: Path
    out: Path
    printed: str


def compress(*arguments, **options) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "pipelines.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False, **options)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> WholeRun:
    """An uninterrupted run of every stage, of this session of tests."""

    def make(folder: Path) -> None:
        done = compress("run", write_pipeline(folder, stages=EVERYTHING), "--out", folder / "runs")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "printed.txt").write_text(done.stdout)

    folder = made_once(tmp_path_factory.getbasetemp(), "whole_run", make)
    return WholeRun(folder / "pipeline.yaml", folder / "runs", (folder / "printed.txt").read_text())
