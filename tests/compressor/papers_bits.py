"""The papers' bit-level storage in closed form: what a delta needs on disk, without its task head.

Every function returns a `StoredBits`, in scalars and mask entries rather than in bits, for comparison with the contents of a
delta file (`compressor.storage.delta_file.stored`).
"""

from __future__ import annotations

from collections.abc import Iterable

from compressor.storage.bits import StoredBits


def low_rank(rank: int, matrices: Iterable[tuple[int, int]]) -> StoredBits:
    """LoRA: r (m + n) scalars for every matrix (out, in)."""
    return StoredBits(sum(rank * (rows + columns) for rows, columns in matrices))


def vera(rank: int, matrices: Iterable[tuple[int, int]]) -> StoredBits:
    """VeRA: m + r for every matrix (out, in); the frozen random matrices are known by their seed."""
    return StoredBits(sum(rows + rank for rows, _ in matrices))


def sparse(places: int) -> StoredBits:
    """Selective methods and DSEE's ΔW_s: a value and a flat int32 index per entry of Ω, 8 bytes in float32."""
    return StoredBits(places, indices=places)


def pruned(matrices: Iterable[tuple[int, int]]) -> StoredBits:
    """Masks over whole matrices (out, in): one bit per entry."""
    return StoredBits(pruned_entries=sum(rows * columns for rows, columns in matrices))


def adapters(hidden: int, bottleneck: int, blocks: int) -> StoredBits:
    """Plain bottleneck adapters: 2 b d + b + d scalars in every block."""
    return StoredBits(blocks * (2 * bottleneck * hidden + bottleneck + hidden))


def shared_adapter(hidden: int, bottleneck: int, masks: int) -> StoredBits:
    """ProPETL equation 14: one prototype, and a mask over its two matrices for every block (and every task)."""
    return StoredBits(2 * bottleneck * hidden + bottleneck + hidden, mask_entries=2 * bottleneck * hidden * masks)


def masked_adapters(hidden: int, bottleneck: int, blocks: int, keep: float) -> StoredBits:
    """ProPETL equation 15, masks without sharing: in every block the kept fraction of the matrices, and the biases."""
    return StoredBits(blocks * (round(2 * keep * bottleneck * hidden) + bottleneck + hidden))


def shared_low_rank(hidden: int, rank: int, masks: int) -> StoredBits:
    """ProPETL equation 16: one prototype for query and one for value."""
    return StoredBits(4 * rank * hidden, mask_entries=4 * rank * hidden * masks)


def masked_low_rank(hidden: int, rank: int, blocks: int, keep: float) -> StoredBits:
    """ProPETL equation 17, masks without sharing: in every block the kept fraction of the factors for query and value."""
    return StoredBits(blocks * round(4 * keep * rank * hidden))


def shared_prefix(hidden: int, length: int, masks: int) -> StoredBits:
    """ProPETL equation 18: one prefix of keys and values."""
    return StoredBits(2 * length * hidden, mask_entries=2 * length * hidden * masks)


def masked_prefixes(hidden: int, length: int, blocks: int, keep: float) -> StoredBits:
    """ProPETL equation 19, masks without sharing: in every block the kept fraction of keys and values.

    The paper prints their number, 2 k l d L, without the 32 bits of each that its other equations have.
    """
    return StoredBits(blocks * round(2 * keep * length * hidden))
