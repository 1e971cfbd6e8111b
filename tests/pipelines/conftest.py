"""A project of toys, and the command line in this process."""

import functools

import pytest

from pipelines.check import estimate
from pipelines.cli.commands import main
from tests.pipelines import toys


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The path of a pipeline of toy stages."""
    toys.install(monkeypatch)
    return toys.write_project(tmp_path / "project")


@pytest.fixture(scope="session", autouse=True)
def one_speed():
    """Every `check` measures the speed of this machine for a quarter of a second: here the first one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "flops_a_second", functools.cache(estimate.flops_a_second))
        yield


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def compress(capfd):
    """Call the command line; gives (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments], prog_name="compress")
        return (end.value.code or 0, *capfd.readouterr())

    return call
