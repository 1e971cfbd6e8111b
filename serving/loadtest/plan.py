"""The levels of a load test: as they are asked for on the command line, and one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor.errors import CheckError, UserError
from serving.loadtest.answer_check import FEW
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import Target, measure
from serving.loadtest.senders import MOST_IN_FLIGHT
from serving.loadtest.traffic import Outputs

CLOSED = (1, 4, 16)
"""Clients of the levels that are measured if none is asked for."""
MOST_CLIENTS, MOST_RATE, MOST_FACTOR = 1024, 100_000.0, 100.0


@dataclass(frozen=True)
class Wish:
    """A level that is asked for: so many clients, a rate, or a rate as a multiple of the best closed loop's throughput."""

    concurrency: int = 0
    rate: float = 0.0
    factor: float = 0.0


def wishes(concurrency: str | None, rate: str | None, processes: int = 1) -> list[Wish]:
    """The levels of '1,4,16' clients and rates like '50,0.8x,2x', the closed loops first, that so many `processes` send. Raises
    UserError E751."""
    levels = [Wish(concurrency=int(_number(word, "--concurrency", MOST_CLIENTS, int))) for word in _words(concurrency)]
    needed = math.ceil(max((level.concurrency for level in levels), default=0) / MOST_IN_FLIGHT)
    if needed > processes:
        what = f"--concurrency: a process sends at most {MOST_IN_FLIGHT} requests at a time"
        raise UserError("E751", what, f"Add --clients {needed}")
    rates = _words(rate)
    if not levels and (not rates or any(word.endswith("x") for word in rates)):
        levels = [Wish(concurrency=count) for count in CLOSED]
    for word in rates:
        if word.endswith("x"):
            levels.append(Wish(factor=_number(word[:-1], "--rate", MOST_FACTOR)))
        else:
            levels.append(Wish(rate=_number(word, "--rate", MOST_RATE)))
    return levels


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _number(word: str, option: str, most: float, type_: Callable[[str], float] = float) -> float:
    try:
        number = type_(word)
    except ValueError:
        number = -1.0
    if not 0 < number <= most:
        example = "1,4,16" if option == "--concurrency" else "50,200 or 0.8x,2x"
        raise UserError("E751", f"{option}: '{word}' is not a number up to {most:g}", f"Write it like {option} {example}")
    return number


def run_levels(
    fleet: Fleet,
    target: Target,
    levels: Sequence[Wish],
    limits: Load,
    deadline: float | None,
    expected: Sequence[Outputs],
    done: Callable[[dict[str, Any]], None] = lambda level: None,
) -> list[dict[str, Any]]:
    """Measure the levels in order; `limits` holds what all have in common, `done` is called after each. Raises as `measure`,
    and UserError E712, E713, E747 for a server that gives no statistics before the first."""
    measured: list[dict[str, Any]] = []
    if levels:
        target.statistics()
    for number, wish in enumerate(levels):
        best = max((level["throughput"] for level in measured if level["mode"] == "closed"), default=0.0)
        rate = wish.rate or wish.factor * best
        if not (rate or wish.concurrency):
            what = f"{wish.factor:g}x is a multiple of the throughput, and nothing was answered before"
            fix = "See the errors of the closed loops, raise --seconds, or give requests a second"
            raise UserError("E751", what, fix)
        load = replace(limits, concurrency=wish.concurrency, rate=rate, seed=number)
        measured.append(measure(fleet, target, load, deadline, expected))
        done(measured[-1])
    return measured


def require_answers(levels: Sequence[dict[str, Any]]) -> None:
    """Raises CheckError E750 if answers under load were not those of the rows alone, or a measured level has none; UserError
    E751 for a level that was too short for a request."""
    for level in levels:
        answers = level["answers"]
        if 0 < level["requests"] <= sum(level["errors"].values()):
            raise CheckError("E750", "no request was answered", "See the errors above, and the server's log", level["load"])
        if answers["wrong"] or answers["changed"] > FEW * answers["answers"]:
            count = answers["wrong"] + answers["changed"]
            what = f"{count} of {answers['answers']} answers under load differ from those of the same row alone"
            raise CheckError("E750", what, "The server mixes rows up, or its model is not deterministic", level["load"])
    if short := next((level for level in levels if not level["requests"]), None):
        did = "was due" if short["mode"] == "open" else "ended"
        what = f"no request {did} within the {short['seconds']:g} s that were measured"
        raise UserError("E751", what, "Raise --seconds", short["load"])
