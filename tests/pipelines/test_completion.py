"""What a shell asks when the tab key is pressed, as docs/first_steps.md sets it up."""

import os
import shutil
import subprocess
import sys

import pytest

from pipelines.file.config import RECIPES

COMMAND = "import sys; sys.argv[0] = 'compress'; from pipelines.cli.commands import main; main(prog_name='compress')"


def ask(instruction: str, cwd=None, **variables: str) -> str:
    environment = {**os.environ, "_COMPRESS_COMPLETE": instruction, **variables}
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, env=environment, check=True, cwd=cwd)
    assert done.stderr == ""
    return done.stdout


def completed(words: str, cwd=None) -> list[str]:
    return ask("bash_complete", cwd, COMP_WORDS=f"compress {words}", COMP_CWORD=str(len(words.split(" ")))).splitlines()


@pytest.mark.parametrize("shell", ["zsh", "fish", "bash"])
def test_every_shell_gets_its_script(shell):
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    script = ask(f"{shell}_source")
    assert f"_COMPRESS_COMPLETE={shell}_complete" in script and "compress" in script


def test_commands_options_recipes_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(RECIPES.parents[1]), os.environ.get("PYTHONPATH")])))
    assert completed("ru") == ["plain,run"]
    assert completed("list sch") == ["plain,schema"]
    assert completed("init --sp") == ["plain,--split"]
    assert completed("init --kind reg") == ["plain,regression"]
    assert completed("report runs/q") == ["file,runs/q"]
    assert completed("run qu") == completed("check qu") == ["plain,quickstart"]
    (tmp_path / "quiet.yaml").write_text("")
    assert completed("run qui", tmp_path) == ["plain,quickstart", "plain,quiet.yaml"]
    assert completed("run data/p", tmp_path) == ["file,data/p"]
