"""Cases by number, in processes that may hang, crash or eat memory: each of these is a finding, and the others go on."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.fuzz.mutators import mutate
from tests.fuzz.targets import TARGETS, Refused, Spoken, Target, clean

ROOT = Path(__file__).parents[2]
SECONDS = 10.0
"""Most that one case may take. One that takes longer is tried again, alone and by the processor's seconds: where other work
takes the cores, those of a clock say little."""
PATIENCE = 60.0
"""Seconds by the clock for a case that is tried again."""
MEMORY = 2 << 30
"""Most bytes that a process may come to hold beyond what it held before its cases."""
ADDRESSES = 6 << 30
"""Bytes of address space beyond that: more is refused, so that a case that wants everything leaves the machine alone."""
CHUNK = 200
"""Cases of one process."""
WARM = 60.0
"""Seconds for a process to begin: its first call imports what the others use."""


@dataclass(frozen=True)
class Finding:
    """A case that was neither accepted nor refused with a code; `cause` is alike for findings of one origin."""

    target: str
    number: int
    seed: str
    file: str
    mutation: str
    cause: str
    told: str

    def __str__(self) -> str:
        return f"{self.target} {self.number} ({self.seed}/{self.file}, {self.mutation}): {self.told}"


@dataclass
class Found:
    """What all cases came to: `outcomes` by target and word, the findings, and by target the most seconds of the processor."""

    outcomes: Counter = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)

    def causes(self) -> dict[tuple[str, str], list[Finding]]:
        """Findings by target and cause, the most frequent first."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for one in self.findings:
            groups.setdefault((one.target, one.cause), []).append(one)
        return dict(sorted(groups.items(), key=lambda group: -len(group[1])))

    def report(self, shown: int = 3) -> str:
        """A line for each target, then each cause with its first cases."""
        lines = []
        for target in dict.fromkeys(name for name, _ in self.outcomes):
            words = {word: count for (name, word), count in self.outcomes.most_common() if name == target}
            slowest = f", slowest {self.slowest.get(target, 0):.1f} s"
            lines.append(f"{target}: {sum(words.values())} cases{slowest}: " + ", ".join(f"{w} {n}" for w, n in words.items()))
        lines.append(f"{len(self.findings)} findings")
        for (target, cause), group in self.causes().items():
            lines += [f"{len(group)} x {target}: {cause}", *(f"    {one}" for one in group[:shown])]
        return "\n".join(lines)

    def to_json(self) -> dict:
        return {"report": self.report(), "findings": [asdict(one) for one in self.findings]}


@dataclass(frozen=True)
class Case:
    """Everything about a case but what comes of it."""

    seed: Path
    file: str
    mutation: str
    content: bytes


def case(target: Target, number: int, root: Path) -> Case:
    """Case `number` of a target, from its seeds below `root`: the same every time."""
    draw = random.Random(f"{target.name} {number}")
    seed = draw.choice(target.seeds(root))
    file = draw.choice(target.victims(seed))
    content = (seed / file).read_bytes()
    done, changed = mutate(file, content, draw, target.structure)
    if draw.random() < 0.1:
        again, changed = mutate(file, changed, draw, (mutate_bytes,))
        done = f"{done}, {again}"
    return Case(seed, file, done, changed)


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """A second change, whatever the first has left."""
    return content[: draw.randrange(len(content) + 1)] + draw.randbytes(1) + content[draw.randrange(len(content) + 1) :]


def attempt(target: Target, one: Case, scratch: Path) -> tuple[str, str]:
    """Give one case to its door in this process: (the code, "accepted", or "finding", and then the cause and what was told)."""
    from compressor.errors import CompressError

    folder = scratch / target.folder / one.seed.name
    if not folder.exists():
        shutil.copytree(one.seed, folder)
    path = folder / one.file
    path.write_bytes(one.content)
    try:
        target.door(folder, one.file)
    except Refused as error:
        return error.code, ""
    except CompressError as error:
        return ("finding", f"{error.code}|{error}") if error.exit_code == 1 else (error.code, "")
    except Spoken as error:
        return "finding", f"{_cause_of_words(str(error))}|{error}"
    except Exception as error:
        return "finding", f"{cause_of(error)}|{type(error).__name__}: {str(error)[:300]}"
    finally:
        shutil.copyfile(one.seed / one.file, path)
        clean(folder, one.seed)
    return "accepted", ""


