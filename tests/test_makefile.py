"""`make install` without a usable Python: one line with a code, exit code 2 of make, and no half-made environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def install(tmp_path):
    """Runs the project's Makefile in an empty folder with a PYTHON that is this shell script."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)

    def run(script: str) -> str:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        # a make that runs these tests tells its options to the makes below it
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        done = subprocess.run(
            ["make", "install", "PYTHON=./python"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and not (tmp_path / ".venv" / ".installed").exists()
        return done.stderr

    return run


@pytest.mark.parametrize(("script", "found"), [("echo 3.10", "./python is 3.10"), ("exit 127", "none")])
def test_no_supported_python(install, script, found):
    error = install(script)
    assert error.startswith(f"E902 Python 3.11 or 3.12 is needed, found: {found}. Install one, or name it: make PYTHON=")


def test_a_python_that_makes_no_environments(install):
    """Debian packs ensurepip apart: the version is right, the import fails."""
    error = install('case "$2" in *ensurepip*) exit 1 ;; *) echo 3.11 ;; esac')
    assert error.startswith("E903 ./python (3.11) cannot make environments. On Debian: apt-get install python3.11-venv")
