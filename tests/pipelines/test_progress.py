"""The display off a terminal, where it must be sparing, and on one."""

import io
import os
import re
import threading
import time

import pytest
from rich.console import Console

from compressor.tasks.sources.hub_set import parse
from pipelines.cli.shown import note
from pipelines.cli.work import predict_work
from pipelines.engine.runner import _console
from pipelines.file.data_sources import _progress
from pipelines.reporting.format import human_seconds
from pipelines.terminal.console_table import table
from pipelines.terminal.plain_console import PlainConsole, can_move
from pipelines.terminal.progress import Display, waiting


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (9.96, "10 s"), (78, "78 s"), (119, "119 s"), (150, "2 min"), (7500, "2 h 5 min")]
)
def test_durations_read_well(seconds, text):
    assert human_seconds(seconds) == text


def lines_of(steps, seconds_a_step):
    """What a bar of `steps` writes into a log."""
    stream, now = io.StringIO(), [0.0]
    display = Display(Console(file=stream, width=120), 9, 6, clock=lambda: now[0])
    with display.stage(2, "tune"), display.bar("training", steps) as bar:
        for step in range(steps):
            now[0] += seconds_a_step
            bar.note(f"loss {step}")
            bar.advance()
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_each_tenth_but_not_more_than_one_in_ten_seconds():
    assert lines_of(100, 0.05) == []
    assert lines_of(100, 0.25) == [
        "[2/9] tune    training: 40 %, loss 39, about 15 s left",
        "[2/9] tune    training: 80 %, loss 79, about 5.0 s left",
    ]
    assert len(lines_of(100, 2.5)) == 9


def test_a_long_bar_is_never_silent_for_more_than_half_a_minute():
    assert len(lines_of(10_000, 1)) == 10_000 // 30


def test_work_without_a_step_is_not_silent_either(monkeypatch):
    """One step of a bar that takes long, and work that has no bar: a line each, from a clock that really runs."""
    monkeypatch.setattr("pipelines.terminal.progress.LONGEST_SILENCE", 0.1)
    stream = io.StringIO()
    display = Display(Console(file=stream, width=120), 9, 6)

    def wait_for(lines):
        end = time.monotonic() + 10
        while len(stream.getvalue().splitlines()) < lines and time.monotonic() < end:
            time.sleep(0.01)

    with display.stage(2, "export"):
        wait_for(1)
        with display.bar("exporting dense", 2) as bar:
            wait_for(2)
            bar.advance()
            wait_for(3)
        wait_for(4)
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"\d+\.\d s", "N s", line) for line in lines[:4]] == [
        "[2/9] export  working, N s so far",
        "[2/9] export  exporting dense: 0 %, N s so far",
        "[2/9] export  exporting dense: 50 %, about N s left",
        "[2/9] export  working, N s so far",
    ]
    assert not any("watch" in thread.name for thread in threading.enumerate()), "it ends with its stage"


def test_nothing_is_said_twice(monkeypatch):
    """What a stage says itself counts: the watch is silent then."""
    monkeypatch.setattr("pipelines.terminal.progress.LONGEST_SILENCE", 30)
    stream, now = io.StringIO(), [0.0]
    display = Display(Console(file=stream, width=120), 9, 6, clock=lambda: now[0])
    with display.stage(2, "tune"):
        now[0] = 29.0
        display.result("a word")
        now[0] = 58.0
        display.break_silence(0.0)
        now[0] = 59.0
        display.break_silence(0.0)
    assert stream.getvalue().splitlines() == ["[2/9] tune    a word", "[2/9] tune    working, 59 s so far"]


def test_a_terminal_keeps_one_line_a_stage():
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    display = Display(console, 2, 6)
    with display.stage(1, "tune"):
        with display.bar("training [all]", 2) as bar:
            bar.note("loss 0.5")
            bar.advance()
            display._live.refresh()
        display.result("done in 3 s")
    shown = stream.getvalue()
    assert "training [all]" in shown and "50%" in shown and "loss 0.5" in shown
    assert "[1/2] tune    done in 3 s\n" in shown