def _cause_of_words(said: str) -> str:
    """What a command said, in few words: of a bug, the type of the exception and its place, from the log that it names."""
    if "stranger" in said or "E899" not in said:
        return said[:80] if "stranger" in said else said.splitlines()[0][:80]
    kind = re.search(r"unexpectedly \((\w+)", said)
    log = re.search(r"its traceback is in (\S+)", said)
    path = Path(log[1]) if log else None
    text = path.read_text(errors="replace") if path and path.is_file() else ""
    own = re.findall(rf'File "{re.escape(str(ROOT))}/((?!tests/)[^"]+)", line \d+, in (\S+)', text)
    return f"E899 {kind[1] if kind else ''}" + (f" at {':'.join(own[-1])}" if own else "")


def cause_of(error: BaseException) -> str:
    """The type of an exception and the project's innermost line that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT) and "/tests/" not in frame.filename]
    place = f" at {Path(own[-1].filename).relative_to(ROOT)}:{own[-1].name}" if own else ""
    return f"{type(error).__name__}{place}"


def _work(connection: Connection, target: Target, numbers: list[int], root: Path) -> None:
    """The life of a process: try the sound seeds, then case after case, saying what begins and what came of it."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    with tempfile.TemporaryDirectory() as scratch:
        _say_yes_to_everything(Path(scratch))
        tempfile.tempdir = scratch  # logs of bugs go with it
        for seed in target.seeds(root):
            file = target.victims(seed)[0]
            outcome, told = attempt(target, Case(seed, file, "sound", (seed / file).read_bytes()), Path(scratch))
            if outcome != "accepted":
                connection.send(("sound", f"{seed.name}: {outcome} {told}"))
                return
        before = _most_memory()
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + ADDRESSES,) * 2)
        for number in numbers:
            one = case(target, number, root)
            connection.send(("begins", number))
            clock = time.process_time()
            outcome, told = attempt(target, one, Path(scratch))
            seconds = time.process_time() - clock
            used = _most_memory() - before
            if used > MEMORY:
                outcome, told = "finding", f"over {MEMORY >> 30} GB|{used >> 20} MB more than before"
            connection.send(("ends", (number, outcome, told, seconds)))
            if used > MEMORY:
                break
    connection.send(("done", None))


