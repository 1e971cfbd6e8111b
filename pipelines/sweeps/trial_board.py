"""What a sweep shows while it runs: a live table of what runs where; lines where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from compressor.errors import CompressError
from compressor.printable import printable
from pipelines.reporting.format import human_seconds
from pipelines.stages.training_verdicts import UNLEARNT
from pipelines.sweeps.trial_events import TrialEvent
from pipelines.sweeps.trial_run import TrialOutcome, check_line


@dataclass
class _Row:
    """A running trial."""

    where: str
    text: str
    since: float


class TrialBoard:
    """Shows events of `total` trials through `say`, or, with a console that is a terminal, as a table of the running ones.

    `say` prints one permanent line. Control characters are shown as escapes. Trials that run in this process show their own
    progress: then there is no table. Errors that are `out_of_reach` are results, and not failures. Lines call a trial `unit`.
    """

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        console: Console | None = None,
        out_of_reach: Callable[[CompressError], bool] = lambda error: False,
        unit: str = "trial",
    ):
        self.total, self.unit, self.console, self._out_of_reach = total, unit, console, out_of_reach
        self.counts: Counter[str] = Counter()
        """Ended trials: done, out of reach, failed."""
        self._print, self._running, self._live, self._clock = say, {}, None, time.monotonic
        self._numbers: dict[str, int] = {}  # of the trials, in the order of their first start

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the table is on the terminal."""
        if self.console is None or not self.console.is_terminal:
            yield
            return
        # the table asks for its content four times a second, so that the seconds move
        with Live(console=self.console, transient=True, refresh_per_second=4, get_renderable=self.table) as self._live:
            yield

    def on(self, event: TrialEvent) -> None:
        """Show an event."""
        if event.kind == "started":
            number = self._numbers.setdefault(event.trial, len(self._numbers) + 1)
            self._running[event.trial] = _Row(event.where, "starting", self._clock())
            where = f" on {event.where}" if event.where else ""
            if self._live is None:
                self.note(f"{self.unit} {number} of {self.total}: {event.trial}{where}")
        elif event.kind == "said":
            if event.trial in self._running:
                self._running[event.trial].text = event.text
            if "starts once more" in event.text:
                self.note(f"{event.trial}: {event.text}")
        elif event.kind == "warned":
            self.note(f"{event.trial}: {event.text}")
        elif event.outcome is not None:
            self._running.pop(event.trial, None)
            self._ended(event, event.outcome)

    def _ended(self, event: TrialEvent, outcome: TrialOutcome) -> None:
        if outcome.error and self._out_of_reach(outcome.error):
            self.counts["out of reach"] += 1
            self.note(str(outcome.error))
        elif outcome.error:
            self.counts["failed"] += 1
            self.note(f"FAILED {outcome.error}".replace("\n", "\nFAILED "))
        else:
            self.counts["done"] += 1
            self._done(event, outcome)

    def _done(self, event: TrialEvent, outcome: TrialOutcome) -> None:
        if not event.where:  # in this process, the run has told it itself
            return
        self.note(f"[{self.counts.total()}/{self.total}] {event.trial}  done in {human_seconds(outcome.seconds)}")
        for failure in outcome.failures:
            self.note(check_line(failure))
        for task in outcome.unlearnt:
            self.note(": ".join(filter(None, (event.trial, task, UNLEARNT))))

    def note(self, text: str) -> None:
        """Print permanent lines, above the table if there is one."""
        lines = [printable(line) for line in text.split("\n")]
        if self._live is not None:
            self._live.console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)
            return
        for line in lines:
            self._print(line)

    def close(self, text: str) -> None:
        """The last line, when the table is gone."""
        self._print(printable(text))

    def table(self) -> Table:
        """The running trials, where each runs, for how long, and its last line."""
        done, failed, beyond = (self.counts[word] for word in ("done", "failed", "out of reach"))
        waiting = self.total - self.counts.total() - len(self._running)
        ended = f"{done} of {self.total} {self.unit}s done, {f'{beyond} out of reach, ' if beyond else ''}{failed} failed"
        title = f"{ended}, {len(self._running)} running, {waiting} waiting"
        table = Table(self.unit, "where", "time", "doing", title=title, box=box.SIMPLE_HEAD, title_justify="left", expand=True)
        for name, row in list(self._running.items()):
            seconds = human_seconds(self._clock() - row.since)
            doing = Text(printable(row.text), overflow="ellipsis", no_wrap=True)
            table.add_row(Text(printable(name)), Text(row.where), seconds, doing)
        return table


def counts_of(outcomes: list[TrialOutcome]) -> str:
    """'stages run: tune 24, select 1; reused: select 23', of trials that finished."""
    groups = {
        word: Counter(entry for outcome in outcomes for entry, _, was in outcome.stages if was is reused)
        for word, reused in (("stages run", False), ("reused", True))
    }
    parts = (
        f"{word}: {', '.join(f'{entry} {count}' for entry, count in found.items())}" for word, found in groups.items() if found
    )
    return "; ".join(parts)
