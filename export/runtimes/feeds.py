"""What an exported graph is fed with, and its logits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from export.runtimes.runtime import Session

PAST = "past_key_values."
"""Prefix of the inputs with the cached keys and values of a generating model."""


def feeds_of(session: Session, encoding: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The feeds of a session: inputs that its graph does not have are left out, and one that generates gets an empty past."""
    shapes = {value.name: value.shape for value in session.get_inputs()}
    feeds = {name: values for name, values in encoding.items() if name in shapes}
    if past := {name: shape for name, shape in shapes.items() if name.startswith(PAST)}:
        attention_mask = encoding["attention_mask"]
        feeds |= {name: np.zeros((len(attention_mask), shape[1], 0, shape[3]), np.float32) for name, shape in past.items()}
        feeds["position_ids"] = positions_of(attention_mask)
    return feeds


def positions_of(mask: np.ndarray) -> np.ndarray:
    """The position of every token (batch, tokens): the number of tokens before it, wherever the padding is."""
    return np.maximum(mask.cumsum(axis=1) - 1, 0)


def run(session: Session, encoding: dict[str, np.ndarray]) -> np.ndarray:
    """Logits (batch, classes) for int64 arrays (batch, length), or (batch, length, vocabulary) from a generative graph."""
    return session.run(["logits"], feeds_of(session, encoding))[0]


def timed_runs(session: Session, encoding: dict[str, np.ndarray], count: int) -> list[float]:
    """Milliseconds of each of some runs on the same inputs."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run(session, encoding)
        times.append(1000 * (time.perf_counter() - start))
    return times
