"""Corruption by force: one file of a finished run is damaged, the run is started again, and nothing damaged may be reused.

A damage is noticed when the run is refused (E803), or when what was damaged is made again. The cases are drawn from a seed, so
that every one can be looked at again by its number.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console

from compressor.errors import CompressError
from compressor.run_store import LOCK_FILE, MANIFEST
from compressor.tensor_file import write_tensors
from compressor.training.unfinished import CHANGING, seal
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.stages.trainings import start_anew_without
from tests.pipelines import toys
from tests.tiny import STAGES, write_pipeline

CASES = 500
KEPT = (LOCK_FILE, "report.json")
"""Of a run's folder: what a run that is refused leaves as it was."""
CACHE = ".store/.cache/"
GOOD = ("E803", "made again")
SHOWN = 8
"""Cases of one outcome that a failure lists."""


@dataclass(frozen=True)
class Damage:
    """`kind` of damage to the file `path`; `other` is the file that it is exchanged with."""

    number: int
    kind: str
    path: str
    other: str = ""

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} {self.path}" + (f" with {self.other}" if self.other else "")


@dataclass
class Snapshot:
    """Every file of the store and the runs in `folder` as it was when it was taken, but for logs: nothing reads them again."""

    folder: Path
    files: dict[str, bytes] = field(init=False)
    seen: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.files = {name: path.read_bytes() for name, path in self._paths()}
        self.seen = {name: _stamp(path) for name, path in self._paths()}

    def _paths(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and path.suffix != ".log" and path.parent != self.folder:
                yield str(path.relative_to(self.folder)), path

    def restore(self) -> None:
        """Bring the folder back; only what was touched is written."""
        for name, path in list(self._paths()):
            if name not in self.files:
                path.unlink()
                for folder in path.parents:
                    if any(folder.iterdir()):
                        break
                    folder.rmdir()
        for name, content in self.files.items():
            path = self.folder / name
            if not path.is_file() or _stamp(path) != self.seen[name]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                self.seen[name] = _stamp(path)


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_mtime_ns, facts.st_size


def flip(content: bytes, draw: random.Random) -> bytes:
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice((0, len(content) // 2, len(content) - 2, draw.randrange(len(content))))]


def append(content: bytes, draw: random.Random) -> bytes:
    return content + draw.randbytes(draw.choice((1, 8, 4096)))


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {"flip": flip, "truncate": truncate, "append": append}
KINDS = ("flip", "flip", *CHANGES, "delete", "exchange", "exchange")
"""Bit flips and exchanges are what sizes alone do not tell."""


def damages(files: dict[str, bytes], count: int, draw: random.Random) -> Iterator[Damage]:
    """`count` damages, spread evenly over the files that hold something; every third one is to a manifest if there are any."""
    manifests = [name for name in files if name.endswith(MANIFEST)]
    others = [name for name in files if name not in manifests and files[name]]
    for number in range(count):
        names = manifests if manifests and number % 3 == 0 else others
        path, kind = names[number // 3 % len(names) if manifests else number % len(names)], draw.choice(KINDS)
        yield Damage(number, kind, path, draw.choice(_partners(path, files)) if kind == "exchange" else "")


def _partners(path: str, files: dict[str, bytes]) -> list[str]:
    """Files of other content beside this one, or of its name elsewhere."""
    place = Path(path)
    near = [other for other in files if Path(other).parent == place.parent or Path(other).name == place.name]
    return [other for other in near if files[other] != files[path]] or [other for other in files if files[other] != files[path]]


def inflict(damage: Damage, snapshot: Snapshot, draw: random.Random) -> None:
    """Do it. What reads as the same JSON afterwards is no damage, and is drawn again."""
    path, content = snapshot.folder / damage.path, snapshot.files[damage.path]
    if damage.kind == "delete":
        path.unlink()
    elif damage.kind == "exchange":
        path.write_bytes(snapshot.files[damage.other])
        (snapshot.folder / damage.other).write_bytes(content)
    else:
        changed = CHANGES[damage.kind](content, draw)
        while _same(changed, content):
            changed = CHANGES[damage.kind](content, draw)
        path.write_bytes(changed)


def _same(changed: bytes, content: bytes) -> bool:
    try:
        return changed == content or json.loads(changed) == json.loads(content)
    except (ValueError, RecursionError):
        return False


@dataclass
class Trial:
    """Damages of one finished run, and what became of each: `counts` by kind and outcome, `bad` what must not be."""

    pipeline: Path
    out: Path
    counts: Counter = field(default_factory=Counter)
    bad: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sound = Snapshot(self.out)
        self.name = load_pipeline(self.pipeline).name

    def carry_out(self, count: int, seed: int = 0) -> None:
        """Damage, run again, look, bring back: `count` times."""
        draw = random.Random(seed)
        read_again = {name: content for name, content in self.sound.files.items() if not name.startswith(CACHE)}
        for damage in list(damages(read_again, count, draw)):
            inflict(damage, self.sound, draw)
            outcome, told = self.outcome(damage)
            self.counts[damage.kind, outcome] += 1
            if outcome not in GOOD:
                self.bad.setdefault(outcome, []).append(f"{damage}: {told}")
            self.sound.restore()

    def outcome(self, damage: Damage) -> tuple[str, str]:
        """What a run over the damaged files comes to: (a word, one of GOOD where all is well; the rest)."""
        try:
            result = run_pipeline(load_pipeline(self.pipeline), self.out, console=Console(quiet=True))
        except CompressError as error:
            return self._refused(damage, error)
        except Exception as error:
            return "no code", f"{type(error).__name__}: {error}"
        reused = {result.artifacts[entry].folder.name for entry in result.reused}
        for name in (damage.path, damage.other):
            place = Path(name)
            if not name or self._as_before(name):
                continue
            if place.parts[0] != ".store":
                return "unnoticed", f"{name} is still damaged after a run that went well"
            if place.parts[1] in reused:
                return "unnoticed", f"{place.parts[1]} was reused"
        return "made again", ""

    def _refused(self, damage: Damage, error: CompressError) -> tuple[str, str]:
        if error.code != "E803":
            return "another code", str(error)
        for name in KEPT:
            path = f"{self.name}/{name}"
            if path not in (damage.path, damage.other) and not self._as_before(path):
                return "record lost", f"refused, and {name} of the last good run is gone or another"
        return "E803", ""

    def _as_before(self, name: str) -> bool:
        """Whether a file is what it was; run.json holds times, so there it is that the run is done."""
        path = self.out / name
        if not path.is_file():
            return False
        if name == f"{self.name}/run.json":
            return _status(path) == "done"
        return path.read_bytes() == self.sound.files[name]

    def report(self) -> str:
        """Counts by kind and outcome, and some cases of each outcome that must not be."""
        rows = [f"{kind:<10} {outcome:<12} {count}" for (kind, outcome), count in sorted(self.counts.items())]
        return "\n".join([f"of {self.counts.total()} damages:", *rows, told(self.bad)])


def told(bad: dict[str, list[str]]) -> str:
    """Each outcome that must not be, how often it was, and the first of its cases."""
    return "\n".join(line for outcome, cases in bad.items() for line in (f"{len(cases)} {outcome}:", *cases[:SHOWN]))


def _status(path: Path) -> str:
    try:
        return json.loads(path.read_bytes())["status"]
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def test_toy_stages(tmp_path, monkeypatch):
    toys.install(monkeypatch)
    pipeline, out = toys.write_project(tmp_path / "project"), tmp_path / "runs"
    run_pipeline(load_pipeline(pipeline), out, console=Console(quiet=True))
    trial = Trial(pipeline, out)
    trial.carry_out(40)
    assert not trial.bad, trial.report()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """A pipeline of every stage but deploy, with a measured target, and the folder of its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    target = {"speedup": 1.2, "batch": 2, "length": 16, "rounds": 3}
    # how narrow a block becomes is up to the clock: no second select, whose robust PCA finds no places in the narrowest
    recover = {"recover": {"method": "same", "epochs": 2, "learning_rate": 0.02, "batch_size": 8}}
    stages = [*STAGES[:2], {"prune": {"target": target, "rows": 32}}, recover, *STAGES[5:7], *STAGES[8:]]
    path = write_pipeline(folder, stages=stages)
    run_pipeline(load_pipeline(path), folder / "runs", console=Console(quiet=True))
    return path, folder / "runs"


@pytest.mark.slow
def test_a_finished_run(finished):
    trial = Trial(*finished)
    trial.carry_out(CASES)
    print(trial.report())
    assert not trial.bad, trial.report()


@pytest.mark.slow
def test_what_was_measured_before(finished):
    """A table of latencies or prices, a teacher's outputs or a control that was damaged: none is used as it is."""
    path, out = finished
    sound, draw, bad = Snapshot(out), random.Random(0), {}
    tables = {name: content for name, content in sound.files.items() if name.startswith(CACHE) and content}
    assert tables
    made = {stage: next((out / ".store").glob(f"{stage}-*")) for stage in ("prune", "recover")}
    for damage in list(damages(tables, 30, draw)):
        if damage.kind == "delete":  # it is measured again, on other seconds
            continue
        inflict(damage, sound, draw)
        # the stage that reads what is damaged
        stage = "recover" if Path(damage.path).name.startswith(("teacher", "control")) else "prune"
        shutil.rmtree(made[stage])
        try:
            run_pipeline(load_pipeline(path), out, until=stage, console=Console(quiet=True))
            if (out / damage.path).read_bytes() != sound.files[damage.path]:
                bad.setdefault("used as it is", []).append(str(damage))
        except Exception as error:
            if getattr(error, "code", "") != "E803":
                bad.setdefault("not E803", []).append(f"{damage}: {type(error).__name__}: {error}")
        sound.restore()
    assert not bad, told(bad)


GROWING = {"method": "selective", "strategy": "increment", "budget": 60, "checkpoints": [10, 20], "steps": 6, "batch_size": 8}
"""Has left both smaller budgets behind at its third checkpoint."""


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "holds"), [(STAGES[:2], "checkpoint-"), ([{"tune": GROWING}], "budgets/20/")])
def test_an_unfinished_training(tmp_path, monkeypatch, stages, holds):
    """Goes on from what is whole, and comes to the same bytes."""
    path, out = write_pipeline(tmp_path, stages=stages), tmp_path / "runs"
    run_pipeline(load_pipeline(path), out, console=Console(quiet=True))
    whole, tuned = Snapshot(out), next((out / ".store").glob("tune-*"))
    shutil.rmtree(tuned)
    _cut_off(path, out, monkeypatch)
    cut, draw, bad = Snapshot(out), random.Random(0), {}
    left = {name: content for name, content in cut.files.items() if name.startswith(".store/.unfinished")}
    assert any(holds in name for name in left)
    made = {name: content for name, content in whole.files.items() if name.startswith(f".store/{tuned.name}")}
    for damage in list(damages(left, 30, draw)):
        inflict(damage, cut, draw)
        try:
            run_pipeline(load_pipeline(path), out, console=Console(quiet=True))
            if other := [name for name, content in made.items() if (out / name).read_bytes() != content]:
                bad.setdefault("another result", []).append(f"{damage}: {', '.join(other)}")
        except Exception as error:
            bad.setdefault("no result", []).append(f"{damage}: {type(error).__name__}: {error}")
        cut.restore()
    assert not bad, told(bad)


@pytest.mark.parametrize(("lost", "stays"), [(10, False), (20, True)])
def test_a_training_without_a_smaller_budget_that_it_has_left_behind_starts_anew(tmp_path, lost, stays):
    """That of the size that it has is written again."""
    work, checkpoint = tmp_path / "work", tmp_path / "work" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    write_tensors({"growth.count": torch.tensor(20)}, checkpoint / CHANGING)
    for folder in (checkpoint, *(work / "budgets" / str(places) for places in (10, 20))):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "delta.safetensors").write_bytes(b"a delta")
        seal(folder)
    start_anew_without(work / "budgets", [10, 20, 40], work)
    assert checkpoint.is_dir()
    (work / "budgets" / str(lost) / "delta.safetensors").write_bytes(b"")
    start_anew_without(work / "budgets", [10, 20, 40], work)
    assert work.is_dir() == stays


def _cut_off(path: Path, out: Path, monkeypatch) -> None:
    """Run until the training has left three checkpoints, and stop there as Ctrl-C does."""
    import compressor.training.callbacks
    import compressor.training.trainer

    sealed = []

    def stop_at_the_third(folder: Path) -> None:
        seal(folder)
        sealed.append(folder)
        if len(sealed) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compressor.training.callbacks, "SAVE_EVERY", 0.0)
        patch.setattr(compressor.training.trainer, "seal", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(load_pipeline(path), out, console=Console(quiet=True))
