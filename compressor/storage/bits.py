"""The papers' bit-level storage in closed form: what a delta needs on disk, without its task head. Torch-free.

Every function returns a `StoredBits`, in scalars and mask entries rather than in bits, for comparison with the contents of a
delta file (`compressor.storage.delta_file.stored`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredBits:
    """What is stored: `scalars` of `width` bits, `indices` of 32 bits, `mask_entries` of one bit (ProPETL section 4.3).

    Not trained are `pruned_entries` of masks over weights, also one bit each, and `untrained` scalars of refits, of `width`
    bits.
    """

    scalars: int = 0
    indices: int = 0
    mask_entries: int = 0
    width: int = 32
    pruned_entries: int = 0
    untrained: int = 0

    @property
    def bits(self) -> int:
        """Bit-level storage: Σ ρ_i b_i."""
        return self.width * (self.scalars + self.untrained) + 32 * self.indices + self.mask_entries + self.pruned_entries

    @property
    def bytes(self) -> int:
        """Bytes on disk: all masks are packed in one row of bits, so that at most 7 bits are lost in the whole file."""
        return (self.bits + 7) // 8

    @property
    def trained(self) -> int:
        """Number of trained scalars: the values, and a score for every mask entry."""
        return self.scalars + self.mask_entries

    def share(self, parameters: int) -> float:
        """Stored bits as a fraction of a float32 model with `parameters` parameters."""
        return self.bits / (32 * parameters)

    def __add__(self, other: StoredBits) -> StoredBits:
        scalars, indices = self.scalars + other.scalars, self.indices + other.indices
        masks, pruned = self.mask_entries + other.mask_entries, self.pruned_entries + other.pruned_entries
        return StoredBits(scalars, indices, masks, self.width, pruned, self.untrained + other.untrained)


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
