"""A project of toys, and the command line in this process."""

import pytest

from pipelines.cli.commands import main
from tests.pipelines import toys


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The path of a pipeline of toy stages."""
    toys.install(monkeypatch)
    return toys.write_project(tmp_path / "project")


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
