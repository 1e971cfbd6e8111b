"""Whatever comes through a door is accepted, or refused with a code: no traceback, no hang, no memory without end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.fuzz import seeds
from tests.fuzz.cases import ROWS
from tests.fuzz.harness import SECONDS, Case, attempt, in_this_process
from tests.fuzz.targets import TARGETS

CASES = int(os.environ.get("FUZZ_CASES", "20000"))
WORKERS = int(os.environ.get("FUZZ_WORKERS", "2"))
FUZZED = [name for name, target in TARGETS.items() if target.share]
FEW = 5
"""Cases of each target in the fast suite."""
SMALL = (
    seeds.data,
    seeds.graphs,
    seeds.trained,
    seeds.pipelines,
    partial(seeds.models, architectures=("bert", "modernbert")),
    partial(seeds.deltas, methods=("dsee", "lora")),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Some sound inputs of every target."""
    folder = tmp_path_factory.mktemp("seeds")
    for make in SMALL:
        make(folder)
    return folder


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TimeoutError in what takes longer."""

    def stop(_number: int, _frame: object) -> None:
        raise TimeoutError(f"over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", FUZZED)
def test_sound_inputs_are_accepted(root, tmp_path, name):
    target = TARGETS[name]
    for seed in target.seeds(root):
        if name == "run" and not list(seed.glob("runs/.store/deploy-*")):
            continue  # nothing was deployed, which `serve` says with a code
        for file in target.victims(seed):
            found = attempt(target, Case(seed, file, "sound", (seed / file).read_bytes()), tmp_path)
            assert found == ("accepted", ""), (seed.name, file)


@pytest.mark.parametrize("name", FUZZED)
def test_a_few_cases(root, name):
    with at_most(FEW * SECONDS):
        found = list(in_this_process(root, {name: range(FEW)}))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_failed_once(root, tmp_path, row):
    target = TARGETS[row.target]
    seed = root / target.folder / row.seed if row.seed else target.seeds(root)[0]
    with at_most(SECONDS):
        outcome, told = attempt(target, Case(seed, row.file, row.name, row.make((seed / row.file).read_bytes())), tmp_path)
    assert outcome in row.codes.split(), f"{outcome} {told}"


@pytest.mark.slow
def test_all_cases(tmp_path):
    """FUZZ_CASES scales; one case again: python -m tests.fuzz --targets TARGET --only NUMBER."""
    report = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.fuzz", "--json", report, "--cases", str(CASES), "--workers", str(WORKERS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert report.is_file(), done.stderr[-3000:]
    found = json.loads(report.read_text())
    print(found["report"])
    assert not found["findings"], found["report"]


BAD_DOORS = '''
import json, os, pathlib, sys, time
from tests.fuzz import harness
from tests.fuzz.targets import TARGETS, Target

def door(folder, name):
    """Sound for the seed; else, by the first letter, what must be told."""
    content = (folder / name).read_bytes()
    if content == b"sound":
        return
    turn = sum(content) % 5
    if turn == 0:
        os.abort()
    if turn == 1:
        while True:
            pass
    if turn == 2:
        held = bytearray(300 << 20)
        held[:] = b"x" * len(held)
    if turn == 3:
        raise ZeroDivisionError

root = pathlib.Path(sys.argv[1])
(root / "bad" / "seed").mkdir(parents=True)
(root / "bad" / "seed" / "file.bin").write_bytes(b"sound")
harness.SECONDS, harness.PATIENCE, harness.MEMORY = 1.0, 3.0, 100 << 20
TARGETS["bad"] = Target("bad", "bad", ("*.bin",), door, (), 1.0)
found = harness.Harness(root, 3).run({"bad": range(20)})
counts = {f"{name}: {cause}": len(group) for (name, cause), group in found.causes().items()}
print(json.dumps([counts, found.outcomes.total()]))
'''


@pytest.mark.slow
def test_the_harness_tells_of_every_kind(tmp_path):
    """A crash, a hang, memory and an exception, each by its case, and no case is lost."""
    command = [sys.executable, "-c", BAD_DOORS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    counts, total = json.loads(done.stdout)
    told = {cause.removeprefix("bad: ") for cause in counts}
    assert told == {f"process ended with {-signal.SIGABRT}", "over 1 s", "over 0 GB", "ZeroDivisionError"}
    assert total == 20