def _say_yes_to_everything(scratch: Path) -> None:
    """Standard input as `yes |` gives it: a question whether to run a stranger's code is answered."""
    path = scratch / "yes"
    path.write_text("y\n" * 100_000)
    os.dup2(os.open(path, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, "r")


def _most_memory() -> int:
    """Bytes, the most that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Worker:
    """A process and the cases it has not told of yet. `alone`: one case, tried again."""

    target: Target
    numbers: list[int]
    process: multiprocessing.Process
    connection: Connection
    alone: bool
    deadline: float
    running: int | None = None


class Harness:
    """Runs cases in up to `workers` processes at once."""

    def __init__(self, root: Path, workers: int = 2):
        self.root, self.workers, self.found = root, workers, Found()
        self.waiting: list[tuple[Target, list[int], bool]] = []
        self.running: list[_Worker] = []

    def run(self, counts: dict[str, Iterable[int]]) -> Found:
        """The cases of these numbers of each target."""
        for name, numbers in counts.items():
            chunked = list(numbers)
            self.waiting += [(TARGETS[name], chunked[i : i + CHUNK], False) for i in range(0, len(chunked), CHUNK)]
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.workers:
                self._start(*self.waiting.pop(0))
            self._listen()
        return self.found

    def _start(self, target: Target, numbers: list[int], alone: bool) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_work, args=(theirs, target, numbers, self.root))
        process.start()
        theirs.close()
        self.running.append(_Worker(target, list(numbers), process, ours, alone, time.monotonic() + WARM))

    def _listen(self) -> None:
        ready = wait([one.connection for one in self.running], timeout=0.2)
        for worker in list(self.running):
            if worker.connection in ready:
                self._hear(worker)
            elif time.monotonic() > worker.deadline:
                self._stuck(worker)

    def _hear(self, worker: _Worker) -> None:
        try:
            word, said = worker.connection.recv()
        except EOFError:
            worker.process.join()
            self._lost(worker, f"process ended with {worker.process.exitcode}")
            return
        if word == "begins":
            worker.running = said
            worker.deadline = time.monotonic() + (PATIENCE if worker.alone else SECONDS)
        elif word == "ends":
            self._ended(worker, *said)
        elif word == "sound":
            self.found.findings.append(Finding(worker.target.name, -1, "", "", "none", "a sound input is refused", said))
            worker.numbers = []
            self._finish(worker)
        else:
            self._finish(worker)

    def _ended(self, worker: _Worker, number: int, outcome: str, told: str, seconds: float) -> None:
        name = worker.target.name
        if seconds > SECONDS and outcome != "finding":
            outcome, told = "finding", f"over {SECONDS:.0f} s|{seconds:.0f} s"
        self.found.slowest[name] = max(seconds, self.found.slowest.get(name, 0.0))
        worker.numbers.remove(number)
        worker.running, worker.deadline = None, time.monotonic() + WARM
        if outcome == "finding":
            self._tell(worker.target, number, *told.split("|", 1))
        else:
            self.found.outcomes[name, outcome] += 1

    def _tell(self, target: Target, number: int, cause: str, told: str) -> None:
        self.found.outcomes[target.name, "FINDING"] += 1
        one = case(target, number, self.root)
        self.found.findings.append(Finding(target.name, number, one.seed.name, one.file, one.mutation, cause, told))

    def _stuck(self, worker: _Worker) -> None:
        worker.process.kill()
        number = worker.running
        if number is None or worker.alone:
            self._lost(worker, f"over {SECONDS:.0f} s")
            return
        worker.numbers.remove(number)
        self.waiting.append((worker.target, [number], True))
        self._finish(worker)

    def _lost(self, worker: _Worker, what: str) -> None:
        """The process is gone in the middle of a case."""
        if worker.running is not None:
            worker.numbers.remove(worker.running)
            self._tell(worker.target, worker.running, what, what)
        else:
            self._tell(worker.target, worker.numbers.pop(0), f"{what}, between cases", what)
        self._finish(worker)

    def _finish(self, worker: _Worker) -> None:
        worker.process.join()
        worker.connection.close()
        self.running.remove(worker)
        if worker.numbers:
            self.waiting.insert(0, (worker.target, worker.numbers, worker.alone))


def numbers(total: int, targets: Iterable[str] = TARGETS) -> dict[str, range]:
    """How many cases each target gets of `total`, as the numbers of its cases."""
    return {name: range(round(total * TARGETS[name].share)) for name in targets}


def build_seeds(root: Path, targets: Iterable[str]) -> None:
    """The seeds of these targets, each made once."""
    for make in dict.fromkeys(make for name in targets for make in TARGETS[name].builders):
        make(root)


def in_this_process(root: Path, counts: dict[str, Iterable[int]]) -> Iterator[Finding]:
    """The same without other processes: for a few cases that are known not to crash."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, wanted in counts.items():
            for number in wanted:
                one = case(TARGETS[name], number, root)
                outcome, told = attempt(TARGETS[name], one, Path(scratch))
                if outcome == "finding":
                    cause, told = told.split("|", 1)
                    yield Finding(name, number, one.seed.name, one.file, one.mutation, cause, told)