def test_what_a_terminal_obeys_is_shown_as_escapes(capsys):
    """Lines and bars of a run, tables, notes, and predictions: a text of a file, or a name in it, may hold anything."""
    hostile = "\u4e2d\t\x1b[2J\x9b\u202e"
    display = Display(PlainConsole(force_terminal=True, color_system=None, width=240), 2, 6)
    with display.stage(1, "tune"), display.bar(hostile.replace("\t", " "), 2):
        display._live.refresh()
    alone = Display(PlainConsole(width=120), 2, 6)
    alone.result(hostile)
    table((hostile, "b"), [(hostile, "c\nd")])
    note(f"{hostile}\n{hostile}")
    predict_work.show((hostile, "a pair"), "yes", as_json=False)
    shown, noted = capsys.readouterr()
    assert shown.count("\\x1b[2J\\x9b\\u202e") >= 5 and noted == "\u4e2d\t\\x1b[2J\\x9b\\u202e\n" * 2
    assert f"yes  {noted.splitlines()[0]}\n" in shown and "c" in shown and "d" in shown
    assert not any(part in shown for part in ("\x1b[2J", "\x9b", "\u202e"))


@pytest.mark.parametrize(("term", "moves"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_what_moves_needs_a_terminal_that_can(monkeypatch, tmp_path, term, moves):
    monkeypatch.setenv("TERM", term)
    for colours in (None, "1"):
        if colours:
            monkeypatch.setenv("FORCE_COLOR", colours)
        keyboard, screen = os.openpty()
        with os.fdopen(screen, "w") as terminal, (tmp_path / "log").open("w") as file:
            assert (can_move(terminal), can_move(file)) == (moves, False)
        os.close(keyboard)


def test_forced_colours_move_nothing_in_a_file(monkeypatch, capfd, tmp_path):
    """As on CI, where the log would get every frame of a spinner in place of a line now and then."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("pipelines.file.data_sources.QUIET_SECONDS", 0)
    display = Display(_console(), 9, 6)
    with display.stage(2, "tune"), display.bar("training", 2) as bar:
        bar.advance()
        display.result("done")
    with _progress(parse("hub:owner/name/train", tmp_path)) as say:
        say(5)
    assert capfd.readouterr() == ("[2/9] tune    done\n", "hub:owner/name/train: 5 rows\n")


def seen(monkeypatch, seconds, moment=0.05):
    """What a terminal on stderr gets while something works for so many seconds."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("pipelines.terminal.progress.MOMENT", moment)
    keyboard, screen = os.openpty()
    os.set_blocking(keyboard, False)
    with os.fdopen(screen, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", terminal)
        with waiting("reading [all] rows"):
            time.sleep(seconds)
        terminal.flush()
        try:
            return os.read(keyboard, 2**16).decode()
        except BlockingIOError:
            return ""
        finally:
            os.close(keyboard)


def test_work_before_a_run_is_told_on_a_terminal_after_a_moment(monkeypatch):
    shown = seen(monkeypatch, 0.3)
    # the cursor comes back at once, and again at the end: a signal may end the process between them
    assert "reading [all] rows" in shown and shown.count("\x1b[?25h") == 2
    assert seen(monkeypatch, 0.0, moment=30) == ""


@pytest.mark.parametrize("place", ["multiprocessing.parent_process", "pipelines.terminal.progress.helping"])
def test_processes_beside_the_users_tell_nothing_of_it(monkeypatch, place):
    monkeypatch.setattr(place, lambda: True)
    assert seen(monkeypatch, 0.2) == ""


def test_work_before_a_run_is_not_told_in_a_log(monkeypatch, capfd):
    monkeypatch.setattr("pipelines.terminal.progress.MOMENT", 0.0)
    with waiting("reading all rows"):
        time.sleep(0.05)
    assert capfd.readouterr() == ("", "")
