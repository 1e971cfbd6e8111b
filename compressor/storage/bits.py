"""What a delta needs on disk, without its task head, in the papers' bits (`compressor.storage.delta_file.stored`)."""

from __future__ import annotations

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
