"""How the entries of a growing Ω are allotted to tensors, step by step: the figures of ID3's section 6 (7, 8 and 9)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

ALLOCATION = "allocation.json"
"""File of an artifact with `compressor.selection.growth.Growth.allocation`."""
RECORDED = 64
"""Largest number of steps of a training that are recorded."""


def recorded_steps(steps: Collection[int]) -> tuple[int, ...]:
    """The steps, in order, of which the allocation is recorded: all, or RECORDED of them, evenly spaced, first and last too."""
    ordered = sorted(steps)
    if len(ordered) <= RECORDED:
        return tuple(ordered)
    return tuple(ordered[place * (len(ordered) - 1) // (RECORDED - 1)] for place in range(RECORDED))


def tensor_sparsity(counts: Sequence[int]) -> float:
    """Share of the tensors without an entry of Ω (ID3 section 6, figure 8); `counts` are the entries of each."""
    return sum(not count for count in counts) / len(counts)


def sparsity_entropy(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Entropy in [0, 1] of the tensors' shares |P_j ∩ Ω| / |P_j| (ID3 section 6, figure 9): 1 where all are equal, 0 where one
    tensor has all entries.

    The paper does not print how the shares become probabilities: here they are divided by their sum, and the entropy by that of
    equal shares, ln M for M tensors.
    """
    shares = [count / size for count, size in zip(counts, sizes, strict=True)]
    total = sum(shares)
    if not total or len(shares) == 1:
        return 0.0
    return -sum(share / total * math.log(share / total) for share in shares if share) / math.log(len(shares))
