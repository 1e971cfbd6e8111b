"""SIGKILL at seeded moments of a run of real stages: started again, the artifacts are those of an untouched run."""

import hashlib
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ENVIRONMENT
from tests.tiny import EVERYTHING, STAGES, write_pipeline

# torch is imported once and every attempt is a fork: what is killed is the run, not ten imports
RUNNER = textwrap.dedent(
    """
    import os, random, signal, sys, time
    import export.graph.trace, transformers.trainer, onnxruntime, compressor.training.callbacks
    from pathlib import Path
    from pipelines.file.config import load_pipeline
    from pipelines.engine.runner import run_pipeline

    # a checkpoint after every step, so that kills fall between checkpoints and inside of them
    compressor.training.callbacks.SAVE_EVERY = 0.0
    path, out, moments = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

    def attempt(deadline):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_pipeline(load_pipeline(path), out)
                code = 0
            finally:
                os._exit(code)
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    draw = random.Random(0)
    codes = [attempt(draw.uniform(0.05, 3.0)) for _ in range(moments)]
    print(codes, file=sys.stderr)
    sys.exit(attempt(200))
    """
)


def run(path: Path, out: Path, moments: int) -> str:
    """`moments` attempts that are killed, then one that may finish; returns what was said about their exit codes."""
    command = [sys.executable, "-c", RUNNER, str(path), str(out), str(moments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def contents(store: Path) -> dict[str, str]:
    """Every published file and its sha256; nothing else may be left lying in the store."""
    assert not [made.name for made in store.iterdir() if made.name.startswith((".work", ".old", ".unfinished"))]
    files = [file for file in sorted(store.rglob("*")) if file.is_file() and not file.name.startswith(".lock")]
    return {str(file.relative_to(store)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("moments", [2, 25])
def test_killed_many_times_gives_the_same_bytes(tmp_path, moments):
    """Through the export, which is the last stage whose content holds no time; with two kills, up to it."""
    stages = EVERYTHING[:7] if moments > 2 else STAGES[:6]
    path = write_pipeline(tmp_path, stages=stages, rows=80)
    said = run(path, tmp_path / "killed", moments)
    assert said.count(str(-signal.SIGKILL)) >= moments // 2, f"too few attempts were killed: {said}"
    run(path, tmp_path / "whole", 0)
    whole = contents(tmp_path / "whole" / ".store")
    assert contents(tmp_path / "killed" / ".store") == whole
    assert len([name for name in whole if name.endswith("artifact.json")]) == len(stages)
