"""What a search tries next: Optuna's tree-structured Parzen estimator (TPE; Bergstra et al., 2011, 2013), one trial at a time.

The values of a trial depend on the keys, a seed, the trial's number and the trials before it, and on nothing else: the study is
built anew for each trial, so nothing has to outlive a killed search but the values and results of its trials.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from compressor.errors import UserError
from pipelines.sweeps.search_ranges import Range
from pipelines.sweeps.table_file import Axes
from serving.bundle import install

RANDOM = 10
"""The first trials are random, until so many have a result: Optuna's default."""
ATTEMPTS = 20
"""After so many proposals that were tried before, a trial is drawn at random."""

Values = dict[str, Any]
"""Key -> the value that a trial has."""


@dataclass(frozen=True)
class Tried:
    """A trial before: its values; its score, which is None if it failed; `pending` if it is to be counted as running."""

    values: Values
    score: float | None
    pending: bool = False


def require_optuna() -> ModuleType:
    """Optuna, silenced. Raises UserError E901."""
    try:
        import optuna
    except ImportError:
        raise UserError("E901", "--search needs the package optuna", install("sweep")) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(axes: Axes, seed: int, history: Sequence[Tried], *, falls: bool = False) -> Values:
    """The values of the trial after those of `history`: different from all of them, so there must be more settings than these.

    A higher score is better, unless it `falls`. Trials that failed are known, and not learned from. Raises UserError E901.
    """
    optuna = require_optuna()
    space = {key: _distribution(optuna, values) for key, values in axes.items()}
    known = [_frozen(optuna, space, axes, tried) for tried in history]
    before = [tried.values for tried in history]
    for attempt in itertools.count():
        sampler = _sampler(optuna, seed, len(history), attempt)
        study = optuna.create_study(direction="minimize" if falls else "maximize", sampler=sampler)
        study.add_trials(known)
        found = study.ask(space).params
        values = {key: _value(axes[key], found[key]) for key in axes}
        if values not in before:
            return values


def _sampler(optuna: ModuleType, seed: int, number: int, attempt: int) -> Any:
    own = int(np.random.SeedSequence((seed, number, attempt)).generate_state(1)[0])
    if attempt >= ATTEMPTS:
        return optuna.samplers.RandomSampler(own)
    return optuna.samplers.TPESampler(n_startup_trials=RANDOM, seed=own)


def _distribution(optuna: ModuleType, values: list[Any] | Range) -> Any:
    if not isinstance(values, Range):
        # as JSON: Optuna's choices are no lists or mappings
        return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in values])
    kind = optuna.distributions.IntDistribution if values.whole else optuna.distributions.FloatDistribution
    return kind(values.low, values.high, log=values.log)


def _frozen(optuna: ModuleType, space: dict[str, Any], axes: Axes, tried: Tried) -> Any:
    states = optuna.trial.TrialState
    params = {key: value if isinstance(axes[key], Range) else json.dumps(value) for key, value in tried.values.items()}
    ended = states.FAIL if tried.score is None else states.COMPLETE
    state = states.RUNNING if tried.pending else ended
    value = tried.score if state == states.COMPLETE else None
    return optuna.trial.create_trial(params=params, distributions=space, state=state, value=value)


def _value(axis: list[Any] | Range, param: Any) -> Any:
    return axis.rounded(param) if isinstance(axis, Range) else json.loads(param)
