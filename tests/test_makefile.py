"""The Makefile: what it installs and what it runs, and what it says where no Python can be used."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


PYTHON = """
case "$*" in
  "-c "*) echo 3.11 ;;
  "-m venv --clear "*) rm -rf .venv; mkdir -p .venv/bin
    for name in python compress pytest ruff; do cp "$0" .venv/bin/$name; done ;;
  *) echo "$(basename "$0") hub_offline=$HF_HUB_OFFLINE $*" >> log
     test ! -e broken ;;
esac
"""
"""A shell script that makes an environment of copies of itself, which write down how they are called, and fail beside a file
`broken`."""


@pytest.fixture
def make(tmp_path):
    """Runs the project's Makefile in an empty folder, beside a program `python`."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    # a make that runs these tests tells its options to the makes below it
    left = ("MAKE", "MFLAGS", "EXTRAS", "HF_HUB_OFFLINE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(left)}

    def run(script: str, *words: str) -> subprocess.CompletedProcess:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        command = ["make", "PYTHON=./python", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def install(make, tmp_path):
    """Runs `make install` with a PYTHON that is this shell script, where no installation is possible; returns the errors."""

    def run(script: str) -> str:
        done = make(script, "install")
        assert done.returncode == 2 and not (tmp_path / ".venv" / ".installed").exists()
        return done.stderr

    return run


@pytest.fixture
def called(make, tmp_path):
    """Runs `make` with PYTHON; returns how the programs of the environment were called."""

    def run(*words: str, code: int = 0) -> list[str]:
        done = make(PYTHON, *words)
        assert done.returncode == code, done.stderr
        log = tmp_path / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return run


@pytest.mark.parametrize(("script", "found"), [("echo 3.10", "./python is 3.10"), ("exit 127", "none")])
def test_no_supported_python(install, script, found):
    error = install(script)
    assert error.startswith(f"E902 Python 3.11 or 3.12 is needed, found: {found}. Install one, or name it: make PYTHON=")


def test_a_python_that_makes_no_environments(install):
    """Debian packs ensurepip apart: the version is right, the import fails."""
    error = install('case "$2" in *ensurepip*) exit 1 ;; *) echo 3.11 ;; esac')
    assert error.startswith("E903 ./python (3.11) cannot make environments. On Debian: apt-get install python3.11-venv")


def extras_of(calls: list[str]) -> list[str]:
    """What is installed of this project, by every call of pip that does."""
    return [call.partition(" -e .")[2] for call in calls if " -e ." in call]


def test_the_chosen_extras_stay(called, tmp_path):
    """Also for an installation after one that was cut off, and of what `make test-full` needs."""
    chosen, default = "[gpu,triton,dev]", "[cpu,openvino,triton,front,metrics,dev]"
    assert extras_of(called("install", f"EXTRAS={chosen[1:-1]}")) == [chosen]
    os.utime(tmp_path / ".venv" / ".installed", (0, 0))
    assert extras_of(called("run")) == [chosen] and extras_of(called("run")) == []
    assert extras_of(called("test-full")) == ["[gpu,triton,dev,sweep,data]"]
    os.utime(tmp_path / ".venv" / ".installed", (0, 0))
    (tmp_path / "broken").touch()
    called("install", code=2)
    (tmp_path / "broken").unlink()
    assert extras_of(called("install")) == [chosen]
    assert extras_of(called("clean", "install")) == [default]
    (tmp_path / ".venv" / ".installed").write_text("")  # as it was written before
    assert extras_of(called("test-full")) == [default[:-1] + ",sweep,data]"]


def test_a_run_may_fetch_its_model_and_tests_may_not(called):
    called("install")
    assert called("run", "RECIPE=my.yaml") == ["compress hub_offline= run my.yaml"]
    for tests in ("test", "test-full"):
        (call,) = [call for call in called(tests) if call.startswith("pytest")]
        assert call.startswith("pytest hub_offline=1 ")
