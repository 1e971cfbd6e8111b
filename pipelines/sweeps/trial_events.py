"""What an engine is: it runs trials anywhere and in any order, and reports what happens. The simplest runs them in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from compressor.errors import UserError
from pipelines.sweeps.trial_run import Perform, TrialJob, TrialOutcome

ATTEMPTS = 2
"""How often a trial is started whose worker dies: the second attempt resumes from the checkpoints of the first."""


@dataclass(frozen=True)
class TrialEvent:
    """A trial `started` at `where` ('' in this process), `said` a line, or `ended` with its outcome."""

    kind: Literal["started", "said", "ended"]
    trial: str
    where: str = ""
    text: str = ""
    outcome: TrialOutcome | None = None


Engine = Callable[[Sequence[TrialJob], Perform], Iterator[TrialEvent]]
"""Runs every job with the given function. Closing the iterator stops what is running."""


def in_turn(jobs: Sequence[TrialJob], perform: Perform) -> Iterator[TrialEvent]:
    """The engine of one process: one trial after the other, each with its own progress display."""
    for job in jobs:
        yield TrialEvent("started", job.name)
        yield TrialEvent("ended", job.name, outcome=perform(job, None))


def died(job: TrialJob, how: str) -> TrialOutcome:
    """The outcome of a trial whose workers died."""
    what = f"its worker {how}, {ATTEMPTS} times"
    fix = "Often the memory was full: use fewer --workers or a smaller batch_size. The same command tries again"
    return TrialOutcome(error=UserError("E811", what, fix, f"trial {job.name}"))
