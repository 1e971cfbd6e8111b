"""The search over the grid: a coarse part of it, then neighbours of the best, then the contenders again and again.

The setting that the model has is a contender to the end: it stays unless another one is measured to be better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from serving.loadtest.tune.setting_grid import Grid, Setting
from serving.loadtest.tune.trials import Trial

COARSE_ROUNDS, FINAL_ROUNDS = 2, 5
LEADERS = 2
"""The best settings whose neighbours are measured next."""
CLOSE = 0.08
"""Settings that score less by at most this share of the best are contenders: rounds differ by as much on a busy machine."""
MOST_CONTENDERS = 4
EQUAL = 0.02
"""Among settings that differ by less, the present one is chosen, else the one with the fewest instances: each holds the
model in memory once."""


class Search:
    """The trials of a grid. `evaluate` of (trials, rounds) adds rounds to each, interleaved; `present` is the setting of the
    model so far, if it is one of the grid."""

    def __init__(
        self,
        grid: Grid,
        limit: float,
        evaluate: Callable[[Sequence[Trial], int], None],
        start: int = 4,
        present: Setting | None = None,
    ):
        self.grid, self.limit, self.start = grid, limit, start
        self.present = [present] if present in grid.settings() else []
        self._evaluate = evaluate
        self.trials: dict[Setting, Trial] = {}

    def run(self) -> Trial:
        """Search, and return the chosen trial, whose score is 0 if no setting keeps the limit."""
        self.measure(dict.fromkeys([*self.present, *self.grid.coarse()]), COARSE_ROUNDS)
        while unknown := self._unknown_neighbours():
            self.measure([*unknown, self.ranked()[0].setting], COARSE_ROUNDS)
        self.measure(self.contenders(), FINAL_ROUNDS)
        return self.choice()

    def exhaust(self, rounds: int) -> Trial:
        """Measure every setting of the grid in so many rounds: what `run` is compared with."""
        self.measure(self.grid.settings(), rounds)
        return self.choice()

    def measure(self, settings: Iterable[Setting], rounds: int) -> None:
        chosen = [self.trials.setdefault(setting, Trial(setting, self.limit, self.start)) for setting in settings]
        self._evaluate(chosen, rounds)

    def ranked(self) -> list[Trial]:
        """Best first; those that do not keep the limit come last, by their latency."""
        return sorted(self.trials.values(), key=lambda trial: (-trial.score, min(map(trial.p99, trial.probes), default=0)))

    def contenders(self) -> list[Setting]:
        """The best settings, and the present one."""
        ranked = self.ranked()
        close = [trial.setting for trial in ranked if trial.score >= (1 - CLOSE) * ranked[0].score]
        return list(dict.fromkeys([*close[:MOST_CONTENDERS], *self.present]))

    def choice(self) -> Trial:
        """Of the settings that are as good as the best, the present one, or the one with the fewest instances, then the better
        one."""
        ranked = self.ranked()
        equal = [trial for trial in ranked if trial.score >= (1 - EQUAL) * ranked[0].score]
        return (
            min(equal, key=lambda trial: (trial.setting not in self.present, trial.setting.instances, -trial.score))
            if ranked[0].score
            else ranked[0]
        )

    def _unknown_neighbours(self) -> list[Setting]:
        leaders = self.ranked()[:LEADERS]
        near = dict.fromkeys(setting for trial in leaders for setting in self.grid.neighbours(trial.setting))
        return [setting for setting in near if setting not in self.trials]
