"""Every kind of stored change, and of prototype that changes share, by its name in files."""

from __future__ import annotations

from compressor.deltas.kinds.adapter import Adapter, NormAdapter, ParallelAdapter
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.mask import Mask, WeightMask
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.kinds.prefix import Prefix
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.kinds.vera import Drawn, Vera
from compressor.deltas.links import Change
from compressor.deltas.sources import Prototype

KINDS: dict[str, type[Change]] = {
    cls.kind: cls
    for cls in (LowRank, Sparse, Offset, Refit, Mask, WeightMask, Vera, Adapter, NormAdapter, ParallelAdapter, Prefix)
}
"""A new kind is one file in `kinds/` and one row here."""

PROTOTYPES: dict[str, type[Prototype]] = {cls.kind: cls for cls in (Prototype, Drawn)}
