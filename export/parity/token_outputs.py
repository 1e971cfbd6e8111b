"""Comparison of logits per token instead of per row, by the same table of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from export.parity.bounds import BOUNDS
from export.parity.compare import Batches, ParityResult, compare

TOKENS_AT_A_TIME = 256
"""Arrays of so many tokens and a vocabulary are made beside the logits."""


def compare_tokens(
    hop: str, kind: str, reference: np.ndarray, candidate: np.ndarray, *, batches: Sequence[Batches] = ({}, {})
) -> ParityResult:
    """`compare` for logits (tokens, classes) where classes may be a vocabulary; the metric is the share of tokens whose most
    likely class stays the same. `batches` as there, the reference's and the candidate's. A worst "row" is a token.

    Of each token's classes only those that decide go in: the likeliest of both sides, the largest, those that differ most, and
    the likeliest others of the reference.
    """
    shapes = [(reference, candidate), *((batches[0][name], other) for name, other in batches[1].items())]
    if any(expected.shape != other.shape or not np.isfinite(other).all() for expected, other in shapes):
        return compare(hop, kind, reference, candidate, reference.argmax(axis=-1), batches=tuple(batches))
    (ours, theirs), *others = [_deciding(kind, *pair) for pair in shapes]
    made = tuple({name: pair[side] for name, pair in zip(batches[1], others, strict=True)} for side in (0, 1))
    result = compare(hop, kind, ours, theirs, ours.argmax(axis=1), batches=made)
    return replace(result, mean_difference=float(np.abs(candidate - reference).mean()))


def _deciding(kind: str, reference: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits (tokens, up to 6) of the classes that decide, of both."""
    starts = range(0, max(1, len(reference)), TOKENS_AT_A_TIME)
    parts = [(reference[start : start + TOKENS_AT_A_TIME], candidate[start : start + TOKENS_AT_A_TIME]) for start in starts]
    columns = np.concatenate([_columns(kind, *part) for part in parts])
    return np.take_along_axis(reference, columns, axis=1), np.take_along_axis(candidate, columns, axis=1)


def _columns(kind: str, reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """The classes (tokens, up to 6) that decide, each once."""
    difference = np.abs(candidate - reference)
    scaled = difference / np.maximum(1.0, np.abs(reference)) if BOUNDS[kind].relative else difference
    deciding = (reference, candidate, np.abs(reference), difference, scaled)
    chosen = np.zeros(reference.shape, dtype=bool)
    for values in deciding:
        np.put_along_axis(chosen, values.argmax(axis=1)[:, None], True, axis=1)
    # where one class decides in several ways, the likeliest others of the reference: a class twice would have a margin of 0
    count = min(len(deciding) + 1, reference.shape[1])
    return np.sort(np.argpartition(-np.where(chosen, np.inf, reference), count - 1, axis=1)[:, :count], axis=1)
