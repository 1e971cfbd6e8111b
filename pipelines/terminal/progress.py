"""The progress display of a run: bars on a terminal, and occasional readable lines in a CI log."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console

from compressor.printable import printable
from compressor.training.processes import helping
from pipelines.engine.stage import Progress
from pipelines.reporting.format import human_seconds
from pipelines.terminal.plain_console import PlainConsole, can_move

QUIET_SECONDS = 10
"""Off a terminal, lines of one bar are at least this far apart, ..."""
QUIET_SHARE = 0.1
"""... and at least this share of the bar, ..."""
LONGEST_SILENCE = 30
"""... unless nothing was printed for this many seconds: then a line is printed in any case, because a silent run looks dead to
users and to CI."""
MOMENT = 1.0
"""Seconds that work before a run takes before a terminal says what it is."""


class Display:
    """Shows on `console` the progress of a run of `total` stages. `width` is the longest stage id."""

    def __init__(self, console: Console, total: int, width: int, clock: Callable[[], float] = time.monotonic):
        self.console, self.total, self.width, self.clock = console, total, width, clock
        self.label = ""
        self._live: progress.Progress | None = None
        self._bars: list[_Lines] = []
        self.last_said = clock()

    def say(self, text: str) -> None:
        """Print one plain line above any moving display."""
        self.last_said = self.clock()
        console = self._live.console if self._live else self.console
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, number: int, entry: str) -> Iterator[None]:
        """Label the following output with a stage; on a terminal a spinner turns beside its name."""
        self.label = f"[{number:>{len(str(self.total))}}/{self.total}] {entry:<{self.width}}"
        if not self.console.is_terminal:
            with self._never_silent():
                yield
            return
        with _live(self.console) as live:
            live.add_task(self.label, total=None, note="")
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextlib.contextmanager
    def _never_silent(self) -> Iterator[None]:
        """Context that prints a line after every LONGEST_SILENCE without output, from a background thread."""
        ended, start = threading.Event(), self.clock()
        self.last_said = start

        def watch() -> None:
            while not ended.wait(max(self.last_said + LONGEST_SILENCE - self.clock(), 0.01)):
                self.break_silence(start)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def break_silence(self, start: float) -> None:
        """Print the progress of the stage that began at `start`, if nothing was printed for LONGEST_SILENCE."""
        now = self.clock()
        if now - self.last_said >= LONGEST_SILENCE:
            bars = [*self._bars]  # another thread opens and closes bars
            self.result(bars[-1].line(now) if bars else f"working, {human_seconds(now - start)} so far")

    def result(self, text: str) -> None:
        """Print a permanent line of the stage: how it ended, or a note for the user."""
        self.say(f"{self.label}  {text}")

    @contextlib.contextmanager
    def bar(self, description: str, total: int) -> Iterator[Progress]:
        """A bar of `total` steps inside the current stage."""
        if self._live is None:
            lines = _Lines(self, description, total)
            self._bars.append(lines)
            try:
                yield lines
            finally:
                self._bars.remove(lines)
            return
        row = self._live.add_task(printable(description), total=total, note="")
        try:
            yield _Row(self._live, row)
        finally:
            self._live.remove_task(row)


def _live(console: Console) -> progress.Progress:
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(compact=True),
        progress.TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,  # during a stage these go to its log
        redirect_stderr=False,
    )


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Context of work before the stages whose steps nobody counts: on a terminal stderr says after a MOMENT `what` it is, and
    for how long, until it ends. Nothing elsewhere, nor in a process beside the user's, as it would write into that one's
    display."""
    if not can_move(sys.stderr) or multiprocessing.parent_process() is not None or helping():
        yield
        return
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}", markup=False), progress.TimeElapsedColumn())
    console = PlainConsole(stderr=True, force_terminal=True)
    live = progress.Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    live.add_task(printable(what), total=None)

    def start() -> None:
        live.start()
        console.show_cursor(True)  # a signal that ends the process here runs nothing behind it

    after = threading.Timer(MOMENT, start)
    after.daemon = True
    after.start()
    try:
        yield
    finally:
        after.cancel()
        after.join()  # it may be starting the display right now
        live.stop()


class _Row:
    """A progress bar on a terminal."""

    def __init__(self, live: progress.Progress, row: progress.TaskID):
        self._live, self._row = live, row

    def advance(self, steps: int = 1) -> None:
        self._live.advance(self._row, steps)

    def note(self, text: str) -> None:
        self._live.update(self._row, note=text)


class _Lines:
    """A progress bar as lines of a log."""

    def __init__(self, display: Display, description: str, total: int):
        self._display, self._description, self._total = display, description, total
        self._done, self._shown, self._note = 0, 0, ""
        self._start = self._last = display.clock()

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        now = self._display.clock()
        silence, share = now - self._last, (self._done - self._shown) / max(self._total, 1)
        is_due = silence >= QUIET_SECONDS and share >= QUIET_SHARE and self._done < self._total
        if is_due or now - self._display.last_said >= LONGEST_SILENCE:
            self._display.result(self.line(now))

    def note(self, text: str) -> None:
        self._note = text

    def line(self, now: float) -> str:
        """'training: 40 %, loss 0.3, about 15 s left'; the line is recorded as printed."""
        self._last, self._shown = now, self._done
        seconds = (now - self._start) / max(self._done, 1) * max(self._total - self._done, 0)
        remaining = f"about {human_seconds(seconds)} left" if self._done else f"{human_seconds(now - self._start)} so far"
        parts = [f"{100 * self._done / max(self._total, 1):.0f} %", self._note, remaining]
        return f"{self._description}: {', '.join(part for part in parts if part)}"
