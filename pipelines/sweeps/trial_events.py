"""What an engine is: it runs trials anywhere and in any order, and reports what happens. The simplest runs them in turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from compressor.errors import UserError
from pipelines.sweeps.trial_run import Perform, TrialJob, TrialOutcome

ATTEMPTS = 2
"""How often a trial is started whose worker dies: the second attempt resumes from the checkpoints of the first."""


@dataclass(frozen=True)
class TrialEvent:
    """A trial `started` at `where` ('' in this process), `said` a line, `warned` with one that is to stay, or `ended` with its
    outcome."""

    kind: Literal["started", "said", "warned", "ended"]
    trial: str
    where: str = ""
    text: str = ""
    outcome: TrialOutcome | None = None


Jobs = Iterable[TrialJob | None]
"""Trials in the order of their start; None stands for a trial that cannot start before one that is running has ended."""

Engine = Callable[[Jobs, Perform], Iterator[TrialEvent]]
"""Runs every job with the given function. It asks for the next job when it has room for one, and after the caller has taken
every event before: the caller may choose it by what has ended. Closing the iterator stops what is running."""


class Waiting:
    """The trials that are not running: first those whose worker died, then new ones."""

    def __init__(self, jobs: Jobs):
        self._new, self._again, self._starts = iter(jobs), deque(), Counter()

    def take(self) -> TrialJob | None:
        """The next trial to start; None if there is none, or none yet."""
        job = self._again.popleft() if self._again else next(self._new, None)
        if job is not None:
            self._starts[job.name] += 1
        return job

    def lost(self, job: TrialJob, where: str, how: str) -> TrialEvent:
        """Have a trial started again whose worker died; it ended if it was started ATTEMPTS times."""
        if self._starts[job.name] >= ATTEMPTS:
            return TrialEvent("ended", job.name, where, outcome=died(job, how))
        self._again.append(job)
        return TrialEvent("said", job.name, where, f"the worker {how}; the trial starts once more")


def in_turn(jobs: Jobs, perform: Perform) -> Iterator[TrialEvent]:
    """The engine of one process: one trial after the other, each with its own progress display."""
    for job in filter(None, jobs):
        yield TrialEvent("started", job.name)
        yield TrialEvent("ended", job.name, outcome=perform(job, None))


def died(job: TrialJob, how: str) -> TrialOutcome:
    """The outcome of a trial whose workers died."""
    what = f"its worker {how}, {ATTEMPTS} times"
    fix = "Often the memory was full: use fewer --workers or a smaller batch_size. The same command tries again"
    return TrialOutcome(error=UserError("E811", what, fix, f"trial {job.name}"))
