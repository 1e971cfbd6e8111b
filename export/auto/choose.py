"""Choice of the exported file: the fastest by measurement whose loss of the metric is within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from export.parity.bounds import BOUNDS
from export.parity.compare import ParityResult, why_refused

MOST_EXCLUDED = 0.5
"""Largest share of matrices left in fp32 before int8 is given up: beyond it little speed is gained."""


@dataclass(frozen=True)
class Candidate:
    """One candidate file. `excluded` are the matrices that stay fp32 in it, `ms` its median time and `speed` that of the
    fastest fp32 file over it, both of the last timing, `result` its comparison with the fp32 model in PyTorch, `verdict` why
    it is kept or not."""

    runtime: str
    precision: str
    path: Path
    excluded: tuple[str, ...] = ()
    ms: float | None = None
    speed: float | None = None
    result: ParityResult | None = None
    within: bool = False
    verdict: str = ""

    @property
    def loss(self) -> float:
        """Loss of the task's metric as a fraction: 0.005 is half a point."""
        return self.result.metric_reference - self.result.metric_candidate

    def to_json(self) -> dict[str, Any]:
        """The entry in an artifact's metadata, as JSON data; without figures where the outputs could not be compared."""
        compared = self.result is not None and self.result.has_figures
        quality = {"loss": self.loss, "agreement": self.result.agreement} if compared else {}
        names = ("runtime", "precision", "ms", "speed", "within", "verdict")
        return {**{name: getattr(self, name) for name in names}, "excluded": len(self.excluded), **quality}


def with_verdict(trial: Candidate, result: ParityResult, budget: float) -> Candidate:
    """The trial with its verdict: its loss of the metric is `budget` (a fraction) at most, and it passes its parity bound."""
    trial = replace(trial, result=result)
    # 1e-9: a loss of exactly the budget must not fail by rounding
    if trial.loss > budget + 1e-9:
        return replace(trial, verdict=f"loses {100 * trial.loss:.2f} points, {100 * budget:g} allowed")
    if not result.passed:
        return replace(trial, verdict=f"not the same function ({why_refused(result)})")
    return replace(trial, within=True, verdict="within the budget")


def counts(matrices: int) -> Iterator[int]:
    """Numbers of matrices to exclude, tried in turn: 1, 2, 4, ... and the maximum allowed."""
    most, count = math.floor(matrices * MOST_EXCLUDED), 1
    while count < most:
        yield count
        count *= 2
    if most:
        yield most


def is_in_vain(failed: ParityResult, most: ParityResult) -> bool:
    """Whether no matrices in fp32 help a file that `failed`: with the `most` of them its outputs still move further than
    rounding all matrices explains, so with fewer of them they do, too."""
    return "rounding" in most.failed and most.distance > BOUNDS[failed.kind].rounding * failed.rounding


def choose_candidate(
    trials: Sequence[Candidate],
    *,
    clock: Callable[[Sequence[Candidate]], list[Candidate]],
    judge: Callable[[Candidate], Candidate],
    spared: Callable[[Candidate], Iterator[Candidate]],
) -> tuple[Candidate, list[Candidate]]:
    """(the trial that is kept, all trials with their verdicts: those that were evaluated, in order, then slower ones).

    The fastest is judged first. `clock` times trials in one run, `judge` sets the verdict of one; `spared` writes files of an
    int8 trial with more and more matrices left in fp32: the first within the budget is timed again with the remaining trials,
    and ranked among them. A trial that has a verdict, as those in fp32 have, is not judged again. One in fp32 is kept if
    nothing faster passes.
    """

    def judged(trial: Candidate) -> Candidate:
        return trial if trial.verdict else judge(trial)

    waiting, seen = clock(trials), {}
    while True:
        fastest = min(waiting, key=lambda trial: trial.ms)
        waiting.remove(fastest)
        seen[fastest.path] = fastest = judged(fastest)
        if fastest.within:
            narrower = [trial.within for trial in seen.values() if trial.precision != "fp32"]
            if fastest.precision == "fp32" and narrower and not any(narrower):
                seen[fastest.path] = fastest = replace(fastest, verdict=f"the last resort: {fastest.verdict}")
            for trial in waiting:  # those that were evaluated keep their places
                slower = "within the budget, slower" if trial.path in seen else "slower"
                seen[trial.path] = replace(trial, verdict=f"{slower} than what is kept")
            return fastest, list(seen.values())
        for mixed in map(judged, spared(fastest)):
            seen[mixed.path] = mixed
            if mixed.within:
                waiting = clock([*waiting, mixed])
                seen |= {trial.path: trial for trial in waiting if trial.path in seen}
                break
